"""Backends by name, imported on first use, so that nobody needs a library that they do not use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ggufstream.backends.base import Backend
from ggufstream.errors import DeviceError, NoDeviceError, OptionError, UnsupportedByDeviceError
from ggufstream.options import LoadOptions, UploadMode

__all__ = ["describe_backends", "open_backend", "open_for"]

_HOST: Final = ("cpu", "cpu_scalar")
_NAMES: Final = ("auto", *_HOST, "vulkan", "vulkan:DEVICE", "simulated:PROFILE")
_DIRECT: Final[Mapping[UploadMode, bool | None]] = {"auto": None, "direct": True, "staged": False, "alias": None}

_NO_GPU: Final = "no GPU found"


def open_for(options: LoadOptions, *, load_bytes: int) -> tuple[Backend, str]:
    """Open the backend that ``options`` ask for, and say why it is this one.

    Args:
        options: The caller's.
        load_bytes: What will be loaded, about.

    Raises:
        OptionError: No backend is called so, or it has no device to choose.
        DeviceError: The backend cannot be opened; the message says what it lacks and how to get it.
    """
    direct = _DIRECT[options.upload]
    if options.backend == "auto" and options.device is None:
        backend, reason = _auto(direct=direct, validation=options.validation, load_bytes=load_bytes)
        return backend, f'{reason} (see "ggufstream devices")' if reason == _NO_GPU else reason
    backend = open_backend(
        options.backend, device=options.device, direct=direct, validation=options.validation, load_bytes=load_bytes
    )
    return backend, "asked for"


def open_backend(
    spec: str = "auto",
    *,
    device: str | None = None,
    direct: bool | None = None,
    validation: bool = False,
    keep_bytes: int = 0,
    load_bytes: int = 0,
) -> Backend:
    """Open a backend.

    Args:
        spec: ``auto`` (a real GPU if there is one, else ``cpu``), ``cpu``, ``cpu_scalar``, ``vulkan``,
            ``vulkan:DEVICE`` or ``simulated:PROFILE``.
        device: Part of a Vulkan device's name, or its number. With ``auto`` it means ``vulkan``.
        direct: Whether tensors are placed straight into device memory: ``True`` demands it, ``False`` forces staging, ``None``
            takes what is faster. A card of its own is filled faster through staging memory, once that is pinned: so that
            is taken for large models, and where memory is kept.
        validation: Load Vulkan's validation layer.
        keep_bytes: Most memory that stays with the backend when a model or a load is closed, and goes to the next that
            needs just as much at once: for whoever loads again and again. It counts as free, is freed where it is in the
            way, and may show bytes of an earlier model in the gaps between tensors.
        load_bytes: What will be loaded, about, where that is known.

    Raises:
        OptionError: No backend is called so, it has no device to choose, or it cannot keep so much.
        DeviceError: The backend cannot be opened; the message says what it lacks and how to get it.
    """
    given: object = keep_bytes
    if not isinstance(given, int) or given < 0:
        raise OptionError(f"keep_bytes={keep_bytes!r} is no number of bytes", remedy="Give at least 0")
    name, _, profile = spec.partition(":")
    if name == "vulkan" and profile:
        if device is not None:
            raise OptionError(
                f"backend {spec!r} names a device, and so does device={device!r}", remedy="Give one of them"
            )
        device = profile
    elif profile and name != "simulated":
        raise OptionError(f"backend {spec!r}: {name} has no profiles", remedy=_known())
    if name == "vulkan" or (name == "auto" and device is not None):
        return _vulkan(device, direct=direct, validation=validation, keep_bytes=keep_bytes, load_bytes=load_bytes)
    if device is not None and (name in _HOST or name == "simulated"):
        raise OptionError(
            f"backend {name} has no device {device!r}", remedy="Leave the device out, or choose backend vulkan"
        )
    if name == "auto":
        return _auto(direct=direct, validation=validation, keep_bytes=keep_bytes, load_bytes=load_bytes)[0]
    if name in _HOST:
        return _host(name, direct=direct, keep_bytes=keep_bytes)
    if name == "simulated":
        if keep_bytes:
            raise OptionError(f"backend {spec} keeps no memory", remedy="Leave keep_bytes out")
        from ggufstream.backends.simulated import SimulatedBackend

        return SimulatedBackend(*([profile] if profile else []), direct=direct)
    raise OptionError(f"there is no backend {spec!r}", remedy=_known())


def describe_backends() -> list[dict[str, Any]]:
    """What each backend sees here, as plain data: ``name``, ``available``, ``devices``, ``lacks``."""
    backend, reason = _auto(direct=None, validation=False)
    with backend:
        chosen = backend.capabilities.backend
    found: list[dict[str, Any]] = [{"name": "auto", "available": True, "means": chosen, "reason": reason}]
    found += [{"name": name, "available": True, "devices": [{"name": "host memory"}], "lacks": []} for name in _HOST]
    return [*found, _describe_vulkan(), _describe_simulated()]


def _known() -> str:
    return f"Known: {', '.join(_NAMES)}"


def _host(name: str, *, direct: bool | None, keep_bytes: int = 0) -> Backend:
    from ggufstream.backends.cpu import CpuBackend
    from ggufstream.backends.cpu_scalar import CpuScalarBackend

    kind = CpuBackend if name == "cpu" else CpuScalarBackend
    return kind(direct=direct is not False, keep_bytes=keep_bytes)


def _vulkan(
    device: str | None, *, direct: bool | None, validation: bool, keep_bytes: int = 0, load_bytes: int = 0
) -> Backend:
    from ggufstream.backends.vulkan import VulkanBackend

    return VulkanBackend(device, direct=direct, validation=validation, keep_bytes=keep_bytes, load_bytes=load_bytes)


def _auto(*, direct: bool | None, validation: bool, keep_bytes: int = 0, load_bytes: int = 0) -> tuple[Backend, str]:
    try:
        backend = _vulkan(None, direct=direct, validation=validation, keep_bytes=keep_bytes, load_bytes=load_bytes)
    except DeviceError as error:
        if direct and isinstance(error, UnsupportedByDeviceError):
            raise  # there is a GPU, and what was demanded of it would be taken from another device in silence
        # what is missing and how to get it is worth a line; a list of devices that are no GPUs is not
        return _host("cpu", direct=direct, keep_bytes=keep_bytes), _NO_GPU if isinstance(error, NoDeviceError) else str(
            error
        )
    return backend, f"a GPU was found: {backend.capabilities.device}"


def _describe_vulkan() -> dict[str, Any]:
    from ggufstream.backends.vulkan import VulkanBackend, list_devices

    try:
        records = list_devices()
    except DeviceError as error:
        return {"name": "vulkan", "available": False, "devices": [], "lacks": [str(error)]}
    devices = [record.to_dict() for record in records]
    for i, record in enumerate(records):
        if record.usable:
            try:  # some things are found out only by opening it
                with VulkanBackend(record.index) as backend:
                    devices[i] = backend.record.to_dict()
            except DeviceError as error:
                devices[i]["lacks"].append(f"cannot be opened: {error}")
    return {
        "name": "vulkan",
        "available": any(record.usable for record in records),
        "devices": devices,
        "lacks": [],
    }


def _describe_simulated() -> dict[str, Any]:
    from ggufstream.backends.simulated import PROFILES

    return {
        "name": "simulated",
        "available": True,
        "devices": [{"name": name} for name in sorted(PROFILES)],
        "lacks": [],
    }
