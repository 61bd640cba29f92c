"""ggufstream: an asyncio streaming loader for GGUF model files.

::

    async with await ggufstream.load("model.gguf", backend="vulkan") as model:
        weight = model["blk.0.attn_q.weight"]
        y = await model.linear("blk.0.attn_q.weight", x)

Names are imported on first use, so that ``ggufstream --help`` does not wait for numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ggufstream.backends.base import Backend, Capabilities
    from ggufstream.backends.registry import open_backend
    from ggufstream.errors import GGUFStreamError
    from ggufstream.events import Event, EventSink
    from ggufstream.gguf_file import FileIndex, read_index
    from ggufstream.loader import load
    from ggufstream.model import Model, Weight
    from ggufstream.options import Intent, LoadOptions, Placement
    from ggufstream.plan import LoadPlan, make_plan
    from ggufstream.report import LoadReport
    from ggufstream.verification import VerifyReport, verify

_MODULES = {
    "Backend": "backends.base",
    "Capabilities": "backends.base",
    "Event": "events",
    "EventSink": "events",
    "FileIndex": "gguf_file",
    "GGUFStreamError": "errors",
    "Intent": "options",
    "LoadOptions": "options",
    "LoadPlan": "plan",
    "LoadReport": "report",
    "Model": "model",
    "Placement": "options",
    "VerifyReport": "verification",
    "Weight": "model",
    "load": "loader",
    "open_backend": "backends.registry",
    "make_plan": "plan",
    "read_index": "gguf_file",
    "verify": "verification",
}

__all__ = [
    "Backend",
    "Capabilities",
    "Event",
    "EventSink",
    "FileIndex",
    "GGUFStreamError",
    "Intent",
    "LoadOptions",
    "LoadPlan",
    "LoadReport",
    "Model",
    "Placement",
    "VerifyReport",
    "Weight",
    "load",
    "make_plan",
    "open_backend",
    "read_index",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
