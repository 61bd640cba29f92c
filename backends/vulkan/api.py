"""Vulkan's calls as typed functions. The only module that imports the ``vulkan`` binding; ``Any`` stops here.

Only the binding's cffi library is used, not its Python functions: those raise ``KeyError`` for result codes that they
do not know and let arrays in nested structs be collected too early. Every call goes through :meth:`Vulkan.call`, so a
subclass sees, counts and replaces all of them: that is how tests fake a lost device.

Handles are integers. Calls let other threads run meanwhile, but for those in ``_QUICK``.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, NewType

import numpy as np

from ggufstream.backends.vulkan.errors import (
    BACKEND,
    INCOMPLETE,
    NOT_READY,
    SUCCESS,
    TIMEOUT,
    from_result,
    install_line,
)
from ggufstream.errors import BackendUnavailableError
from ggufstream.layouts import Bytes

__all__ = [
    "USAGE_READBACK",
    "USAGE_STORAGE",
    "Buffer",
    "CommandBuffer",
    "CommandPool",
    "DescriptorPool",
    "DescriptorSet",
    "DescriptorSetLayout",
    "Device",
    "Facts",
    "Fence",
    "Instance",
    "Memory",
    "Messenger",
    "PhysicalDevice",
    "Pipeline",
    "PipelineLayout",
    "Queue",
    "Region",
    "Requirements",
    "ShaderModule",
    "Vulkan",
]

Instance = NewType("Instance", int)
Messenger = NewType("Messenger", int)
PhysicalDevice = NewType("PhysicalDevice", int)
Device = NewType("Device", int)
Queue = NewType("Queue", int)
Buffer = NewType("Buffer", int)
Memory = NewType("Memory", int)
CommandPool = NewType("CommandPool", int)
CommandBuffer = NewType("CommandBuffer", int)
Fence = NewType("Fence", int)
ShaderModule = NewType("ShaderModule", int)
DescriptorSetLayout = NewType("DescriptorSetLayout", int)
DescriptorPool = NewType("DescriptorPool", int)
DescriptorSet = NewType("DescriptorSet", int)
PipelineLayout = NewType("PipelineLayout", int)
Pipeline = NewType("Pipeline", int)

USAGE_READBACK: Final = 0x1 | 0x2
"""Source and destination of transfers."""
USAGE_STORAGE: Final = 0x20 | USAGE_READBACK
"""The same, and bound to shaders."""

_BIND_COMPUTE: Final = 1
"""``VK_PIPELINE_BIND_POINT_COMPUTE``"""
_STAGE_COMPUTE: Final = 0x20
"""``VK_SHADER_STAGE_COMPUTE_BIT``"""

_STAGE_ALL: Final = 0x10000
_STAGE_HOST: Final = 0x4000
_ACCESS_READ: Final = 0x8000
_ACCESS_WRITE: Final = 0x10000
_ACCESS_HOST: Final = 0x2000 | 0x4000

_HOST_POINTER: Final = 0x80
"""``VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT``"""
_IMPORTABLE: Final = 0x4
_DEDICATED_ONLY: Final = 0x1


_QUICK: Final = frozenset(
    {
        "vkResetCommandPool",
        "vkBeginCommandBuffer",
        "vkCmdCopyBuffer",
        "vkCmdPipelineBarrier",
        "vkUpdateDescriptorSets",
        "vkCmdBindPipeline",
        "vkCmdBindDescriptorSets",
        "vkCmdPushConstants",
        "vkCmdDispatch",
        "vkEndCommandBuffer",
        "vkResetFences",
        "vkGetFenceStatus",
    }
)
"""Calls of a microsecond that wait for nobody. Where many threads want to run it takes a hundred times as long to get the
interpreter lock back: these keep it, unless a validation layer calls back. They take plain integers, which is a third of the time
of cffi's typed pointers."""


class Region(NamedTuple):
    """Bytes to copy between two buffers."""

    source: int
    destination: int
    nbytes: int


class Requirements(NamedTuple):
    """What a buffer asks of its memory; bit ``i`` of ``type_bits`` allows memory type ``i``."""

    nbytes: int
    alignment: int
    type_bits: int


class Facts:
    """Structs that the driver has filled. A path names a field: ``"memoryHeaps.0.size"``; an absent struct is zero."""

    def __init__(self, structs: dict[str, Any], ffi: Any) -> None:
        self._structs = structs
        self._ffi = ffi

    def _find(self, struct: str, path: str) -> Any:
        value = self._structs[struct]
        for part in path.split("."):
            value = value[int(part)] if part.isdigit() else getattr(value, part)
        return value

    def number(self, struct: str, path: str) -> int:
        return int(self._find(struct, path)) if struct in self._structs else 0

    def numbers(self, struct: str, path: str) -> tuple[int, int, int]:
        x, y, z = self._find(struct, path)
        return int(x), int(y), int(z)

    def text(self, struct: str, path: str) -> str:
        if struct not in self._structs:
            return ""
        return str(self._ffi.string(self._find(struct, path)).decode(errors="replace"))


class Vulkan:
    """The Vulkan library.

    Raises:
        BackendUnavailableError: There is no Vulkan loader (``libvulkan``) on this machine.
    """

    def __init__(self) -> None:
        try:
            import vulkan
        except (ImportError, OSError) as error:
            # The binding loads libvulkan at import and raises OSError without it.
            raise BackendUnavailableError(
                f"the Vulkan loader cannot be loaded ({error})", backend=BACKEND, remedy=install_line("loader")
            ) from None
        self._vk: Any = vulkan
        self._ffi: Any = vulkan.ffi
        self._functions: dict[str, Any] = {}
        self._kinds: dict[str, int] = {}
        """``sType`` by the name of the struct."""
        self._constants: dict[tuple[object, ...], Any] = {}
        self._callbacks: dict[int, Any] = {}

    # The choke point, and what builds arguments.

    def call(self, name: str, *arguments: object) -> int:
        """Call the function ``name`` and give its result code; 0 where it has none."""
        result = self._functions.get(name) or self._resolve(name)
        code = result(*arguments)
        return 0 if code is None else int(code)

    def _resolve(self, name: str, instance: Instance | None = None) -> Any:
        if instance is None:
            function = getattr(self._vk.lib, name)
        else:
            address = self._vk.lib.vkGetInstanceProcAddr(self._cast("VkInstance", instance), name.encode())
            function = self._ffi.cast(f"PFN_{name}", address)
        if name in _QUICK:
            function = self._quick(function)
        self._functions[name] = function
        return function

    def _quick(self, function: Any) -> Callable[..., int | None]:
        """The same function, for plain integers."""
        signature = self._ffi.typeof(function)
        integers = {4: ctypes.c_uint32, 8: ctypes.c_uint64}
        arguments = [integers[self._ffi.sizeof(kind)] for kind in signature.args]
        result = None if signature.result.kind == "void" else ctypes.c_int32
        # A validation layer calls back into Python: whoever holds the interpreter lock must not wait for its locks.
        prototype = ctypes.CFUNCTYPE if self._callbacks else ctypes.PYFUNCTYPE
        quick: Callable[..., int | None] = prototype(result, *arguments)(self._int(function))
        return quick

    def _must(self, name: str, *arguments: object, needed: int | None = None, also: int = SUCCESS) -> int:
        # Positive codes are no errors, but not what was asked for either, but for the one that the caller expects.
        code = self.call(name, *arguments)
        if code not in {SUCCESS, also}:
            raise from_result(name, code, needed=needed)
        return code

    def _cast(self, ctype: str, handle: int | None) -> Any:
        return self._ffi.cast(ctype, handle or 0)

    def _int(self, pointer: Any) -> int:
        return int(self._ffi.cast("uintptr_t", pointer))

    def _struct(self, ctype: str, **fields: Any) -> Any:
        # A pointer to a struct with its sType. Arrays among the fields must be kept by the caller until the call.
        struct = self._ffi.new(f"{ctype}*", fields)
        kind = self._kinds.get(ctype)
        if kind is None:
            kind = self._kinds[ctype] = getattr(self._vk, ctype)().sType
        struct.sType = kind
        return struct

    def _constant(self, ctype: str, **fields: int) -> int:
        """The address of a struct of numbers, which stays."""
        key = ctype, *fields.items()
        struct = self._constants.get(key)
        if struct is None:  # another thread may come to the same: the one that stays
            struct = self._constants.setdefault(key, self._struct(ctype, **fields))
        return self._int(struct)

    def _array(self, ctype: str, items: Iterable[Any]) -> Any:
        return self._ffi.new(f"{ctype}[]", list(items))

    def _strings(self, strings: Iterable[str]) -> tuple[Any, list[Any]]:
        kept = [self._ffi.new("char[]", string.encode()) for string in strings]
        return self._ffi.new("char*[]", kept), kept

    def _chain(self, head: Any, structs: Sequence[Any]) -> None:
        for struct in structs:
            struct.pNext = head.pNext
            head.pNext = self._ffi.cast("void*", struct)

    def _create(self, name: str, ctype: str, owner: Any, info: Any, needed: int | None = None) -> int:
        out = self._ffi.new(f"{ctype}*")
        self._must(name, owner, info, self._ffi.NULL, out, needed=needed)
        return self._int(out[0])

    def _destroy(self, name: str, device: Device, ctype: str, handle: int) -> None:
        self.call(name, self._cast("VkDevice", device), self._cast(ctype, handle), self._ffi.NULL)

    def _enumerate(self, name: str, ctype: str, *arguments: Any) -> list[Any]:
        # The items are copied into a list; structs among them refer to `out`, which cffi keeps alive through them.
        while True:
            count = self._ffi.new("uint32_t*")
            self._must(name, *arguments, count, self._ffi.NULL, also=INCOMPLETE)
            out = self._ffi.new(f"{ctype}[]", count[0])
            # A device may come or go between the two calls.
            if self._must(name, *arguments, count, out, also=INCOMPLETE) == SUCCESS:
                return [out[i] for i in range(count[0])] if count[0] else []

    # Instance

    def instance_version(self) -> int:
        """The newest Vulkan version that the loader supports, packed as in ``VK_MAKE_API_VERSION``."""
        out = self._ffi.new("uint32_t*")
        try:
            self._must("vkEnumerateInstanceVersion", out)
        except self._ffi.error:  # a loader of Vulkan 1.0 has no such function
            return 1 << 22
        return int(out[0])

    def instance_extensions(self, layer: str | None = None) -> frozenset[str]:
        name = self._ffi.NULL if layer is None else self._ffi.new("char[]", layer.encode())
        found = self._enumerate("vkEnumerateInstanceExtensionProperties", "VkExtensionProperties", name)
        return frozenset(self._ffi.string(item.extensionName).decode() for item in found)

    def instance_layers(self) -> frozenset[str]:
        found = self._enumerate("vkEnumerateInstanceLayerProperties", "VkLayerProperties")
        return frozenset(self._ffi.string(item.layerName).decode() for item in found)

    def create_instance(
        self, *, version: int, extensions: Sequence[str], layers: Sequence[str], portability: bool
    ) -> Instance:
        name = self._ffi.new("char[]", b"ggufstream")
        application = self._struct("VkApplicationInfo", pApplicationName=name, pEngineName=name, apiVersion=version)
        extension_names, _kept_extensions = self._strings(extensions)
        layer_names, _kept_layers = self._strings(layers)
        info = self._struct(
            "VkInstanceCreateInfo",
            flags=1 if portability else 0,
            pApplicationInfo=application,
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=extension_names,
            enabledLayerCount=len(layers),
            ppEnabledLayerNames=layer_names,
        )
        out = self._ffi.new("VkInstance*")
        self._must("vkCreateInstance", info, self._ffi.NULL, out)
        return Instance(self._int(out[0]))

    def destroy_instance(self, instance: Instance) -> None:
        self.call("vkDestroyInstance", self._cast("VkInstance", instance), self._ffi.NULL)

    def create_messenger(self, instance: Instance, report: Callable[[str], None]) -> Messenger:
        """Give warnings and errors of the validation layer to ``report``, from whichever thread makes the call."""

        def forward(_severity: int, _kind: int, data: Any, _user: Any) -> int:
            report(self._ffi.string(data.pMessage).decode(errors="replace"))
            return 0

        for name in ("vkCreateDebugUtilsMessengerEXT", "vkDestroyDebugUtilsMessengerEXT"):
            self._resolve(name, instance)
        callback = self._ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT", forward)
        info = self._struct(
            "VkDebugUtilsMessengerCreateInfoEXT",
            messageSeverity=0x100 | 0x1000,
            messageType=0x2 | 0x4,
            pfnUserCallback=callback,
        )
        owner = self._cast("VkInstance", instance)
        messenger = self._create("vkCreateDebugUtilsMessengerEXT", "VkDebugUtilsMessengerEXT", owner, info)
        self._callbacks[messenger] = callback
        return Messenger(messenger)

    def destroy_messenger(self, instance: Instance, messenger: Messenger) -> None:
        owner = self._cast("VkInstance", instance)
        handle = self._cast("VkDebugUtilsMessengerEXT", messenger)
        self.call("vkDestroyDebugUtilsMessengerEXT", owner, handle, self._ffi.NULL)
        self._callbacks.pop(messenger, None)

    # Physical devices

    def physical_devices(self, instance: Instance) -> list[PhysicalDevice]:
        owner = self._cast("VkInstance", instance)
        found = self._enumerate("vkEnumeratePhysicalDevices", "VkPhysicalDevice", owner)
        return [PhysicalDevice(self._int(handle)) for handle in found]

    def device_extensions(self, device: PhysicalDevice) -> frozenset[str]:
        owner = self._cast("VkPhysicalDevice", device)
        found = self._enumerate("vkEnumerateDeviceExtensionProperties", "VkExtensionProperties", owner, self._ffi.NULL)
        return frozenset(self._ffi.string(item.extensionName).decode() for item in found)

    def api_version(self, device: PhysicalDevice) -> int:
        out = self._ffi.new("VkPhysicalDeviceProperties*")
        self.call("vkGetPhysicalDeviceProperties", self._cast("VkPhysicalDevice", device), out)
        return int(out.apiVersion)

    def query(self, device: PhysicalDevice, what: str, head: str, parts: Sequence[str]) -> Facts:
        """Fill struct ``head`` and the structs ``parts`` chained to it by ``vkGetPhysicalDevice<what>2``."""
        structs = {name: self._struct(name) for name in (head, *parts)}
        self._chain(structs[head], [structs[name] for name in parts])
        self.call(f"vkGetPhysicalDevice{what}2", self._cast("VkPhysicalDevice", device), structs[head])
        return Facts(structs, self._ffi)

    def queue_families(self, device: PhysicalDevice) -> list[tuple[int, int]]:
        """Flags and number of queues of each family."""
        owner = self._cast("VkPhysicalDevice", device)
        found = self._enumerate("vkGetPhysicalDeviceQueueFamilyProperties", "VkQueueFamilyProperties", owner)
        return [(int(family.queueFlags), int(family.queueCount)) for family in found]

    # Device

    def create_device(
        self,
        device: PhysicalDevice,
        *,
        families: Sequence[int],
        extensions: Sequence[str],
    ) -> Device:
        """A logical device with one queue of each family and no optional feature."""
        priority = self._array("float", [1.0])
        queues = self._ffi.new("VkDeviceQueueCreateInfo[]", len(families))
        for queue, family in zip(queues, families, strict=True):
            queue.sType = self._vk.VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO
            queue.queueFamilyIndex = family
            queue.queueCount = 1
            queue.pQueuePriorities = priority
        names, _kept = self._strings(extensions)
        info = self._struct(
            "VkDeviceCreateInfo",
            queueCreateInfoCount=len(families),
            pQueueCreateInfos=queues,
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=names,
        )
        return Device(self._create("vkCreateDevice", "VkDevice", self._cast("VkPhysicalDevice", device), info))

    def destroy_device(self, device: Device) -> None:
        self.call("vkDestroyDevice", self._cast("VkDevice", device), self._ffi.NULL)

    def wait_device_idle(self, device: Device) -> None:
        self._must("vkDeviceWaitIdle", self._cast("VkDevice", device))

    def queue(self, device: Device, family: int) -> Queue:
        out = self._ffi.new("VkQueue*")
        self.call("vkGetDeviceQueue", self._cast("VkDevice", device), family, 0, out)
        return Queue(self._int(out[0]))

    # Memory

    def create_buffer(
        self, device: Device, nbytes: int, *, usage: int, families: Sequence[int], imported: bool = False
    ) -> Buffer:
        """A buffer that all queues of ``families`` may use at any time; ``imported``: over pages of the host."""
        indices = self._array("uint32_t", families)
        shared = len(families) > 1
        info = self._struct(
            "VkBufferCreateInfo",
            size=nbytes,
            usage=usage,
            sharingMode=1 if shared else 0,
            queueFamilyIndexCount=len(families) if shared else 0,
            pQueueFamilyIndices=indices if shared else self._ffi.NULL,
        )
        external = [self._struct("VkExternalMemoryBufferCreateInfo", handleTypes=_HOST_POINTER)] if imported else []
        self._chain(info, external)
        owner = self._cast("VkDevice", device)
        return Buffer(self._create("vkCreateBuffer", "VkBuffer", owner, info, needed=nbytes))

    def destroy_buffer(self, device: Device, buffer: Buffer) -> None:
        self._destroy("vkDestroyBuffer", device, "VkBuffer", buffer)

    def requirements(self, device: Device, buffer: Buffer) -> Requirements:
        out = self._ffi.new("VkMemoryRequirements*")
        self.call("vkGetBufferMemoryRequirements", self._cast("VkDevice", device), self._cast("VkBuffer", buffer), out)
        return Requirements(int(out.size), int(out.alignment), int(out.memoryTypeBits))

    def allocate_memory(self, device: Device, nbytes: int, *, memory_type: int, buffer: Buffer) -> Memory:
        """Memory for ``buffer`` alone. NVIDIA's driver (580) takes 1 ms a GiB for that, and 18 to 28 where it is not said."""
        dedicated = self._struct("VkMemoryDedicatedAllocateInfo", buffer=self._cast("VkBuffer", buffer))
        info = self._struct("VkMemoryAllocateInfo", allocationSize=nbytes, memoryTypeIndex=memory_type)
        self._chain(info, [dedicated])
        owner = self._cast("VkDevice", device)
        return Memory(self._create("vkAllocateMemory", "VkDeviceMemory", owner, info, needed=nbytes))

    def takes_host_pages(self, device: PhysicalDevice, *, usage: int) -> bool:
        """Whether the driver says that such buffers may lie over pages of the host."""
        info = self._struct("VkPhysicalDeviceExternalBufferInfo", usage=usage, handleType=_HOST_POINTER)
        out = self._struct("VkExternalBufferProperties")
        self.call("vkGetPhysicalDeviceExternalBufferProperties", self._cast("VkPhysicalDevice", device), info, out)
        features = int(out.externalMemoryProperties.externalMemoryFeatures)
        return bool(features & _IMPORTABLE) and not features & _DEDICATED_ONLY

    def host_page_types(self, instance: Instance, device: Device, address: int) -> int:
        """Bit ``i``: what lies at ``address`` in the host may be imported as memory type ``i``."""
        name = "vkGetMemoryHostPointerPropertiesEXT"
        self._resolve(name, instance)
        out = self._struct("VkMemoryHostPointerPropertiesEXT")
        self._must(name, self._cast("VkDevice", device), _HOST_POINTER, self._cast("void*", address), out)
        return int(out.memoryTypeBits)

    def import_memory(self, device: Device, address: int, nbytes: int, *, memory_type: int) -> Memory:
        """Pages of the host as device memory; they must stay mapped until :meth:`free_memory`."""
        pages = self._struct(
            "VkImportMemoryHostPointerInfoEXT", handleType=_HOST_POINTER, pHostPointer=self._cast("void*", address)
        )
        info = self._struct("VkMemoryAllocateInfo", allocationSize=nbytes, memoryTypeIndex=memory_type)
        self._chain(info, [pages])
        owner = self._cast("VkDevice", device)
        return Memory(self._create("vkAllocateMemory", "VkDeviceMemory", owner, info, needed=nbytes))

    def free_memory(self, device: Device, memory: Memory) -> None:
        self._destroy("vkFreeMemory", device, "VkDeviceMemory", memory)

    def bind_buffer(self, device: Device, buffer: Buffer, memory: Memory) -> None:
        handles = self._cast("VkDevice", device), self._cast("VkBuffer", buffer)
        self._must("vkBindBufferMemory", *handles, self._cast("VkDeviceMemory", memory), 0)

    def map_memory(self, device: Device, memory: Memory, nbytes: int) -> Bytes:
        """All of an allocation as bytes, until :meth:`unmap_memory`; the array must not be touched after that."""
        out = self._ffi.new("void**")
        handles = self._cast("VkDevice", device), self._cast("VkDeviceMemory", memory)
        self._must("vkMapMemory", *handles, 0, nbytes, 0, out, needed=nbytes)
        return np.frombuffer(self._ffi.buffer(out[0], nbytes), np.uint8)

    def unmap_memory(self, device: Device, memory: Memory) -> None:
        self.call("vkUnmapMemory", self._cast("VkDevice", device), self._cast("VkDeviceMemory", memory))

    def flush(self, device: Device, memory: Memory, offset: int, nbytes: int) -> None:
        """Make host writes visible to the device; offset and size are multiples of ``nonCoherentAtomSize``."""
        self._sync("vkFlushMappedMemoryRanges", device, memory, offset, nbytes)

    def invalidate(self, device: Device, memory: Memory, offset: int, nbytes: int) -> None:
        """Make device writes visible to the host; offset and size are multiples of ``nonCoherentAtomSize``."""
        self._sync("vkInvalidateMappedMemoryRanges", device, memory, offset, nbytes)

    def _sync(self, name: str, device: Device, memory: Memory, offset: int, nbytes: int) -> None:
        handle = self._cast("VkDeviceMemory", memory)
        span = self._struct("VkMappedMemoryRange", memory=handle, offset=offset, size=nbytes)
        self._must(name, self._cast("VkDevice", device), 1, span)

    # Commands and fences

    def create_command_pool(self, device: Device, family: int) -> CommandPool:
        info = self._struct("VkCommandPoolCreateInfo", flags=0x1, queueFamilyIndex=family)
        return CommandPool(self._create("vkCreateCommandPool", "VkCommandPool", self._cast("VkDevice", device), info))

    def destroy_command_pool(self, device: Device, pool: CommandPool) -> None:
        """Free the pool and its command buffers."""
        self._destroy("vkDestroyCommandPool", device, "VkCommandPool", pool)

    def allocate_command_buffer(self, device: Device, pool: CommandPool) -> CommandBuffer:
        """A primary command buffer; it goes with its pool."""
        info = self._struct(
            "VkCommandBufferAllocateInfo", commandPool=self._cast("VkCommandPool", pool), commandBufferCount=1
        )
        out = self._ffi.new("VkCommandBuffer*")
        self._must("vkAllocateCommandBuffers", self._cast("VkDevice", device), info, out)
        return CommandBuffer(self._int(out[0]))

    def begin(self, device: Device, pool: CommandPool, commands: CommandBuffer) -> None:
        """Empty the pool, which holds ``commands`` alone, and start recording for one submission."""
        self._must("vkResetCommandPool", device, pool, 0)
        self._must("vkBeginCommandBuffer", commands, self._constant("VkCommandBufferBeginInfo", flags=0x1))

    def end(self, commands: CommandBuffer) -> None:
        self._must("vkEndCommandBuffer", commands)

    def copy(self, commands: CommandBuffer, source: Buffer, destination: Buffer, regions: Sequence[Region]) -> None:
        numbers = array("Q", chain.from_iterable(regions))  # as an array of VkBufferCopy has them
        self.call("vkCmdCopyBuffer", commands, source, destination, len(regions), numbers.buffer_info()[0])

    def barrier(self, commands: CommandBuffer, *, host: bool = False) -> None:
        """All that came before is finished and visible to all that follows; with ``host``, to the host as well."""
        memory = self._constant(
            "VkMemoryBarrier",
            srcAccessMask=_ACCESS_WRITE,
            dstAccessMask=_ACCESS_READ | _ACCESS_WRITE | (_ACCESS_HOST if host else 0),
        )
        stages = _STAGE_ALL, _STAGE_ALL | (_STAGE_HOST if host else 0)
        self.call("vkCmdPipelineBarrier", commands, *stages, 0, 1, memory, 0, 0, 0, 0)

    def create_fence(self, device: Device) -> Fence:
        info = self._struct("VkFenceCreateInfo")
        return Fence(self._create("vkCreateFence", "VkFence", self._cast("VkDevice", device), info))

    def destroy_fence(self, device: Device, fence: Fence) -> None:
        self._destroy("vkDestroyFence", device, "VkFence", fence)

    def reset_fence(self, device: Device, fence: Fence) -> None:
        fences = array("Q", [fence])
        self._must("vkResetFences", device, 1, fences.buffer_info()[0])

    def fence_done(self, device: Device, fence: Fence) -> bool:
        return self._must("vkGetFenceStatus", device, fence, also=NOT_READY) == SUCCESS

    def wait_fence(self, device: Device, fence: Fence, nanoseconds: int) -> bool:
        """Whether the fence was reached within ``nanoseconds``."""
        fences = self._array("VkFence", [self._cast("VkFence", fence)])
        owner = self._cast("VkDevice", device)
        return self._must("vkWaitForFences", owner, 1, fences, 1, nanoseconds, also=TIMEOUT) == SUCCESS

    def submit(self, queue: Queue, commands: CommandBuffer, fence: Fence) -> None:
        """Run ``commands`` and reach ``fence`` after that. The caller holds the queue's lock."""
        buffers = self._array("VkCommandBuffer", [self._cast("VkCommandBuffer", commands)])
        info = self._struct("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=buffers)
        self._must("vkQueueSubmit", self._cast("VkQueue", queue), 1, info, self._cast("VkFence", fence))

    # Compute

    def create_shader_module(self, device: Device, code: bytes) -> ShaderModule:
        """``code`` is SPIR-V: a multiple of four bytes."""
        words = self._ffi.new("uint32_t[]", len(code) // 4)
        self._ffi.memmove(words, code, len(code))
        info = self._struct("VkShaderModuleCreateInfo", codeSize=len(code), pCode=words)
        return ShaderModule(
            self._create("vkCreateShaderModule", "VkShaderModule", self._cast("VkDevice", device), info)
        )

    def destroy_shader_module(self, device: Device, module: ShaderModule) -> None:
        self._destroy("vkDestroyShaderModule", device, "VkShaderModule", module)

    def create_descriptor_set_layout(self, device: Device, buffers: int) -> DescriptorSetLayout:
        """Bindings 0 to ``buffers - 1``, each a storage buffer of compute shaders."""
        bindings = self._ffi.new("VkDescriptorSetLayoutBinding[]", buffers)
        for index, binding in enumerate(bindings):
            binding.binding = index
            binding.descriptorType = self._vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
            binding.descriptorCount = 1
            binding.stageFlags = self._vk.VK_SHADER_STAGE_COMPUTE_BIT
        info = self._struct("VkDescriptorSetLayoutCreateInfo", bindingCount=buffers, pBindings=bindings)
        owner = self._cast("VkDevice", device)
        return DescriptorSetLayout(self._create("vkCreateDescriptorSetLayout", "VkDescriptorSetLayout", owner, info))

    def destroy_descriptor_set_layout(self, device: Device, layout: DescriptorSetLayout) -> None:
        self._destroy("vkDestroyDescriptorSetLayout", device, "VkDescriptorSetLayout", layout)

    def create_pipeline_layout(self, device: Device, layout: DescriptorSetLayout, push_bytes: int) -> PipelineLayout:
        """One descriptor set and ``push_bytes`` of push constants."""
        layouts = self._array("VkDescriptorSetLayout", [self._cast("VkDescriptorSetLayout", layout)])
        push = self._ffi.new(
            "VkPushConstantRange*", {"stageFlags": self._vk.VK_SHADER_STAGE_COMPUTE_BIT, "size": push_bytes}
        )
        info = self._struct(
            "VkPipelineLayoutCreateInfo",
            setLayoutCount=1,
            pSetLayouts=layouts,
            pushConstantRangeCount=1 if push_bytes else 0,
            pPushConstantRanges=push,
        )
        owner = self._cast("VkDevice", device)
        return PipelineLayout(self._create("vkCreatePipelineLayout", "VkPipelineLayout", owner, info))

    def destroy_pipeline_layout(self, device: Device, layout: PipelineLayout) -> None:
        self._destroy("vkDestroyPipelineLayout", device, "VkPipelineLayout", layout)

    def create_compute_pipeline(
        self,
        device: Device,
        module: ShaderModule,
        layout: PipelineLayout,
        *,
        constants: Sequence[int] = (),
    ) -> Pipeline:
        """Entry point ``main``; ``constants`` are the 32-bit specialization constants of ids 0, 1, …"""
        name = self._ffi.new("char[]", b"main")
        data = self._array("uint32_t", [constant & 0xFFFFFFFF for constant in constants])
        entries = self._ffi.new("VkSpecializationMapEntry[]", [(i, 4 * i, 4) for i in range(len(constants))])
        special = self._ffi.new("VkSpecializationInfo*", (len(constants), entries, 4 * len(constants), data))
        info = self._ffi.new("VkComputePipelineCreateInfo*")
        info.sType = self._vk.VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO
        info.layout = self._cast("VkPipelineLayout", layout)
        info.stage.sType = self._vk.VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO
        info.stage.stage = self._vk.VK_SHADER_STAGE_COMPUTE_BIT
        info.stage.module = self._cast("VkShaderModule", module)
        info.stage.pName = name
        info.stage.pSpecializationInfo = special
        out = self._ffi.new("VkPipeline*")
        no_cache = self._cast("VkPipelineCache", None)
        owner = self._cast("VkDevice", device)
        self._must("vkCreateComputePipelines", owner, no_cache, 1, info, self._ffi.NULL, out)
        return Pipeline(self._int(out[0]))

    def destroy_pipeline(self, device: Device, pipeline: Pipeline) -> None:
        self._destroy("vkDestroyPipeline", device, "VkPipeline", pipeline)

    def create_descriptor_pool(self, device: Device, *, sets: int, buffers: int) -> DescriptorPool:
        """Room for ``sets`` sets with ``buffers`` storage buffers in all of them together."""
        size = self._ffi.new("VkDescriptorPoolSize*", (self._vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, buffers))
        info = self._struct("VkDescriptorPoolCreateInfo", maxSets=sets, poolSizeCount=1, pPoolSizes=size)
        owner = self._cast("VkDevice", device)
        return DescriptorPool(self._create("vkCreateDescriptorPool", "VkDescriptorPool", owner, info))

    def destroy_descriptor_pool(self, device: Device, pool: DescriptorPool) -> None:
        """Free the pool and its sets."""
        self._destroy("vkDestroyDescriptorPool", device, "VkDescriptorPool", pool)

    def allocate_descriptor_set(
        self, device: Device, pool: DescriptorPool, layout: DescriptorSetLayout
    ) -> DescriptorSet:
        layouts = self._array("VkDescriptorSetLayout", [self._cast("VkDescriptorSetLayout", layout)])
        info = self._struct(
            "VkDescriptorSetAllocateInfo",
            descriptorPool=self._cast("VkDescriptorPool", pool),
            descriptorSetCount=1,
            pSetLayouts=layouts,
        )
        out = self._ffi.new("VkDescriptorSet*")
        self._must("vkAllocateDescriptorSets", self._cast("VkDevice", device), info, out)
        return DescriptorSet(self._int(out[0]))

    def write_descriptors(
        self, device: Device, descriptors: DescriptorSet, bindings: Sequence[tuple[Buffer, int, int]]
    ) -> None:
        """Bind to 0, 1, … a buffer from an offset on for so many bytes."""
        infos = self._ffi.new(
            "VkDescriptorBufferInfo[]", [(self._cast("VkBuffer", buffer), *span) for buffer, *span in bindings]
        )
        writes = self._ffi.new("VkWriteDescriptorSet[]", len(bindings))
        for index, write in enumerate(writes):
            write.sType = self._vk.VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET
            write.dstSet = self._cast("VkDescriptorSet", descriptors)
            write.dstBinding = index
            write.descriptorCount = 1
            write.descriptorType = self._vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
            write.pBufferInfo = infos + index
        self.call("vkUpdateDescriptorSets", device, len(bindings), self._int(writes), 0, 0)

    def bind(
        self, commands: CommandBuffer, pipeline: Pipeline, layout: PipelineLayout, descriptors: DescriptorSet
    ) -> None:
        self.call("vkCmdBindPipeline", commands, _BIND_COMPUTE, pipeline)
        sets = array("Q", [descriptors])
        self.call("vkCmdBindDescriptorSets", commands, _BIND_COMPUTE, layout, 0, 1, sets.buffer_info()[0], 0, 0)

    def push_constants(self, commands: CommandBuffer, layout: PipelineLayout, data: bytes) -> None:
        address = self._int(self._ffi.from_buffer(data))
        self.call("vkCmdPushConstants", commands, layout, _STAGE_COMPUTE, 0, len(data), address)

    def dispatch(self, commands: CommandBuffer, x: int, y: int = 1, z: int = 1) -> None:
        self.call("vkCmdDispatch", commands, x, y, z)
