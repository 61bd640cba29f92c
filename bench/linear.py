"""Time ``Backend.linear`` on one weight: ``python bench/linear.py [--backend vulkan] [--device llvmpipe] [--type Q8_0] …``

Prints, for each type and batch: seconds (best of several), bytes of weights a second, and the largest difference from
``cpu_scalar`` on the first rows, relative to the largest value. The default weight has the shape of Gemma 3 270M's
``token_embd``. Compare only figures of one run on one machine.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack

import numpy as np

from ggufstream.backends.base import Backend, Copy, Intent, Slice
from ggufstream.backends.cpu import CpuBackend
from ggufstream.backends.cpu_scalar import CpuScalarBackend
from ggufstream.backends.products import multiply_in_order
from ggufstream.decode import DECODABLE, decode
from ggufstream.ggml_types import BY_NAME, GGMLType
from ggufstream.layouts import F32, X8, Bytes, Extent, Layout, Planar, Raw


def open_backend(name: str, device: str | None) -> Backend:
    if name == "vulkan":
        from ggufstream.backends.vulkan.backend import VulkanBackend

        return VulkanBackend(device)
    return {"cpu": CpuBackend, "cpu_scalar": CpuScalarBackend}[name]()


def random_blocks(ggml_type: GGMLType, n: int) -> Bytes:
    """Random bytes, with 1/64 for every float16 field and small floats for elements: finite, whatever the type."""
    rng = np.random.default_rng(0)
    if not ggml_type.is_quantized:
        values = rng.standard_normal(n, np.float32)
        if ggml_type.name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if ggml_type.name == "F16" else np.float32).view(np.uint8)
    blocks = rng.integers(0, 256, n * ggml_type.block_bytes, np.uint8).view(ggml_type.block_dtype)
    scales = {"d": 2, "dmin": 2, "m": 2}
    for name, size in ggml_type.fields.items():
        if scales.get(name) == size:
            blocks[name] = np.frombuffer(np.float16(1 / 64).tobytes(), f"V{size}")[0]
        elif (ggml_type.name, name) == ("IQ1_M", "scales"):  # the float16 is in the upper nibbles of four words
            blocks[name] = np.array([0x0111, 0x0111, 0x4111, 0x2111], np.uint16).view("V8")[0]
        elif (ggml_type.name, name) in {("MXFP4", "e"), ("NVFP4", "d")}:
            blocks[name] = np.frombuffer(bytes([0x78 if size == 1 else 0x30] * size), f"V{size}")[0]
    return blocks.view(np.uint8)


def place(
    stack: ExitStack, backend: Backend, blocks: Bytes, ggml_type: GGMLType, row_blocks: int, layout: Layout
) -> list[Slice]:
    """The weight in as few slices as the device allows, a chunk each."""
    row_bytes = row_blocks * ggml_type.block_bytes
    limit = backend.capabilities.max_slice_bytes or backend.capabilities.max_chunk_bytes
    packed_bytes = max(row_bytes, layout.nbytes(Extent(type=ggml_type, rows=1, row_blocks=row_blocks)))
    step = max(1, min(limit, backend.capabilities.max_chunk_bytes) // packed_bytes - 64)
    weight = []
    for start in range(0, blocks.size, step * row_bytes):
        source = blocks[start : start + step * row_bytes]
        extent = Extent(type=ggml_type, rows=source.size // row_bytes, row_blocks=row_blocks)
        nbytes = layout.nbytes(extent)
        chunk = backend.allocate(nbytes + -nbytes % backend.capabilities.slice_alignment)
        stack.callback(chunk.close)
        staging = backend.staging(nbytes)
        runs = layout.runs(extent, 0, extent.blocks)
        layout.pack(extent, source, [staging.view[run.offset : run.offset + run.nbytes] for run in runs])
        if chunk.view is None:
            backend.upload(staging, [Copy(0, chunk, 0, nbytes)]).wait()
        else:
            chunk.view[:nbytes] = staging.view[:nbytes]
            chunk.flush(0, nbytes)
        staging.close()
        weight.append(Slice(chunk=chunk, offset=0, nbytes=nbytes, extent=layout.contents(extent), layout=layout))
    return weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["cpu", "cpu_scalar", "vulkan"], default="vulkan")
    parser.add_argument("--layout", choices=["raw", "planar", "x8"], help="default: the backend's")
    parser.add_argument("--device", help="part of the device's name, such as llvmpipe")
    parser.add_argument("--type", action="append", choices=["all", *sorted(DECODABLE)], help="default: Q8_0")
    parser.add_argument("--rows", type=int, default=262_144)
    parser.add_argument("--n-in", type=int, default=640)
    parser.add_argument("--batch", type=int, action="append", help="vectors; default: 1 and 4")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    names = options.type or ["Q8_0"]
    with open_backend(options.backend, options.device) as backend:
        print(f"{backend.capabilities.device}, {options.rows:,} rows")
        for name in sorted(DECODABLE) if "all" in names else names:
            ggml_type = BY_NAME[name]
            n_in = options.n_in + -options.n_in % ggml_type.block_elements
            row_blocks = n_in // ggml_type.block_elements
            blocks = random_blocks(ggml_type, options.rows * row_blocks)
            some = decode(ggml_type, blocks[: 64 * row_blocks * ggml_type.block_bytes]).reshape(-1, n_in)
            layouts: dict[str, Layout] = {"raw": Raw(), "planar": Planar(), "x8": X8()}
            resolved = backend.resolve(ggml_type, (options.rows, n_in), Intent.LINEAR) or F32()
            layout = layouts[options.layout] if options.layout else resolved
            with ExitStack() as stack:
                weight = place(stack, backend, blocks, ggml_type, row_blocks, layout)
                for n in options.batch or [1, 4]:
                    x = np.random.default_rng(n).standard_normal((n, n_in), np.float32)
                    y = backend.linear(weight, x)  # compiles the shader, touches the memory
                    seconds = []
                    for _ in range(options.repeat):
                        start = time.perf_counter()
                        backend.linear(weight, x)
                        seconds.append(time.perf_counter() - start)
                    want = multiply_in_order(x, some)
                    difference = np.abs(y[:, : len(some)] - want).max() / np.abs(want).max()
                    print(
                        f"{name:7} {layout.name:6} {n_in} in, batch {n:3}: {min(seconds):8.4f} s  "
                        f"{blocks.size / min(seconds) / 1e9:7.2f} GB/s  difference {difference:.1e}"
                    )


if __name__ == "__main__":
    main()
