"""A web service that loads, serves and unloads GGUF models: FastAPI on top of ``ggufstream.Loader``. See README.md."""
