"""Instance, choice of a device, and the logical device with its queues. Each handle has one owner here.

A device is used by several threads at once. Vulkan asks the caller to keep two threads off one queue, so each queue
has a lock, held for a submission only.
"""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from typing import Final, Protocol

from ggufstream.backends.vulkan.api import CommandBuffer, Device, Fence, Instance, PhysicalDevice, Queue, Vulkan
from ggufstream.backends.vulkan.describe import describe, memory_heaps, unpack_version
from ggufstream.backends.vulkan.errors import BACKEND, LOST_REMEDY, install_line
from ggufstream.backends.vulkan.records import DeviceRecord, MemoryHeap
from ggufstream.errors import BackendUnavailableError, ClosedError, DeviceError, DeviceLostError, NoDeviceError

__all__ = [
    "HOST_PAGES",
    "VALIDATION_MESSAGES",
    "DeviceQueue",
    "VulkanDevice",
    "VulkanInstance",
    "choose_device",
    "list_devices",
]

VALIDATION_MESSAGES: Final[list[str]] = []
"""What the validation layer has reported in this process, over all backends: a test asserts that it stays empty."""

_VALIDATION_LAYER: Final = "VK_LAYER_KHRONOS_validation"
HOST_PAGES: Final = "VK_EXT_external_memory_host"
_DEBUG_UTILS: Final = "VK_EXT_debug_utils"
_PORTABILITY: Final = "VK_KHR_portability_enumeration"
_NEWEST: Final = (1, 3, 0)
_OLDEST: Final = (1, 1, 0)

_PATIENCE_SECONDS: Final = 30.0
"""A device that takes longer for a submission counts as lost: nothing of ours takes more than a second."""

_RANK: Final = {"discrete": 0, "integrated": 1, "virtual": 2, "other": 3, "cpu": 4}


class VulkanInstance:
    """A connection to the Vulkan loader. ``messages`` collects what the validation layer reports."""

    def __init__(self, api: Vulkan, *, validation: bool = False) -> None:
        self.api = api
        self.messages: list[str] = []
        self.pinned = False
        """A device of this instance could not be destroyed: neither may the instance be."""
        self.version = min((*unpack_version(api.instance_version())[:2], 0), _NEWEST)
        if self.version < _OLDEST:
            raise BackendUnavailableError(
                "the Vulkan loader is older than version 1.1", backend=BACKEND, remedy=install_line("loader")
            )
        offered = api.instance_extensions()
        extensions = []
        layers = []
        # MoltenVK, on macOS, is found only by those who ask for devices that are not quite conformant.
        portability = _PORTABILITY in offered
        if portability:
            extensions.append(_PORTABILITY)
        if validation:
            if _VALIDATION_LAYER not in api.instance_layers():
                raise BackendUnavailableError(
                    f"{_VALIDATION_LAYER} is not installed", backend=BACKEND, remedy=install_line("validation")
                )
            layers.append(_VALIDATION_LAYER)
            extensions.append(_DEBUG_UTILS)
        major, minor, _ = self.version
        with ExitStack() as undo:
            self.handle: Instance = api.create_instance(
                version=major << 22 | minor << 12, extensions=extensions, layers=layers, portability=portability
            )
            undo.callback(api.destroy_instance, self.handle)
            if validation:
                messenger = api.create_messenger(self.handle, self._report)
                undo.callback(api.destroy_messenger, self.handle, messenger)
            self._close = undo.pop_all()

    def _report(self, message: str) -> None:
        self.messages.append(message)
        VALIDATION_MESSAGES.append(message)

    def devices(self) -> list[tuple[PhysicalDevice, DeviceRecord]]:
        """Every physical device, whether it can be used or not."""
        found = self.api.physical_devices(self.handle)
        return [(device, describe(self.api, device, index, newest=self.version)) for index, device in enumerate(found)]

    def close(self) -> None:
        """Destroy the instance, after its devices. A second call does nothing."""
        if not self.pinned:
            _keep_drivers_loaded()
            self._close.close()


@cache
def _keep_drivers_loaded() -> None:
    """Hold one instance until the process ends.

    The loader unloads the drivers with the last instance, and loading them again costs address space for thread-local
    data that is never given back: NVIDIA's (580) cannot be loaded more than about 30 times in one process.
    """
    # Two threads may come here at once: a second instance does no harm.
    with suppress(DeviceError):
        api = Vulkan()
        portability = [_PORTABILITY] if _PORTABILITY in api.instance_extensions() else []
        instance = api.create_instance(
            version=1 << 22, extensions=portability, layers=[], portability=bool(portability)
        )
        atexit.register(api.destroy_instance, instance)


def list_devices(*, api: Vulkan | None = None) -> tuple[DeviceRecord, ...]:
    """What Vulkan sees on this machine.

    Raises:
        BackendUnavailableError: No loader, or no driver.
    """
    instance = VulkanInstance(api or Vulkan())
    try:
        return tuple(record for _, record in instance.devices())
    finally:
        instance.close()


def choose_device(records: Sequence[DeviceRecord], wanted: str | int | None) -> DeviceRecord:
    """The device to use: the best real GPU, or the one that ``wanted`` names by index (digits) or by part of its name.

    A software device is never chosen unless it is named.

    Raises:
        NoDeviceError: None fits; the message lists those there are.
    """
    usable = [record for record in records if record.usable]
    by_number = isinstance(wanted, int) or (wanted is not None and wanted.isascii() and wanted.isdecimal())
    if wanted is None:
        fitting = [record for record in usable if record.kind != "cpu"]
    elif by_number:
        fitting = [record for record in usable if str(record.index) == str(wanted)]
    else:
        fitting = [record for record in usable if str(wanted).casefold() in record.name.casefold()]
    if fitting:
        return min(fitting, key=lambda record: (_RANK[record.kind], record.index))
    listed = ", ".join(
        f"#{record.index} {record.name} ({'software' if record.kind == 'cpu' else record.kind})" for record in records
    )
    what = f"no usable device is called {wanted!r}"
    if wanted is None:
        what = "no GPU found"
    elif by_number:
        what = f"no usable device has the number {wanted}"
    if not records:
        raise NoDeviceError(f"{what}; there is no device at all", backend=BACKEND, remedy=install_line("driver"))
    example = records[0].name.split()[0]
    raise NoDeviceError(
        f"{what}; there is {listed}",
        backend=BACKEND,
        remedy=f"Name one by its number or by part of its name, such as --device {example} (device={example!r} in Python)",
    )


class _Closable(Protocol):
    def close(self) -> None: ...


class _Submission(_Closable, Protocol):
    def settle(self) -> bool: ...


class DeviceQueue:
    """A queue and the lock that a submission holds."""

    def __init__(self, handle: Queue, family: int) -> None:
        self.handle = handle
        self.family = family
        self.lock = threading.Lock()


class VulkanDevice:
    """A logical device. The shaders need no optional feature, so none is enabled.

    ``compute`` and ``transfer`` are one and the same object where there is no copy engine of its own.
    """

    def __init__(self, instance: VulkanInstance, physical: PhysicalDevice, record: DeviceRecord) -> None:
        self.instance = instance
        self.api = instance.api
        self.physical = physical
        self.record = record
        compute, transfer = record.compute_family, record.transfer_family
        assert compute is not None
        assert transfer is not None
        self.families: tuple[int, ...] = tuple(dict.fromkeys((compute, transfer)))
        self.submits = 0
        self.patience_seconds = _PATIENCE_SECONDS
        self._lost: str | None = None
        self._closed = False
        self.submissions: set[_Submission] = set()
        self.allocations: set[_Closable] = set()
        """What is open on this device: each adds itself, and goes when it is closed."""
        self.unsettled: set[_Submission] = set()
        """Submissions that somebody has waited for in vain: whatever memory they use is still in use."""
        self.shared = ExitStack()
        """What many submissions use: it goes after all of them, just before the device."""
        self._deferred: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        # A device that offers VK_KHR_portability_subset demands that it is enabled.
        wanted = ("VK_KHR_portability_subset", "VK_EXT_memory_budget", HOST_PAGES)
        extensions = [name for name in wanted if name in record.extensions]
        self.handle: Device = self.api.create_device(physical, families=self.families, extensions=extensions)
        self.compute = DeviceQueue(self.api.queue(self.handle, compute), compute)
        self.transfer = (
            self.compute if transfer == compute else DeviceQueue(self.api.queue(self.handle, transfer), transfer)
        )

    # State

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def check(self) -> None:
        """Raise if the device can take no more work."""
        if self._closed:
            raise ClosedError("the Vulkan backend is closed")
        if self._lost is not None:
            # After a loss nothing is submitted any more: drivers answer with hangs and crashes.
            raise DeviceLostError(self._lost, backend=BACKEND, remedy=LOST_REMEDY)

    def heaps(self) -> tuple[MemoryHeap, ...]:
        """The heaps with their budgets of now."""
        budget = "VK_EXT_memory_budget" in self.record.extensions
        return memory_heaps(self.api, self.physical, budget=budget)

    # Work

    def submit(self, queue: DeviceQueue, commands: CommandBuffer, fence: Fence) -> None:
        """Run ``commands`` on ``queue``; ``fence`` is reached after them."""
        self.check()
        try:
            with queue.lock:
                self.submits += 1
                self.api.submit(queue.handle, commands, fence)
        except DeviceLostError as error:
            self._lose(error.what)
            raise

    def fence_done(self, fence: Fence) -> bool:
        """Whether the device has come to ``fence``."""
        try:
            return self.api.fence_done(self.handle, fence)
        except DeviceLostError as error:
            self._lose(error.what)
            raise

    def wait_fence(self, fence: Fence) -> None:
        """Block until the device has come to ``fence``; not for a device that is lost.

        Raises:
            DeviceLostError: It is lost, or does not come there within ``patience_seconds``.
        """
        left = self.patience_seconds
        try:
            # Slices of a second: all threads that wait for a device learn soon that one of them has given it up.
            while self._lost is None and left > 0:
                seconds = min(left, 1.0)
                if self.api.wait_fence(self.handle, fence, round(seconds * 1e9)):
                    return
                left -= seconds
            if self._lost is not None and self.api.fence_done(self.handle, fence):
                return
            what = self._lost or f"the device did not finish within {self.patience_seconds:g} s"
            raise DeviceLostError(what, backend=BACKEND, remedy=LOST_REMEDY)
        except DeviceLostError as error:
            self._lose(error.what)
            raise

    def _lose(self, what: str) -> None:
        if self._lost is None:
            self._lost = what.removeprefix(f"{BACKEND}: ")

    # End

    def defer(self, ready: Callable[[], bool], free: Callable[[], None]) -> None:
        """Free later what the device may still be using: at :meth:`close`, if it is ``ready`` then."""
        self._deferred.append((ready, free))

    def settle(self) -> bool:
        """Wait for what was waited for in vain, unless the device is lost. Whether it uses no memory any more."""
        return not [submission for submission in tuple(self.unsettled) if not submission.settle()]

    def close(self) -> None:
        """Destroy the device, and what was left open on it. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        # Submissions go first: they wait for what still uses the memory.
        for submission in list(self.submissions):
            submission.close()
        stuck = 0
        for idle, free in self._deferred:
            if idle():
                free()
            else:
                stuck += 1
        self._deferred.clear()
        if stuck:
            # Memory under a running copy must not be freed; only the end of the process gives it back.
            self.instance.pinned = True
            warnings.warn(
                f"vulkan: {stuck} copies hang on the device; their memory is not freed", ResourceWarning, stacklevel=2
            )
            return
        self.shared.close()
        left = list(self.allocations)
        for allocation in left:
            allocation.close()
        self.api.destroy_device(self.handle)
        if left:
            warnings.warn(
                f"vulkan: {len(left)} chunks or staging buffers were not closed", ResourceWarning, stacklevel=2
            )
