"""Backends by name, imported on first use, so that nobody needs a library that they do not use."""

from __future__ import annotations

import importlib
from typing import Any, Final
from weakref import WeakKeyDictionary

from ggufstream.backends.base import Backend
from ggufstream.errors import DeviceError, OptionError

__all__ = ["auto_reason", "choose_auto", "describe_backends", "open_backend"]

_HOST: Final = {
    "cpu": ("ggufstream.backends.cpu", "CpuBackend"),
    "cpu_scalar": ("ggufstream.backends.cpu_scalar", "CpuScalarBackend"),
}
_SIMULATED: Final = ("ggufstream.backends.simulated", "SimulatedBackend")
_NAMES: Final = ("auto", *_HOST, "vulkan", "simulated:PROFILE")

_reasons: WeakKeyDictionary[Backend, str] = WeakKeyDictionary()


def open_backend(
    spec: str = "auto", *, device: str | None = None, direct: bool | None = None, validation: bool = False
) -> Backend:
    """Open a backend.

    Args:
        spec: ``auto`` (a real GPU if there is one, else ``cpu``), ``cpu``, ``cpu_scalar``, ``vulkan`` or
            ``simulated:PROFILE``.
        device: Part of a Vulkan device's name, or its number. With ``auto`` it means ``vulkan``.
        direct: Whether tensors are placed straight into device memory: ``None`` where possible, ``True`` demands it,
            ``False`` forces staging.
        validation: Load Vulkan's validation layer.

    Raises:
        OptionError: No backend is called so, or it has no device to choose.
        DeviceError: The backend cannot be opened; the message says what it lacks and how to get it.
    """
    name, _, profile = spec.partition(":")
    if profile and name != "simulated":
        raise OptionError(f"backend {spec!r}: {name} has no profiles", remedy=_known())
    if name == "vulkan" or (name == "auto" and device is not None):
        return _vulkan(device, direct=direct, validation=validation)
    if device is not None and (name in _HOST or name == "simulated"):
        raise OptionError(
            f"backend {name} has no device {device!r}", remedy="Leave the device out, or choose backend vulkan"
        )
    if name == "auto":
        return _auto(direct=direct, validation=validation)
    if name in _HOST:
        return _load(_HOST[name], direct=direct is not False)
    if name == "simulated":
        return _load(_SIMULATED, *([profile] if profile else []), direct=direct)
    raise OptionError(f"there is no backend {spec!r}", remedy=_known())


def choose_auto() -> tuple[str, str]:
    """What ``auto`` means on this machine: a backend's name, and why."""
    with _auto(direct=None, validation=False) as backend:
        return backend.capabilities.backend, _reasons[backend]


def auto_reason(backend: Backend) -> str | None:
    """Why ``auto`` opened this backend; ``None`` if it was asked for by name."""
    return _reasons.get(backend)


def describe_backends() -> list[dict[str, Any]]:
    """What each backend sees here, as plain data: ``name``, ``available``, ``devices``, ``lacks``."""
    chosen, reason = choose_auto()
    found: list[dict[str, Any]] = [{"name": "auto", "available": True, "means": chosen, "reason": reason}]
    found += [{"name": name, "available": True, "devices": [{"name": "host memory"}], "lacks": []} for name in _HOST]
    return [*found, _describe_vulkan(), _describe_simulated()]


def _known() -> str:
    return f"Known: {', '.join(_NAMES)}"


def _load(where: tuple[str, str], *arguments: str, direct: bool | None) -> Backend:
    module, name = where
    backend = getattr(importlib.import_module(module), name)(*arguments, direct=direct)
    assert isinstance(backend, Backend)
    return backend


def _vulkan(device: str | None, *, direct: bool | None, validation: bool) -> Backend:
    from ggufstream.backends.vulkan import VulkanBackend

    return VulkanBackend(device, direct=direct, validation=validation)


def _auto(*, direct: bool | None, validation: bool) -> Backend:
    try:
        backend = _vulkan(None, direct=direct, validation=validation)
        _reasons[backend] = f"a GPU was found: {backend.capabilities.device}"
    except DeviceError as error:
        backend = _load(_HOST["cpu"], direct=direct is not False)
        _reasons[backend] = str(error)
    return backend


def _describe_vulkan() -> dict[str, Any]:
    from ggufstream.backends.vulkan import list_devices

    try:
        records = list_devices()
    except DeviceError as error:
        return {"name": "vulkan", "available": False, "devices": [], "lacks": [str(error)]}
    return {
        "name": "vulkan",
        "available": any(record.usable for record in records),
        "devices": [record.to_dict() for record in records],
        "lacks": [],
    }


def _describe_simulated() -> dict[str, Any]:
    try:
        module = importlib.import_module(_SIMULATED[0])
    except ImportError as error:
        return {"name": "simulated", "available": False, "devices": [], "lacks": [str(error)]}
    profiles = sorted(getattr(module, "PROFILES", ()))
    return {"name": "simulated", "available": True, "devices": [{"name": name} for name in profiles], "lacks": []}
