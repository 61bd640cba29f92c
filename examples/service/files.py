"""The folder with the models. Clients name a file as the listing names it; there is no other way to a path."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from examples.service.errors import UnknownError
from ggufstream.errors import printable

__all__ = ["FileInfo", "Folder"]

_MOST_FILES = 1000
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")


class FileInfo(BaseModel):
    name: str
    """Relative to the folder; of a split model that of its first shard."""
    bytes: int
    shards: int = 1


class Folder:
    """Files that may be loaded. All methods but ``hide`` block: call them in a thread.

    Args:
        root: The folder, with all symbolic links resolved.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        plain = str(root)
        self._spellings = {plain, printable(plain), json.dumps(plain)[1:-1]}

    def listing(self) -> list[FileInfo]:
        """Every ``.gguf`` file in the folder and below, the first thousand by name; split ones once.

        What a symbolic link leads to counts only where it is in the folder too; a split model with a shard that leads
        out is left out as a whole.
        """
        found: dict[str, list[tuple[str, int | None]]] = defaultdict(list)
        for name, size in self._walk():
            shard = _SHARD.fullmatch(name)
            found[f"{shard['stem']}-{shard['total']}" if shard else name].append((name, size))
        files = []
        for members in found.values():
            sizes = [size for _, size in members if size is not None]
            if len(sizes) == len(members):
                files.append(FileInfo(name=min(members)[0], bytes=sum(sizes), shards=len(members)))
        return sorted(files, key=lambda file: file.name)[:_MOST_FILES]

    def _walk(self) -> Iterator[tuple[str, int | None]]:
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = Path(folder, name)
                if name.endswith(".gguf") and name.isprintable():
                    yield str(path.relative_to(self._root)), self._size(path)

    def _size(self, path: Path) -> int | None:
        """``None`` where it is no regular file in the folder."""
        try:
            real = path.resolve(strict=True)
            return real.stat().st_size if real.is_file() and real.is_relative_to(self._root) else None
        except (OSError, RuntimeError):  # gone since, or a loop of links
            return None

    def path(self, name: str) -> Path:
        """The path of a file of the listing.

        Raises:
            UnknownError: There is none of that name.
        """
        if all(file.name != name for file in self.listing()):
            raise UnknownError(f"there is no file {name!r}", remedy="GET /files lists all")
        return self._root / name

    def hide(self, text: str) -> str:
        """``text`` with paths relative to the folder: clients and logs need not know where it is."""
        for spelling in self._spellings:
            text = text.replace(f"{spelling}{os.sep}", "").replace(spelling, ".")
        return text

    def hide_in(self, value: Any) -> Any:
        """The same for every text in plain data."""
        match value:
            case str():
                return self.hide(value)
            case dict():
                return {key: self.hide_in(inner) for key, inner in value.items()}
            case list() | tuple():
                return [self.hide_in(inner) for inner in value]
        return value
