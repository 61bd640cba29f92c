"""Result codes of Vulkan in plain words, and as errors of this package.

Codes: ``VkResult`` in the Vulkan specification, "Return Codes".
"""

from __future__ import annotations

from typing import Final

from ggufstream.errors import (
    BackendUnavailableError,
    DeviceError,
    DeviceLostError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    UnsupportedByDeviceError,
)

__all__ = ["BACKEND", "LOST_REMEDY", "NOT_READY", "SUCCESS", "TIMEOUT", "explain", "from_result", "install_line"]

BACKEND: Final = "vulkan"

SUCCESS: Final = 0
NOT_READY: Final = 1
TIMEOUT: Final = 2
INCOMPLETE: Final = 5
_OUT_OF_HOST_MEMORY: Final = -1
_OUT_OF_DEVICE_MEMORY: Final = -2
_INITIALIZATION_FAILED: Final = -3
_DEVICE_LOST: Final = -4
_MEMORY_MAP_FAILED: Final = -5
_LAYER_NOT_PRESENT: Final = -6
_EXTENSION_NOT_PRESENT: Final = -7
_FEATURE_NOT_PRESENT: Final = -8
_INCOMPATIBLE_DRIVER: Final = -9
_TOO_MANY_OBJECTS: Final = -10

_WORDS: Final = {
    SUCCESS: "success",
    NOT_READY: "not ready yet",
    TIMEOUT: "not finished in time",
    3: "an event is set",
    4: "an event is not set",
    INCOMPLETE: "the answer did not fit the array",
    _OUT_OF_HOST_MEMORY: "the host is out of memory",
    _OUT_OF_DEVICE_MEMORY: "the device is out of memory",
    _INITIALIZATION_FAILED: "the driver could not be initialized",
    _DEVICE_LOST: "the driver gave the device up",
    _MEMORY_MAP_FAILED: "device memory could not be mapped into the process",
    _LAYER_NOT_PRESENT: "a layer is not installed",
    _EXTENSION_NOT_PRESENT: "an extension is not offered",
    _FEATURE_NOT_PRESENT: "a feature is not offered",
    _INCOMPATIBLE_DRIVER: "no Vulkan driver that can be used was found",
    _TOO_MANY_OBJECTS: "too many objects of this kind exist",
    -11: "the format is not supported",
    -12: "a pool is fragmented",
    -13: "the driver failed for an unknown reason",
    -1000069000: "a pool is out of memory",
    -1000072003: "an external handle is invalid",
    -1000161000: "a pool is fragmented",
    -1000257000: "an address cannot be used again",
    -1000012000: "a shader is invalid",
    -1000174001: "not permitted",
    1000297000: "a pipeline must be compiled first",
}

LOST_REMEDY: Final = (
    "This is likely out of memory or a driver timeout; load less onto the device (other programs count too) and open "
    "the backend again"
)

_PACKAGES: Final = {
    "loader": ("libvulkan1", "vulkan-loader", "vulkan-loader"),
    "driver": ("mesa-vulkan-drivers", "mesa-vulkan-drivers", "molten-vk"),
    "validation": ("vulkan-validationlayers", "vulkan-validation-layers", "vulkan-validationlayers"),
}


def install_line(part: str) -> str:
    """The commands that install ``part``: ``loader``, ``driver`` or ``validation``."""
    debian, fedora, brew = _PACKAGES[part]
    what = "the GPU vendor's driver, or Mesa's" if part == "driver" else "it"
    return (
        f"Install {what}: 'apt install {debian}' (Debian, Ubuntu), 'dnf install {fedora}' (Fedora), "
        f"'brew install {brew}' (macOS)"
    )


def explain(code: int) -> str:
    """``code`` in plain words, with its number."""
    return f"{_WORDS.get(code, 'the driver reported a result that is not in the specification known here')} ({code})"


def from_result(function: str, code: int, *, needed: int | None = None) -> DeviceError:
    """The error for a failed call of ``function``; ``needed`` in bytes where memory was asked for."""
    what = f"{function}: {explain(code)}"
    amount = f"; {needed:,} bytes were asked for" if needed is not None else ""
    match code:
        case -2 | -10:
            remedy = (
                "The driver limits how many allocations there may be: use larger chunks"
                if code == _TOO_MANY_OBJECTS
                else "Free device memory (other programs count too), or place fewer tensors on the device"
            )
            return OutOfDeviceMemoryError(what + amount, backend=BACKEND, needed=needed, remedy=remedy)
        case -1 | -5:
            remedy = "Free memory, or lower the staging budget"
            return OutOfHostMemoryError(what + amount, backend=BACKEND, needed=needed, remedy=remedy)
        case -4:
            return DeviceLostError(what, backend=BACKEND, remedy=LOST_REMEDY)
        case -9:
            return BackendUnavailableError(what, backend=BACKEND, remedy=install_line("driver"))
        case -6:
            return BackendUnavailableError(what, backend=BACKEND, remedy=install_line("validation"))
        case -7 | -8:
            return UnsupportedByDeviceError(what, backend=BACKEND, remedy="A newer driver may offer it")
        case -3:
            return BackendUnavailableError(
                what, backend=BACKEND, remedy="'vulkaninfo --summary' shows whether the driver works at all"
            )
        case _:
            return DeviceError(what, backend=BACKEND, remedy="Please report it with the output of 'vulkaninfo'")
