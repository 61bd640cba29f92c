"""Compute shaders that share a shape: pipelines, one descriptor set, and the compute queue.

Dispatches of one :class:`Kernels` run one at a time: they share the command pool and the descriptor set, and a device
has one compute queue anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import resources

from ggufstream.backends.base import Slice
from ggufstream.backends.vulkan.api import Buffer, CommandBuffer, Pipeline
from ggufstream.backends.vulkan.device import VulkanDevice
from ggufstream.backends.vulkan.transfer import Submission

__all__ = ["MAX_FIELDS", "Binding", "Kernels", "padded", "weight_binding"]

Binding = tuple[Buffer, int, int]
"""A storage buffer, and the offset and size of what the shader sees of it, in bytes."""

MAX_FIELDS = 5
"""Fields that a block may have; the arrays in the shaders' constants are as long."""


class Kernels:
    """Shaders with the same bindings. One thread at a time.

    Args:
        device: Where they run.
        buffers: How many storage buffers each has.
        constant_bytes: Bytes of push constants.
    """

    def __init__(self, device: VulkanDevice, *, buffers: int, constant_bytes: int) -> None:
        self.device = device
        self._pipelines: dict[tuple[str, int], Pipeline] = {}
        api, handle = device.api, device.handle
        with ExitStack() as undo:
            set_layout = api.create_descriptor_set_layout(handle, buffers)
            undo.callback(api.destroy_descriptor_set_layout, handle, set_layout)
            self._layout = api.create_pipeline_layout(handle, set_layout, constant_bytes)
            undo.callback(api.destroy_pipeline_layout, handle, self._layout)
            pool = api.create_descriptor_pool(handle, sets=1, buffers=buffers)
            undo.callback(api.destroy_descriptor_pool, handle, pool)
            self._set = api.allocate_descriptor_set(handle, pool, set_layout)
            self._submission = Submission(device, device.compute)
            self._last = 0
            self._undo = undo.pop_all()

    def run(
        self,
        shader: str,
        variant: int,
        bindings: Sequence[Binding],
        constants: bytes,
        *,
        groups: int,
        deep: int = 1,
        before: Callable[[CommandBuffer], None] = lambda _: None,
    ) -> None:
        """Run a shader, and wait for its end; what it wrote is visible to the host and to later commands.

        Args:
            shader: Name of its file, without the suffix.
            variant: Its specialization constant 0.
            bindings: Its storage buffers.
            constants: Its push constants.
            groups: Workgroups; x and y of their number, as one dimension may be too small for them.
            deep: Workgroups in z.
            before: Records what must happen first.

        Raises:
            DeviceLostError: The device gave up, or did not finish in time.
        """
        api = self.device.api
        pipeline = self._pipeline(shader, variant)
        wide = min(groups, self.device.record.limits.max_compute_work_group_count[0])

        def record(commands: CommandBuffer) -> None:
            # The batch before has ended, so the set is free. What uploads wrote was waited for; this makes it visible.
            api.write_descriptors(self.device.handle, self._set, bindings)
            before(commands)
            api.barrier(commands)
            api.bind(commands, pipeline, self._layout, self._set)
            api.push_constants(commands, self._layout, constants)
            api.dispatch(commands, wide, -(-groups // wide), deep)
            api.barrier(commands, host=True)

        self._last = self._submission.run(record)
        self.wait()

    def wait(self) -> None:
        """Wait for a run whose end was waited for in vain: it may still use its buffers. Raises as :meth:`run`."""
        self._submission.wait(self._last)

    def _pipeline(self, shader: str, variant: int) -> Pipeline:
        key = shader, variant
        if key not in self._pipelines:
            code = resources.files("ggufstream.backends.vulkan").joinpath("shaders", f"{shader}.spv").read_bytes()
            api, handle = self.device.api, self.device.handle
            module = api.create_shader_module(handle, code)
            try:
                self._pipelines[key] = api.create_compute_pipeline(handle, module, self._layout, constants=[variant])
            finally:
                api.destroy_shader_module(handle, module)
        return self._pipelines[key]

    def close(self, free: Callable[[], None]) -> None:
        """Free everything, and call ``free`` for what the shaders used, before the device is closed; what a lost device
        may still use, when that closes.
        """

        def release() -> None:
            free()
            for pipeline in self._pipelines.values():
                self.device.api.destroy_pipeline(self.device.handle, pipeline)
            self._pipelines.clear()
            self._undo.close()

        self._submission.close(release)


def weight_binding(part: Slice, *, lead: int = 0) -> Binding:
    """A slice, up to the end of its last word: shaders read whole words, of which the last may hold a byte or two.

    ``lead`` bytes before it are bound, too, where it does not begin at a place that can be bound.
    """
    nbytes = lead + part.nbytes
    nbytes += -nbytes % 4
    begin = part.offset - lead
    assert 0 <= begin <= part.chunk.nbytes - nbytes, "arenas pad slices, so chunks end at a whole word"
    return Buffer(part.chunk.handle), begin, nbytes


def padded(fields: Sequence[int]) -> tuple[int, ...]:
    """One value a field, as the shaders' arrays have them."""
    return (*fields, *[0] * (MAX_FIELDS - len(fields)))
