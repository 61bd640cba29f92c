"""Physical devices as records: which structs can be asked depends on version and extensions."""

from __future__ import annotations

from typing import Final

from ggufstream.backends.vulkan.api import Facts, PhysicalDevice, Vulkan
from ggufstream.backends.vulkan.records import (
    DeviceKind,
    DeviceRecord,
    Limits,
    MemoryHeap,
    MemoryType,
    QueueFamily,
)

__all__ = ["describe", "memory_heaps", "unpack_version"]

_KINDS: Final[dict[int, DeviceKind]] = {1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}
_PROPERTIES: Final = "VkPhysicalDeviceProperties2"
_MEMORY: Final = "VkPhysicalDeviceMemoryProperties2"
_BUDGET: Final = "VkPhysicalDeviceMemoryBudgetPropertiesEXT"
_DRIVER: Final = "VkPhysicalDeviceDriverProperties"
_MAINTENANCE3: Final = "VkPhysicalDeviceMaintenance3Properties"
_MAINTENANCE4: Final = "VkPhysicalDeviceMaintenance4Properties"
_HOST_POINTER: Final = "VkPhysicalDeviceExternalMemoryHostPropertiesEXT"


def unpack_version(packed: int) -> tuple[int, int, int]:
    """Major, minor and patch of a packed Vulkan version."""
    return packed >> 22 & 0x7F, packed >> 12 & 0x3FF, packed & 0xFFF


def describe(api: Vulkan, device: PhysicalDevice, index: int, *, newest: tuple[int, int, int]) -> DeviceRecord:
    """Ask the driver everything that is used here. ``newest`` is the version that the instance was created for."""
    extensions = api.device_extensions(device)
    offered = unpack_version(api.api_version(device))
    version = min(offered, newest)

    def has(core: tuple[int, int, int], extension: str) -> bool:
        return version >= core or extension in extensions

    parts = [_MAINTENANCE3]
    if has((1, 2, 0), "VK_KHR_driver_properties"):
        parts.append(_DRIVER)
    if has((1, 3, 0), "VK_KHR_maintenance4"):
        parts.append(_MAINTENANCE4)
    if "VK_EXT_external_memory_host" in extensions:
        parts.append(_HOST_POINTER)
    if version < (1, 1, 0):  # these structs came with 1.1, and so did asking for them; the device is not usable
        parts = []
    facts = api.query(device, "Properties", _PROPERTIES, parts)
    driver = " ".join(filter(None, (facts.text(_DRIVER, "driverName"), facts.text(_DRIVER, "driverInfo"))))
    driver_version = facts.number(_PROPERTIES, "properties.driverVersion")
    return DeviceRecord(
        index=index,
        name=facts.text(_PROPERTIES, "properties.deviceName"),
        kind=_KINDS.get(facts.number(_PROPERTIES, "properties.deviceType"), "other"),
        driver=driver or f"version {driver_version:#x}",
        vendor_id=facts.number(_PROPERTIES, "properties.vendorID"),
        api_version=version,
        heaps=memory_heaps(api, device, budget="VK_EXT_memory_budget" in extensions),
        memory_types=_memory_types(api, device),
        queue_families=_queue_families(api, device),
        limits=_limits(facts),
        extensions=extensions,
    )


def memory_heaps(api: Vulkan, device: PhysicalDevice, *, budget: bool) -> tuple[MemoryHeap, ...]:
    """The heaps with their present budgets. Drivers are known to report budgets above the heap's size: clamped."""
    facts = api.query(device, "MemoryProperties", _MEMORY, [_BUDGET] if budget else [])
    heaps = []
    for i in range(facts.number(_MEMORY, "memoryProperties.memoryHeapCount")):
        size = facts.number(_MEMORY, f"memoryProperties.memoryHeaps.{i}.size")
        flags = facts.number(_MEMORY, f"memoryProperties.memoryHeaps.{i}.flags")
        heaps.append(
            MemoryHeap(
                size=size,
                device_local=bool(flags & 0x1),
                budget=min(size, facts.number(_BUDGET, f"heapBudget.{i}")) if budget else None,
                usage=min(size, facts.number(_BUDGET, f"heapUsage.{i}")) if budget else None,
            )
        )
    return tuple(heaps)


def _memory_types(api: Vulkan, device: PhysicalDevice) -> tuple[MemoryType, ...]:
    facts = api.query(device, "MemoryProperties", _MEMORY, [])
    types = []
    for i in range(facts.number(_MEMORY, "memoryProperties.memoryTypeCount")):
        flags = facts.number(_MEMORY, f"memoryProperties.memoryTypes.{i}.propertyFlags")
        if flags & ~0xF:
            # Protected, lazily allocated and AMD's uncached memory are not for us.
            continue
        types.append(
            MemoryType(
                index=i,
                heap=facts.number(_MEMORY, f"memoryProperties.memoryTypes.{i}.heapIndex"),
                device_local=bool(flags & 0x1),
                host_visible=bool(flags & 0x2),
                coherent=bool(flags & 0x4),
                cached=bool(flags & 0x8),
            )
        )
    return tuple(types)


def _queue_families(api: Vulkan, device: PhysicalDevice) -> tuple[QueueFamily, ...]:
    families = []
    for index, (flags, count) in enumerate(api.queue_families(device)):
        graphics, compute, video = bool(flags & 0x1), bool(flags & 0x2), bool(flags & 0x60)
        # Video queues may transfer, too, but are no copy engines.
        transfer = graphics or compute or (bool(flags & 0x4) and not video)
        families.append(QueueFamily(index=index, count=count, graphics=graphics, compute=compute, transfer=transfer))
    return tuple(families)


def _limits(facts: Facts) -> Limits:
    def limit(name: str) -> int:
        return facts.number(_PROPERTIES, f"properties.limits.{name}")

    return Limits(
        max_storage_buffer_range=limit("maxStorageBufferRange"),
        max_memory_allocation_size=facts.number(_MAINTENANCE3, "maxMemoryAllocationSize"),
        max_buffer_size=facts.number(_MAINTENANCE4, "maxBufferSize") or None,
        min_storage_buffer_offset_alignment=limit("minStorageBufferOffsetAlignment"),
        optimal_buffer_copy_offset_alignment=limit("optimalBufferCopyOffsetAlignment"),
        non_coherent_atom_size=limit("nonCoherentAtomSize"),
        max_compute_work_group_count=facts.numbers(_PROPERTIES, "properties.limits.maxComputeWorkGroupCount"),
        min_imported_host_pointer_alignment=facts.number(_HOST_POINTER, "minImportedHostPointerAlignment") or None,
    )
