"""The suite for any machine: from the page cache and from the disk into host memory and a software Vulkan device."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.files import (
    CACHE,
    GEMMA,
    manifest_file,
    model_file,
    safetensors_file,
    sparse_file,
    tensor_bytes,
    tensor_ranges,
)
from bench.race import Contestant, Outcome, best, race
from bench.results import Run, Section, Target

__all__ = ["PARTS", "Suite"]

VULKAN = "vulkan:llvmpipe"
RUNAI = ("runai-model-streamer",)
STAGING = 256 << 20
SLACK = 64 << 20
"""Host memory above the staging budget that a load may take: records, stacks, imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Sizes and repeats. Every method adds a section and its targets to ``run``."""

    run: Run
    cold_bytes: int
    warm_bytes: int
    peak_bytes: Sequence[int]
    repeats: int
    has_time: bool
    """For a second wait for ``gguf.GGUFReader``."""
    llama_python: str | None
    say: Callable[[str], None]

    def _race(
        self,
        title: str,
        contestants: Sequence[Contestant],
        *,
        cold: bool = False,
        repeats: int = 0,
        patience: float = 20.0,
    ) -> dict[str, Outcome]:
        self.say(title)
        outcomes = race(contestants, cold=cold, repeats=repeats or self.repeats, patience=patience, say=self.say)
        limit = best(o for o in outcomes if o.contestant.limit and o.contestant.arguments.get("into") != "fresh")
        self.run.sections.append(Section(title=title, outcomes=outcomes, limit=limit))
        return {outcome.contestant.name: outcome for outcome in outcomes}

    def header(self) -> None:
        """The header alone, of a file with a large vocabulary and of one with none."""
        for file, bound, what in (
            (GEMMA, 150, "a file with 262,144 tokens"),
            (model_file("F16", self.warm_bytes), 20, "a file without a vocabulary"),
        ):
            if not file.exists():
                note = f"{file} is not there: make models"
                self.run.targets.append(
                    Target(name=f"GGUFReader over the header of {what}", value=None, bound=bound, note=note)
                )
                continue
            job = {"file": str(file)}
            found = self._race(
                f"Header of {what}, warm",
                [
                    Contestant(name="ggufstream.read_index", function="bench.contestants:our_header", job=job),
                    Contestant(
                        name="gguf.GGUFReader",
                        function="bench.contestants:gguf_header",
                        peer=True,
                        packages=("gguf",),
                        job=job,
                    ),
                ],
                patience=5,
            )
            value = _ratio(found["gguf.GGUFReader"].median, found["ggufstream.read_index"].median)
            self.run.targets.append(
                Target(name=f"GGUFReader's time over ours, header of {what}", value=value, bound=bound)
            )

    def cold(self) -> None:
        """From the disk: everything against the best that O_DIRECT gives."""
        file = model_file("F16", self.cold_bytes)
        job = self._job(file, touch=self.cold_bytes)
        limits = [
            _limit("dd, O_DIRECT", "dd", file),
            *(_limit(f"fio, O_DIRECT, depth {depth}", "fio", file, depth=depth) for depth in (2, 8)),
            *(
                _limit(f"preadv, O_DIRECT, {_threads(n)}", "preadv", file, threads=n, into="ring", direct=True)
                for n in (2, 4, 8)
            ),
        ]
        ours = [
            self._ours("ggufstream to cpu", "cpu", job),
            self._ours("ggufstream to cpu, memory kept", "cpu", job, keep_bytes=self.cold_bytes + (64 << 20)),
        ]
        found = self._race(
            f"{self.cold_bytes / 1e9:.1f} GB from the disk (cold)",
            [*limits, *ours, *self._peers(job, cold=True)],
            cold=True,
            repeats=self.repeats,
            patience=60,
        )
        mine, kept = (found[contestant.name] for contestant in ours)
        self._against_limit("cold: ours over the best O_DIRECT read", mine, 0.9)
        self._against_limit("cold: ours, memory kept, over the best O_DIRECT read", kept, 0.9)
        self._against_peers("cold: ours over the best of the others", mine, found)
        self._first_layer("cold", [mine, kept])

    def warm(self) -> None:
        """From the page cache, as it is in the file and repacked."""
        raw, blocks = model_file("F16", self.warm_bytes), model_file("Q8_0", self.warm_bytes)
        job, blocks_job = self._job(raw, touch=self.warm_bytes), self._job(blocks, touch=self.warm_bytes)
        processors = len(os.sched_getaffinity(0))
        limits = [
            _limit(f"preadv, {_threads(n)}", "preadv", raw, threads=n, into="whole")
            for n in sorted({1, processors, 2 * processors})
        ]
        new = f"preadv, {_threads(processors)}, memory new to the process"
        limits.append(_limit(new, "preadv", raw, touch=self.warm_bytes, threads=processors, into="fresh"))
        keep = {"keep_bytes": self.warm_bytes + (64 << 20)}
        ours = [
            self._ours("ggufstream to cpu", "cpu", job),
            self._ours("ggufstream to cpu, memory kept", "cpu", job, **keep),
            self._ours("ggufstream to llvmpipe", VULKAN, job),
            self._ours("ggufstream to llvmpipe, memory kept", VULKAN, job, **keep),
            self._ours("ggufstream to cpu, blocks", "cpu", blocks_job),
            self._ours("ggufstream to cpu, blocks, x8", "cpu", blocks_job, interleave=True),
            self._ours("ggufstream to llvmpipe, blocks, planar", VULKAN, blocks_job),
        ]
        title = f"{self.warm_bytes / 1e9:.1f} GB from the page cache (warm)"
        found = self._race(title, [*limits, *ours, *self._peers(job)])
        cpu, vulkan = found["ggufstream to cpu"], found["ggufstream to llvmpipe"]
        for device in ("cpu", "llvmpipe"):
            mine = found[f"ggufstream to {device}, memory kept"]
            self._against_limit(f"warm: to {device}, memory kept, over the preadv limit", mine, 0.8)
        self._against_peers("warm: to cpu over the best of the others", cpu, found)
        for name, mine, other in (
            ("warm: to cpu, over preadv into new memory", cpu, found[new]),
            ("warm: to llvmpipe, over preadv into new memory", vulkan, found[new]),
            ("warm: x8 over raw, to cpu", found["ggufstream to cpu, blocks, x8"], found["ggufstream to cpu, blocks"]),
            ("warm: planar over raw, to llvmpipe", found["ggufstream to llvmpipe, blocks, planar"], vulkan),
        ):
            self.run.targets.append(
                Target(name=name, value=_ratio(mine.bytes_per_second, other.bytes_per_second), bound=0.8)
            )
        self._first_layer("warm", [found[contestant.name] for contestant in ours])

    def model(self) -> None:
        """A real model, with its vocabulary, which llama.cpp needs."""
        if not GEMMA.exists():
            self.run.notes.append(f"no real model: {GEMMA} is not there (make models)")
            return
        job = self._job(GEMMA, touch=GEMMA.stat().st_size)
        llama = [
            Contestant(
                name=f"llama.cpp{', mapped' if use_mmap else ''}",
                function="bench.contestants:llama_cpp",
                peer=True,
                packages=() if self.llama_python else ("llama-cpp-python",),
                arguments={"use_mmap": use_mmap},
                python=self.llama_python or sys.executable,
                job={"file": str(GEMMA), "touch": GEMMA.stat().st_size},
            )
            for use_mmap in (False, True)
        ]
        ours = [self._ours("ggufstream to cpu", "cpu", job), self._ours("ggufstream to llvmpipe", VULKAN, job)]
        reader = [c for c in self._peers(job) if c.name == "gguf.GGUFReader, copied" and self.has_time]
        self._race(f"{GEMMA.name}, all of a load (warm)", [*ours, *llama, *reader], patience=5)
        self.run.notes.append(
            "llama.cpp's time includes building its vocabulary, ours leaves it in the file until it is asked for."
        )

    def many(self) -> None:
        """The same bytes in 200 tensors and in 20,000."""
        nbytes = 256 << 20
        jobs = {n: self._job(model_file("Q8_0", nbytes, tensors=n), touch=nbytes) for n in (200, 20_000)}
        found = self._race(
            "256 MiB in few and in many tensors (warm)",
            [self._ours(f"{n:,} tensors", "cpu", job) for n, job in jobs.items()],
        )
        value = _ratio(found["20,000 tensors"].median, found["200 tensors"].median)
        self.run.targets.append(
            Target(name="time with 20,000 tensors over that with 200", value=value, bound=3, at_most=True)
        )

    def several(self) -> None:
        """Two loads at once against one after the other."""
        files = [model_file(kind, self.warm_bytes) for kind in ("F16", "Q8_0")]
        job = {
            "files": [str(file) for file in files],
            "touch": 2 * self.warm_bytes,
            "bytes": sum(map(tensor_bytes, files)),
        }
        contestants = [
            Contestant(
                name=name, function="bench.contestants:ours_several", arguments={"concurrent": concurrent}, job=job
            )
            for name, concurrent in (("one after the other", False), ("at once", True))
        ]
        found = self._race(f"Two loads of {self.warm_bytes / 1e9:.1f} GB to cpu (warm)", contestants)
        value = _ratio(found["at once"].median, found["one after the other"].median)
        self.run.targets.append(
            Target(name="time of two loads at once over one after the other", value=value, bound=1.0, at_most=True)
        )

    def digest(self) -> None:
        """What it costs to compare every tensor with a manifest."""
        file = model_file("F16", self.warm_bytes)
        manifest = manifest_file(file)
        job = self._job(file, touch=self.warm_bytes)
        contestants = [self._ours("without", "cpu", job), self._ours("with --digest", "cpu", job, digest=str(manifest))]
        found = self._race(f"{self.warm_bytes / 1e9:.1f} GB compared with a manifest (warm)", contestants)
        value = _ratio(found["with --digest"].median, found["without"].median)
        self.run.targets.append(
            Target(name="time with --digest over that without", value=value, bound=1.1, at_most=True)
        )

    def peak(self) -> None:
        """The most host memory of loads onto a card of its own; the files are holes, so that any disk has room."""
        most: list[float] = []
        for nbytes in self.peak_bytes:
            with sparse_file(nbytes) as file:
                job = {
                    "file": str(file),
                    "small": str(model_file("Q8_0", 1 << 20, tensors=8)),
                    "bytes": tensor_bytes(file),
                }
                contestants = [
                    Contestant(
                        name=f"io {io}",
                        function="bench.contestants:our_peak",
                        arguments={"io": io, "staging_bytes": STAGING},
                        job=job,
                    )
                    for io in ("pread", "mmap", "direct")
                ]
                title = f"Peak of host memory, {nbytes / 2**30:g} GiB onto a card of its own (cold, a sparse file)"
                found = self._race(title, contestants, cold=True, repeats=1, patience=0.1)
            peaks = {name: max((f["peak_bytes"] for f in o.all_facts), default=None) for name, o in found.items()}
            most += [peak / 2**20 for peak in peaks.values() if peak is not None]
        self.run.targets.append(
            Target(
                name="peak of host memory above the start",
                value=max(most, default=None),
                bound=(STAGING + SLACK) / 2**20,
                at_most=True,
                unit="MiB",
                note="staging budget of 256 MiB and 64 MiB, at any size of the file",
            )
        )

    def _job(self, file: Path, *, touch: int) -> dict[str, Any]:
        return {"file": str(file), "bytes": tensor_bytes(file), "touch": touch}

    def _ours(self, name: str, backend: str, job: dict[str, Any], **options: Any) -> Contestant:
        return Contestant(
            name=name, function="bench.contestants:ours", arguments={"backend": backend} | options, job=job
        )

    def _peers(self, job: dict[str, Any], *, cold: bool = False) -> list[Contestant]:
        file = Path(job["file"])
        # What goes through the page cache needs memory there, too.
        buffered = job | {"touch": job["touch"] * (1 + cold)}
        ranges = job | {"ranges": [(offset, nbytes) for _, offset, nbytes in tensor_ranges(file)]}
        peers: list[tuple[str, str, tuple[str, ...], dict[str, str], dict[str, Any]]] = [
            ("gguf.GGUFReader, copied", "gguf_reader", ("gguf",), {}, buffered),
            ("Run:ai streamer", "runai_ranges", RUNAI, {}, ranges),
            (
                "Run:ai streamer, 256 MiB, sync_buffered",
                "runai_ranges",
                RUNAI,
                {"RUNAI_STREAMER_MEMORY_LIMIT": str(STAGING), "RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"},
                ranges | buffered,
            ),
        ]
        if file.parent == CACHE:
            peers.append(
                (
                    "safetensors",
                    "safetensors",
                    ("safetensors",),
                    {},
                    buffered | {"safetensors": str(safetensors_file(file))},
                )
            )
        return [
            Contestant(
                name=name,
                function=f"bench.contestants:{function}",
                packages=packages,
                environment=environment,
                peer=True,
                job=job,
            )
            for name, function, packages, environment, job in peers
        ]

    def _against_limit(self, name: str, mine: Outcome, bound: float) -> None:
        limit = self.run.sections[-1].limit
        value = _ratio(mine.bytes_per_second, limit.bytes_per_second if limit else None)
        note = f"limit: {limit.contestant.name}" if limit else ""
        self.run.targets.append(Target(name=name, value=value, bound=bound, note=note))

    def _against_peers(self, name: str, mine: Outcome, found: dict[str, Outcome]) -> None:
        rival = best(o for o in found.values() if o.contestant.peer)
        value = _ratio(mine.bytes_per_second, rival.bytes_per_second if rival else None)
        note = f"best: {rival.contestant.name}" if rival else ""
        missing = [o.contestant.name for o in found.values() if o.contestant.peer and not o.seconds]
        note += f"; missing: {', '.join(missing)}" if missing else ""
        self.run.targets.append(Target(name=name, value=value, bound=1.0, note=note))

    def _first_layer(self, what: str, outcomes: list[Outcome]) -> None:
        shares = {
            o.contestant.name: statistics.median(
                facts["first_layer_seconds"] / facts["phases"]["total"] for facts in o.all_facts[1:] or o.all_facts
            )
            for o in outcomes
            if o.all_facts
        }
        worst = max(shares, key=lambda name: shares[name], default=None)
        self.run.targets.append(
            Target(
                name=f"{what}: first of 24 layers ready, of the whole time",
                value=shares[worst] if worst else None,
                bound=0.1,
                at_most=True,
                note=f"medians, of these the worst: {worst}" if worst else "",
            )
        )


PARTS = ("header", "cold", "warm", "model", "many", "several", "digest", "peak")
"""The methods of a suite, in this order."""


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _limit(name: str, function: str, file: Path, *, touch: int = 0, **arguments: Any) -> Contestant:
    return Contestant(
        name=name,
        function=f"bench.raw_reads:{function}",
        arguments=arguments,
        limit=True,
        job={"file": str(file), "touch": touch},
    )


def _threads(n: int) -> str:
    return f"{n} thread{'s' * (n != 1)}"
