"""``GGUFSTREAM_SERVICE_MODELS=FOLDER python -m examples.service``."""

from __future__ import annotations

import sys

import uvicorn
from pydantic import ValidationError

from examples.service.app import create_app
from examples.service.logs import logging_to_stderr
from examples.service.settings import PREFIX, Settings


def main() -> None:
    try:
        settings = Settings.from_environment()
    except ValidationError as error:
        for one in error.errors():
            print(f"error: {PREFIX}{str(one['loc'][0]).upper()}: {one['msg']}", file=sys.stderr)
        sys.exit(2)
    app = create_app(settings)
    with logging_to_stderr(app.state.service.folder.hide):
        uvicorn.run(app, host=settings.host, port=settings.port, log_config=None)


if __name__ == "__main__":
    main()
