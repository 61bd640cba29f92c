"""ggufstream: an asyncio streaming loader for GGUF model files.

::

    async with await ggufstream.load("model.gguf", backend="vulkan") as model:
        weight = model["blk.0.attn_q.weight"]
        y = await model.linear("blk.0.attn_q.weight", x)

All but the errors is imported on first use, so that ``ggufstream --help`` does not wait for numpy. :func:`load` does
its imports in a thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggufstream import errors
from ggufstream.errors import (
    BackendUnavailableError,
    ClosedError,
    DeviceError,
    DeviceLostError,
    DigestMismatchError,
    FileChangedError,
    FileError,
    GGUFStreamError,
    JobCancelledError,
    JobError,
    MalformedFileError,
    ManifestError,
    MissingFileError,
    MissingPackageError,
    NoDeviceError,
    NotGGUFError,
    OptionError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    PlanViolationError,
    RowIndexError,
    TruncatedFileError,
    UnknownTensorError,
    UnreadableFileError,
    UnsupportedByDeviceError,
    UnsupportedFileError,
)

__all__ = [
    "Backend",
    "BackendUnavailableError",
    "Capabilities",
    "ClosedError",
    "DeviceError",
    "DeviceLostError",
    "DeviceRows",
    "DigestMismatchError",
    "Event",
    "EventSink",
    "FileChangedError",
    "FileError",
    "FileIndex",
    "GGUFStreamError",
    "Intent",
    "JobCancelledError",
    "JobError",
    "LoadJob",
    "LoadOptions",
    "LoadPlan",
    "LoadReport",
    "Loader",
    "MalformedFileError",
    "ManifestError",
    "MissingFileError",
    "MissingPackageError",
    "Model",
    "NoDeviceError",
    "NotGGUFError",
    "OptionError",
    "OutOfDeviceMemoryError",
    "OutOfHostMemoryError",
    "Placement",
    "PlanViolationError",
    "RowIndexError",
    "TruncatedFileError",
    "UnknownTensorError",
    "UnreadableFileError",
    "UnsupportedByDeviceError",
    "UnsupportedFileError",
    "VerifyReport",
    "Weight",
    "__version__",
    "errors",
    "events",
    "load",
    "make_plan",
    "open_backend",
    "read_index",
    "sinks",
    "verify",
]

if TYPE_CHECKING:
    from ggufstream import events, sinks
    from ggufstream.backends.base import Backend, Capabilities
    from ggufstream.backends.registry import open_backend
    from ggufstream.device_rows import DeviceRows
    from ggufstream.events import Event, EventSink
    from ggufstream.gguf_file import FileIndex, read_index
    from ggufstream.job import LoadJob
    from ggufstream.load_plan import LoadPlan
    from ggufstream.loader import Loader, load
    from ggufstream.model import Model, Weight
    from ggufstream.options import Intent, LoadOptions, Placement
    from ggufstream.plan import make_plan
    from ggufstream.report import LoadReport
    from ggufstream.verification import VerifyReport, verify

    __version__: str
else:  # out of a type checker's sight: with a module's __getattr__ it would take every misspelled name for right
    _MODULES = {
        "Backend": "backends.base",
        "Capabilities": "backends.base",
        "DeviceRows": "device_rows",
        "Event": "events",
        "EventSink": "events",
        "FileIndex": "gguf_file",
        "Intent": "options",
        "LoadJob": "job",
        "LoadOptions": "options",
        "LoadPlan": "load_plan",
        "LoadReport": "report",
        "Loader": "loader",
        "Model": "model",
        "Placement": "options",
        "VerifyReport": "verification",
        "Weight": "model",
        "load": "loader",
        "make_plan": "plan",
        "open_backend": "backends.registry",
        "read_index": "gguf_file",
        "verify": "verification",
    }

    def __getattr__(name: str) -> object:
        from importlib import import_module, metadata

        if name in _MODULES:
            value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        elif name in ("events", "sinks"):
            value = import_module(f"{__name__}.{name}")
        elif name == "__version__":
            try:
                value = metadata.version(__name__)
            except metadata.PackageNotFoundError:
                value = "0+unknown"  # run from a checkout that is not installed
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
