"""Counts native objects: whatever Vulkan creates, allocates or maps, until it is destroyed, freed or unmapped.

Every call of every backend goes through ``Vulkan.call``, which is watched. Kinds are the types of handles as the binding
declares them, so a new call is counted without being listed here; ``mapping`` is memory that is mapped.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cffi

from ggufstream.backends.vulkan import api as api_module
from ggufstream.backends.vulkan.api import Vulkan

__all__ = [
    "CREATES",
    "DESTROYS",
    "NATIVE",
    "NativeObject",
    "can_fail",
    "counts",
    "creators",
    "destroyers",
    "functions_used",
    "gives_handles",
]

MAPPING = "mapping"
CREATES = ("vkCreate", "vkAllocate", "vkMap")
DESTROYS = ("vkDestroy", "vkFree", "vkUnmap")

_KEPT = "device._keep_drivers_loaded"
"""Holds an instance until the process ends, because drivers do not like to be loaded again and again."""

_ffi = cffi.FFI()
_Key = tuple[str, int]


class NativeObject(NamedTuple):
    """Something of the driver's; ``made_by`` is the function that asked for it."""

    kind: str
    handle: int
    made_by: str
    parent: _Key | None = None
    """The pool that it goes with."""

    def __str__(self) -> str:
        return f"{self.kind} {self.handle:#x} of {self.made_by}"


class NativeObjects:
    """What exists now, over all instances of ``Vulkan``; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[_Key, tuple[Vulkan, NativeObject]] = {}
        self.strays: list[str] = []
        """What was destroyed but did not exist."""

    def watch(self) -> None:
        """From now on, count."""
        real = Vulkan.call

        def call(api: Vulkan, name: str, *arguments: Any) -> int:
            if name.startswith(DESTROYS):
                # Before the call: another thread may be given the same handle as soon as it is free.
                self._destroyed(name, arguments)
            code = real(api, name, *arguments)
            if name.startswith(CREATES) and code == 0:
                self._created(api, name, arguments)
            return code

        Vulkan.call = call  # type: ignore[method-assign]

    def live(self, api: Vulkan | None = None, *, kept: bool = False) -> frozenset[NativeObject]:
        """What exists, of one ``Vulkan`` or of all; with ``kept``, also what stays until the process ends."""
        with self._lock:
            return frozenset(
                native
                for owner, native in self._live.values()
                if (api is None or owner is api) and (kept or not native.made_by.endswith(_KEPT))
            )

    def check(self, before: Collection[NativeObject]) -> None:
        """Compare with what was there before.

        Raises:
            AssertionError: There are more or fewer of a kind, or something was destroyed that did not exist.
        """
        with self._lock:
            strays, self.strays = self.strays, []
        after = self.live()
        left, gone = after - set(before), set(before) - after
        if strays or counts(left) != counts(gone):
            raise AssertionError(
                f"native objects left: {counts(left)}; gone: {counts(gone)}\n"
                + "\n".join([*(f"left: {native}" for native in left), *(f"gone: {native}" for native in gone), *strays])
            )

    def forget(self, natives: Collection[NativeObject]) -> None:
        """They are left behind on purpose."""
        with self._lock:
            for native in natives:
                del self._live[native.kind, native.handle]

    def _created(self, api: Vulkan, name: str, arguments: tuple[Any, ...]) -> None:
        if name.startswith("vkMap"):
            key = MAPPING, _address(arguments[1])
        else:
            key = _kind(_ffi.typeof(arguments[-1]).item), _address(arguments[-1][0])
        native = NativeObject(*key, _caller(), _pool(arguments[1]) if name.startswith("vkAllocate") else None)
        with self._lock:
            if key in self._live:
                self.strays.append(f"{name} gave a handle that was there already: {native}")
            self._live[key] = api, native

    def _destroyed(self, name: str, arguments: tuple[Any, ...]) -> None:
        # The last argument of all but unmapping are the allocation callbacks.
        handle = arguments[-1] if name.startswith("vkUnmap") else arguments[-2]
        key = (MAPPING if name.startswith("vkUnmap") else _kind(_ffi.typeof(handle))), _address(handle)
        if not key[1]:
            return
        with self._lock:
            if self._live.pop(key, None) is None:
                self.strays.append(f"{name} of a {key[0]} {key[1]:#x} that does not exist, by {_caller()}")
            for child in [key_ for key_, (_, native) in self._live.items() if native.parent == key]:
                del self._live[child]


NATIVE = NativeObjects()


def counts(natives: Collection[NativeObject]) -> dict[str, int]:
    """How many there are of each kind."""
    return dict(sorted(Counter(native.kind for native in natives).items()))


def functions_used() -> Iterator[str]:
    """The Vulkan functions that ``api.py`` names."""
    for name in re.findall(r'(?<!f)"(vk[A-Z]\w+)"', Path(api_module.__file__).read_text()):
        yield str(name)


def creators() -> dict[str, str]:
    """The functions of ``api.py`` that begin something, with its kind."""
    return {
        name: MAPPING if name.startswith("vkMap") else _kind(_signature(name).args[-1].item)
        for name in functions_used()
        if name.startswith(CREATES)
    }


def destroyers() -> dict[str, str]:
    """The functions of ``api.py`` that end something, with its kind."""
    return {
        name: MAPPING if name.startswith("vkUnmap") else _kind(_signature(name).args[-2])
        for name in functions_used()
        if name.startswith(DESTROYS)
    }


def gives_handles(name: str) -> bool:
    """Whether the last argument of a function points to where handles or an address are, or will be."""
    last = _signature(name).args[-1].cname
    return bool(last.endswith("_T * *") or last == "void * *")


def can_fail(name: str) -> bool:
    """Whether a function gives a result code."""
    return bool(_signature(name).result.cname == "enum VkResult")


def _signature(name: str) -> Any:
    import vulkan

    return vulkan.ffi.typeof(f"PFN_{name}")


def _kind(handle: Any) -> str:
    # A handle is declared as a pointer to a struct that nobody sees: "struct VkBuffer_T *".
    return str(handle.cname).removeprefix("struct Vk").removesuffix("_T *")


def _address(pointer: Any) -> int:
    return int(_ffi.cast("uintptr_t", pointer))


def _pool(info: Any) -> _Key | None:
    # What is allocated from a pool names it in the struct that describes it.
    for name, field in _ffi.typeof(info).item.fields:
        if field.type.cname.endswith("Pool_T *"):
            return _kind(field.type), _address(getattr(info, name))
    return None


def _caller() -> str:
    """The function of the package that asked for it, past those that only pass the call on."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        module = str(frame.f_globals.get("__name__"))
        if module != __name__ and module != api_module.__name__ and frame.f_code.co_name != "call":
            return f"{module}.{frame.f_code.co_qualname}"
    return "?"
