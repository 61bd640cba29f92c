"""Devices made of figures, for planning and testing without the hardware.

Each profile is what a device of its kind reports, rounded. They answer "what would happen on that machine", not "how
fast". Where the figures come from stands with each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ggufstream.backends.base import Capabilities

__all__ = ["PROFILES", "Profile"]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A device: its capabilities, and what its kernels read."""

    capabilities: Capabilities
    reads: Literal["planar", "raw"] = "planar"
    """The layout of quantized matrices in its kernels."""
    halves: bool = True
    """Whether it multiplies F16 and BF16; else they are widened."""
    source: str
    """Where the figures come from."""


_PROFILES = (
    Profile(
        capabilities=Capabilities(
            backend="simulated:discrete-24g",
            device="simulated discrete GPU, 24 GiB",
            memory="discrete",
            direct=False,
            budget_bytes=24 * _GIB,
            chunk_bytes=256 * _MIB,
            max_chunk_bytes=4 * _GIB,
            max_slice_bytes=4 * _GIB - 1,
            slice_alignment=64,
        ),
        source="desktop cards of 24 GiB without a resizable BAR, in Vulkan's hardware database: allocations of "
        "4 GiB, storage ranges of 4 GiB - 1, offsets at 16 to 64 bytes",
    ),
    Profile(
        capabilities=Capabilities(
            backend="simulated:discrete-256m-bar",
            device="simulated discrete GPU, 8 GiB and a 256 MiB window",
            memory="discrete",
            direct=False,
            budget_bytes=8 * _GIB - 512 * _MIB,
            chunk_bytes=256 * _MIB,
            max_chunk_bytes=2 * _GIB,
            max_slice_bytes=2 * _GIB - 1,
            slice_alignment=256,
        ),
        source="cards whose host-visible device memory is a heap of 256 MiB of its own, which must not be taken for the "
        "memory; drivers that allocate 2 GiB at most",
    ),
    Profile(
        capabilities=Capabilities(
            backend="simulated:igpu-unified",
            device="simulated integrated GPU, shared memory",
            memory="unified",
            direct=True,
            budget_bytes=8 * _GIB,
            chunk_bytes=256 * _MIB,
            max_chunk_bytes=2 * _GIB,
            max_slice_bytes=128 * _MIB,
            slice_alignment=64,
        ),
        source="integrated GPUs with one heap of half the memory; storage ranges of 128 MiB as in the smallest reports",
    ),
    Profile(
        capabilities=Capabilities(
            backend="simulated:metal-alias",
            device="simulated unified GPU that pins what it maps, 32 GiB",
            memory="unified",
            direct=True,
            budget_bytes=24 * _GIB,
            chunk_bytes=256 * _MIB,
            max_chunk_bytes=18 * _GIB,
            max_slice_bytes=None,
            slice_alignment=32,
            maps_files=True,
            prefers_mapping=True,
            pins_pages=True,
        ),
        reads="raw",
        source="Metal's newBufferWithBytesNoCopy: page-aligned host memory becomes a buffer, and all of it is wired; a "
        "working set of three quarters of the memory is recommended; ggml's kernels read blocks as they are in the file",
    ),
    Profile(
        capabilities=Capabilities(
            backend="simulated:gb10",
            device="simulated GPU that reads pageable host memory, 128 GB",
            memory="unified",
            direct=True,
            budget_bytes=119 * _GIB,
            chunk_bytes=256 * _MIB,
            max_chunk_bytes=64 * _GIB,
            max_slice_bytes=None,
            slice_alignment=16,
            maps_files=True,
            prefers_mapping=True,
        ),
        reads="raw",
        source="NVIDIA GB10: 128 GB of unified memory, and address translation that lets the GPU read any page of the "
        "process without pinning it",
    ),
    Profile(
        capabilities=Capabilities(
            backend="simulated:moltenvk",
            device="simulated Vulkan over Metal, 16 GiB",
            memory="unified",
            direct=True,
            budget_bytes=10 * _GIB,
            chunk_bytes=256 * _MIB,
            max_chunk_bytes=8 * _GIB,
            max_slice_bytes=4 * _GIB - 1,
            slice_alignment=256,
        ),
        halves=False,
        source="MoltenVK's limits on Apple silicon: offsets at 256 bytes, no import of host pointers; products of halves "
        "are left out so that widening on unified memory is covered",
    ),
    Profile(
        capabilities=Capabilities(
            backend="simulated:tiny",
            device="simulated device, 64 MiB in chunks of 4 KiB",
            memory="discrete",
            direct=False,
            budget_bytes=64 * _MIB,
            chunk_bytes=4 * _KIB,
            max_chunk_bytes=64 * _MIB,
            max_slice_bytes=None,
            slice_alignment=256,
        ),
        halves=False,
        source="no device: limits small enough that every test model meets them",
    ),
)

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {profile.capabilities.backend.partition(":")[2]: profile for profile in _PROFILES}
)
"""Profiles by name."""
