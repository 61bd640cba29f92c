"""What is compared: ggufstream, and the others, each by its own documentation. See :mod:`bench.worker` for the shape.

Every load ends when all bytes are where they are wanted; for a GPU that is after a synchronization. ``bytes`` is what was
loaded, so that nobody wins by loading less.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

Steps = Iterator[dict[str, Any] | None]
Load = Callable[[dict[str, Any]], Steps]


def ours(*, backend: str, interleave: bool = False, upload: str = "auto", keep_bytes: int = 0, **options: Any) -> Load:
    """``ggufstream.load``. ``interleave``: matrices in the layout x8 on ``cpu``; ``keep_bytes``: of memory that the backend
    keeps from one turn to the next.
    """
    import asyncio

    import ggufstream
    import ggufstream.job  # all imports, before anything is timed
    from ggufstream.backends.cpu import CpuBackend
    from ggufstream.backends.registry import open_backend

    direct = {"auto": None, "direct": True, "staged": False}[upload]
    if interleave:
        opened: Any = CpuBackend(interleave=True, keep_bytes=keep_bytes)
    else:
        opened = open_backend(backend, direct=direct, keep_bytes=keep_bytes)
    runner = asyncio.Runner()

    def load(job: dict[str, Any]) -> Steps:
        chosen = {"page_cache": "auto" if job["cold"] else "keep"} | options
        yield None
        model = runner.run(ggufstream.load(job["file"], backend=opened, upload=upload, **chosen))
        report = model.report.to_dict()
        kept = ("io", "io_reason", "upload", "workers", "device", "first_layer_seconds", "staging_peak_bytes",
                "event_loop_lag_ms")  # fmt: skip
        yield {
            "bytes": report["streamed_bytes"],
            "stream_seconds": report["seconds"]["stream"],
            "phases": report["seconds"],
            "layouts": {name: layout["bytes"] for name, layout in report["layouts"].items()},
            **{name: report[name] for name in kept},
        }
        runner.run(model.aclose())

    return load


def ours_several(*, concurrent: bool, **options: Any) -> Load:
    """Several files, one after the other or at once, to ``cpu``."""
    import asyncio

    import ggufstream
    import ggufstream.job

    runner = asyncio.Runner()

    async def run(files: list[str]) -> list[ggufstream.Model]:
        async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
            loads = []
            for file in files:
                loads.append(tasks.create_task(ggufstream.load(file, backend="cpu", page_cache="keep", **options)))
                if not concurrent:
                    await loads[-1]
        return [task.result() for task in loads]

    def load(job: dict[str, Any]) -> Steps:
        yield None
        models = runner.run(run(job["files"]))
        yield {"bytes": sum(model.report.streamed_bytes for model in models)}
        for model in models:
            runner.run(model.aclose())

    return load


def our_header() -> Load:
    """``ggufstream.read_index``: the median of five, as one takes no longer than the clock's noise."""
    import asyncio
    import statistics
    import time

    from ggufstream.gguf_file import read_index

    runner = asyncio.Runner()

    async def once(path: str) -> float:
        started = time.perf_counter()
        await read_index(path)
        return time.perf_counter() - started

    def load(job: dict[str, Any]) -> Steps:
        yield None
        yield {"seconds": statistics.median(runner.run(once(job["file"])) for _ in range(5))}

    return load


def gguf_header() -> Load:
    """``gguf.GGUFReader``, which parses when it is made."""
    import gguf

    def load(job: dict[str, Any]) -> Steps:
        yield None
        reader = gguf.GGUFReader(job["file"])
        yield {"tensors": len(reader.tensors)}

    return load


def gguf_reader() -> Load:
    """``gguf.GGUFReader``, and a copy of each tensor: without the copy nothing would be read."""
    import gguf
    import numpy as np

    def load(job: dict[str, Any]) -> Steps:
        yield None
        tensors = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(job["file"]).tensors}
        yield {"bytes": sum(tensor.nbytes for tensor in tensors.values())}

    return load


def safetensors(*, device: str = "cpu") -> Load:
    """``safetensors``. On the host through numpy, which copies; its PyTorch way maps the file and reads nothing."""
    if device == "cpu":
        from safetensors.numpy import load_file

        def load(job: dict[str, Any]) -> Steps:
            yield None
            tensors = load_file(job["safetensors"])
            yield {"bytes": sum(tensor.nbytes for tensor in tensors.values())}
    else:
        from safetensors.torch import load_file as load_onto

        _warm_cuda()

        def load(job: dict[str, Any]) -> Steps:
            yield None
            tensors = load_onto(job["safetensors"], device=device)
            yield _on_gpu(tensors)

    return load


def runai_ranges() -> Load:
    """``runai_model_streamer.FileStreamer`` on the GGUF file: a range a tensor.

    With a memory limit it hands out views of one buffer that it fills again and again: to have them all, each is copied.
    """
    from runai_model_streamer import FileChunks, FileStreamer

    reuses = "RUNAI_STREAMER_MEMORY_LIMIT" in os.environ

    def load(job: dict[str, Any]) -> Steps:
        yield None
        offsets, sizes = zip(*job["ranges"], strict=True)
        with FileStreamer() as streamer:
            streamer.stream_files([FileChunks(0, job["file"], list(offsets), list(sizes))])
            tensors = {i: tensor.clone() if reuses else tensor for _, i, tensor in streamer.get_chunks()}
        yield {"bytes": sum(tensor.nbytes for tensor in tensors.values())}
        with open(job["file"], "rb", buffering=0) as file:
            for i, tensor in tensors.items():
                start = tensor[:64].numpy().tobytes()
                file.seek(offsets[i])
                if file.read(len(start)) != start:
                    raise RuntimeError(f"tensor {i} was overwritten")

    return load


def runai_cuda() -> Load:
    """``runai_model_streamer.SafetensorsStreamer`` onto the GPU."""
    from runai_model_streamer import SafetensorsStreamer

    _warm_cuda()

    def load(job: dict[str, Any]) -> Steps:
        yield None
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(job["safetensors"], device="cuda:0")
            tensors = {name: tensor.to("cuda:0") for name, tensor in streamer.get_tensors()}
        yield _on_gpu(tensors)

    return load


def instanttensor() -> Load:
    """``instanttensor.safe_open``; the environment variable ``INSTANTTENSOR_BACKEND`` chooses how it reads."""
    from instanttensor import safe_open

    _warm_cuda()

    def load(job: dict[str, Any]) -> Steps:
        yield None
        with safe_open(job["safetensors"], framework="pt", device="cuda:0") as file:
            tensors = dict(file.tensors())
            facts = _on_gpu(tensors)
        yield facts

    return load


def fastsafetensors() -> Load:
    """``fastsafetensors`` without GPUDirect Storage."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    _warm_cuda()

    def load(job: dict[str, Any]) -> Steps:
        yield None
        loader = SafeTensorsFileLoader(SingleGroup(), "cuda:0", nogds=True)
        loader.add_filenames({0: [job["safetensors"]]})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        yield _on_gpu(tensors)
        tensors.clear()
        buffers.close()
        loader.close()

    return load


def llama_cpp(*, use_mmap: bool) -> Load:
    """``llama_model_load_from_file`` on the processor."""
    import llama_cpp

    llama_cpp.llama_backend_init()

    def load(job: dict[str, Any]) -> Steps:
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_mmap, parameters.n_gpu_layers = use_mmap, 0
        yield None
        model = llama_cpp.llama_model_load_from_file(job["file"].encode(), parameters)
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {job['file']}")
        yield {"bytes": llama_cpp.llama_model_size(model)}
        llama_cpp.llama_model_free(model)

    return load


def pinned_copy(*, nbytes: int = 1 << 30) -> Load:
    """From pinned host memory onto the GPU, through PyTorch: what the bus gives."""
    import torch

    _warm_cuda()
    source = torch.ones(nbytes, dtype=torch.uint8).pin_memory()

    def load(job: dict[str, Any]) -> Steps:
        size = os.path.getsize(job["file"])
        target = torch.empty(size, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        yield None
        for start in range(0, size, nbytes):
            end = min(start + nbytes, size)
            target[start:end].copy_(source[: end - start], non_blocking=True)
        torch.cuda.synchronize()
        yield {"bytes": size}

    return load


def _warm_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ImportError("PyTorch sees no CUDA device")
    torch.ones(1, device="cuda:0").sum().item()


def _on_gpu(tensors: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.cuda.synchronize()
    if not all(tensor.is_cuda for tensor in tensors.values()):
        raise RuntimeError("not all tensors are on the GPU")
    return {"bytes": sum(tensor.nbytes for tensor in tensors.values())}


def our_peak(*, io: str, staging_bytes: int) -> Load:
    """The most resident memory of a load onto a card of its own, which here forgets what it is given."""
    import asyncio
    import re
    from pathlib import Path

    import ggufstream
    import ggufstream.job
    from ggufstream.backends.simulated import SimulatedBackend, _DeviceChunk

    class Forgetful(_DeviceChunk):
        def write(self, offset: int, source: Any) -> None:
            pass

    class Card(SimulatedBackend):
        def allocate(self, nbytes: int) -> Any:
            return Forgetful(nbytes, self._chunks)

    def status(name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    runner = asyncio.Runner()

    def load(job: dict[str, Any]) -> Steps:
        small = runner.run(ggufstream.load(job["small"], backend=Card()))  # imports, and the first thread's stacks
        runner.run(small.aclose())
        yield None
        Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
        start = status("VmRSS")
        model = runner.run(ggufstream.load(job["file"], backend=Card(), io=io, staging_bytes=staging_bytes))
        yield {
            "bytes": model.report.streamed_bytes,
            "io": model.report.io,
            "upload": model.report.upload,
            "start_bytes": start,
            "peak_bytes": status("VmHWM") - start,
            "staging_bytes": staging_bytes,
            "staging_peak_bytes": model.report.staging_peak_bytes,
        }
        runner.run(model.aclose())

    return load
