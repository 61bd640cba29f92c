"""The suite for a machine with an NVIDIA GPU and PyTorch: same bytes, from the page cache onto the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bench.files import model_file, safetensors_file, tensor_bytes
from bench.race import Contestant, Outcome, best, race
from bench.results import Run, Section, Target

__all__ = ["run_gpu"]

LLAMA_CPP = 2.3e9
"""Bytes a second at which llama.cpp loaded a warm 3.8 GB Q8_0 file onto an H200 through Vulkan, October 2026."""


MEMORY_KEPT = ", memory kept"
KEPT = 1 << 30
"""Bytes that a backend may keep beside those of the tensors: staging memory, and what chunks are larger."""


def contestants(raw: Path, same: Path, packed: Path) -> list[Contestant]:
    """``same`` has the bytes of ``raw``; ``packed`` as many, in blocks that go into planes."""
    raw_job = {"file": str(raw), "bytes": tensor_bytes(raw), "touch": 1 << 30}
    packed_job = {"file": str(packed), "bytes": tensor_bytes(packed), "touch": 1 << 30}
    peer_job = raw_job | {"safetensors": str(same)}
    found = [
        Contestant(
            name="pinned copy", function="bench.contestants:pinned_copy", limit=True, packages=("torch",), job=raw_job
        )
    ]
    found += [
        Contestant(
            name=f"page cache, {threads} preadv threads", function="bench.raw_reads:preadv", limit=True,
            arguments={"threads": threads, "into": "ring"}, job=raw_job,
        )
        for threads in sorted({8, len(os.sched_getaffinity(0))})
    ]  # fmt: skip
    kept = {"keep_bytes": raw_job["bytes"] + KEPT}
    found += [
        Contestant(
            name=f"ggufstream {layout}{way}", function="bench.contestants:ours",
            arguments={"backend": "vulkan"} | options, job=job,
        )
        for layout, job in (("raw", raw_job), ("planar", packed_job))
        for way, options in (
            ("", {}), (", staged", {"upload": "staged"}), (", in place", {"upload": "direct"}),
            (MEMORY_KEPT, kept), (f"{MEMORY_KEPT}, in place", kept | {"upload": "direct"}),
        )
    ]  # fmt: skip
    peers: list[tuple[str, str, str, dict[str, str], dict[str, str]]] = [
        ("InstantTensor, MMAP", "instanttensor", "instanttensor", {"INSTANTTENSOR_BACKEND": "MMAP"}, {}),
        ("InstantTensor, BUFFERED", "instanttensor", "instanttensor", {"INSTANTTENSOR_BACKEND": "BUFFERED"}, {}),
        ("InstantTensor", "instanttensor", "instanttensor", {}, {}),
        ("safetensors", "safetensors", "safetensors", {}, {"device": "cuda:0"}),
        ("Run:ai streamer, sync_buffered", "runai_cuda", "runai-model-streamer",
         {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"}, {}),
        ("Run:ai streamer", "runai_cuda", "runai-model-streamer", {}, {}),
        ("fastsafetensors, no GDS", "fastsafetensors", "fastsafetensors", {}, {}),
    ]  # fmt: skip
    found += [
        Contestant(
            name=name, function=f"bench.contestants:{function}", arguments=arguments, packages=(package, "torch"),
            environment=environment, peer=True, job=peer_job,
        )
        for name, function, package, environment, arguments in peers
    ]  # fmt: skip
    return found


def targets(outcomes: list[Outcome]) -> list[Target]:
    """With memory that is new at each load, and with memory that the backend has kept from the load before."""

    def rate(prefix: str, *, kept: bool = False) -> float | None:
        found = best(
            o for o in outcomes if o.contestant.name.startswith(prefix) and (MEMORY_KEPT in o.contestant.name) == kept
        )
        return found.bytes_per_second if found else None

    def over(a: float | None, b: float | None) -> float | None:
        return a / b if a and b else None

    rival, limit = rate("InstantTensor"), rate("pinned copy")
    found = []
    for kept, memory in ((False, ", new memory"), (True, MEMORY_KEPT)):
        raw, planar = rate("ggufstream raw", kept=kept), rate("ggufstream planar", kept=kept)
        found += [
            Target(name=f"raw{memory}, over InstantTensor's best", value=over(raw, rival), bound=1.0),
            Target(name=f"planar{memory}, over InstantTensor's best", value=over(planar, rival), bound=0.7),
            Target(
                name=f"the slower of raw and planar{memory}, over llama.cpp", bound=10,
                value=over(min(raw, planar), LLAMA_CPP) if raw and planar else None,
                note="2.3 GB/s, measured before on an H200",
            ),
            Target(name=f"raw{memory}, over the pinned copy", value=over(raw, limit), bound=0.85),
            Target(name=f"planar{memory}, over the pinned copy", value=over(planar, limit), bound=0.85),
        ]  # fmt: skip
    return found


def run_gpu(run: Run, *, nbytes: int, repeats: int, patience: float, say: Callable[[str], None]) -> None:
    """Make the files, race, judge."""

    say(f"files of {nbytes / 1e9:.1f} GB")
    raw, packed = model_file("F16", nbytes), model_file("Q8_0", nbytes)
    same = safetensors_file(raw)
    outcomes = race(
        contestants(raw, same, packed),
        cold=False,
        repeats=repeats,
        patience=patience,
        deadline=200,
        turn_seconds=60,
        say=say,
    )
    limit = next(o for o in outcomes if o.contestant.name == "pinned copy")
    run.sections.append(
        Section(title=f"{nbytes / 1e9:.1f} GB from the page cache onto the GPU", outcomes=outcomes, limit=limit)
    )
    run.targets += targets(outcomes)
