"""What the service is told from outside: environment variables ``GGUFSTREAM_SERVICE_…``, one for each field."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, DirectoryPath, Field, PositiveInt

__all__ = ["PREFIX", "Settings"]

PREFIX = "GGUFSTREAM_SERVICE_"


def _words(text: object) -> object:
    return [word.strip() for word in text.split(",") if word.strip()] if isinstance(text, str) else text


class Settings(BaseModel):
    """Sizes in bytes; in the environment ``256MiB`` will do. Raises ``pydantic.ValidationError``, a ``ValueError``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Annotated[DirectoryPath, AfterValidator(Path.resolve)]
    """The folder with the files. Nothing outside of it can be loaded."""
    backends: Annotated[tuple[str, ...], BeforeValidator(_words), Field(min_length=1)] = ("auto",)
    """What clients may choose from, the first where they do not choose: ``cpu``, ``vulkan:llvmpipe``, …"""
    staging_bytes: ByteSize = ByteSize(256 << 20)
    """Host memory for moving bytes, of all loads together."""
    max_jobs: PositiveInt = 2
    """Loads that run at once; others wait for their turn."""
    max_models: PositiveInt = 8
    """Models in memory and loads on their way, together."""
    max_rows: PositiveInt = 64
    """Rows of a table in one request."""
    max_streams: PositiveInt = 64
    """Clients that watch at once."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """The defaults, changed by the variables that are set.

        Raises:
            ValueError: A variable has a value that cannot be used; the message names the field.
        """
        given = {name: environment.get(PREFIX + name.upper()) for name in cls.model_fields}
        return cls.model_validate({name: text for name, text in given.items() if text})
