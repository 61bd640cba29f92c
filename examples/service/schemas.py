"""What goes over the wire: requests, and what is answered. Bytes and seconds are plain numbers."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from examples.service.errors import ErrorInfo
from ggufstream.events import Stage

__all__ = [
    "ArenaState",
    "LoadRequest",
    "LoadStage",
    "LoadState",
    "MemoryState",
    "ModelInfo",
    "Rows",
    "TensorInfo",
    "glob_regex",
]

Glob = Annotated[str, Field(min_length=1, max_length=200, examples=["blk.0.*"])]
"""``*`` stands for any text, ``?`` for any character."""


LoadStage = Stage | Literal["cancelling", "unloading", "unloaded"]


class LoadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    file: Annotated[str, Field(min_length=1, max_length=1024)]
    """As in the listing."""
    backend: Annotated[str | None, Field(max_length=100)] = None
    """One of those that are allowed; ``null``: the first of them."""
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Of loads that wait for their turn the one with the highest goes first."""
    wait: bool = True
    """Where other loads hold the memory that this one needs: wait for it, or fail."""
    select: Annotated[list[Glob], Field(max_length=16)] = []
    """Only tensors whose name one of these patterns matches; empty: all."""
    lazy: Literal["auto", "on", "off", "all"] = "auto"
    """Which lookup tables stay in the file."""


class ArenaState(BaseModel):
    name: str
    memory: str
    """Whose memory it is in."""
    planned_bytes: int
    allocated_bytes: int = 0


class LoadState(BaseModel):
    id: str
    load_id: str
    """The same for those that share one load and one model's memory."""
    file: str
    backend: str
    device: str | None
    """Once it is decided."""
    priority: int
    attached: bool
    """It ends with the connection that it was submitted on."""
    stage: LoadStage
    bytes_done: int
    """That the device has finished."""
    bytes_total: int
    tensors_done: int
    tensors_total: int
    bytes_per_second: int
    seconds: float
    """Since bytes began to move; all of it once it is loaded."""
    seconds_left: float | None
    arenas: list[ArenaState]
    waits_for: str | None
    """Why it waits: who holds the memory."""
    error: ErrorInfo | None


class MemoryState(BaseModel):
    rss_bytes: int
    """Resident memory of the service."""
    staging_bytes: int
    """Host memory in use for moving bytes."""
    staging_limit_bytes: int
    held_bytes: dict[str, int]
    """Allocated for models, by memory."""
    loop_lag_seconds: float
    """By how much the event loop was late, at most in the last second."""


class TensorInfo(BaseModel):
    name: str
    type: str
    shape: list[int]
    intent: str
    placement: str
    layout: str
    bytes: int
    """In the file."""


class ModelInfo(BaseModel):
    id: str
    file: str
    backend: str
    device: str
    tensors: int
    arenas: list[ArenaState]
    report: dict[str, Any]
    """All figures of the load, as ``ggufstream load --json`` has them."""


class Rows(BaseModel):
    tensor: str
    shape: list[int]
    rows: list[list[float | None]]
    """Decoded; ``null`` for what is no finite number."""


def glob_regex(globs: list[str]) -> str | None:
    """One regular expression for some patterns, ``None`` for none. Its time is linear, whatever a client sends."""

    def one(glob: str) -> str:
        first, *others = (re.escape(piece).replace(r"\?", ".") for piece in glob.split("*"))
        if not others:
            return first
        # Atomic groups: of each piece the first place that fits is as good as any, so nothing is tried twice.
        return first + "".join(f"(?>.*?{piece})" for piece in others[:-1]) + f".*{others[-1]}"

    return rf"\A(?s:{'|'.join(map(one, globs))})\Z" if globs else None
