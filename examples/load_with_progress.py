"""Load a model inside an asyncio program, with a bar on the terminal and other work going on meanwhile.

python examples/load_with_progress.py MODEL.gguf [BACKEND]
"""

from __future__ import annotations

import asyncio
import sys

import ggufstream
import ggufstream.job  # load() would import it, and numpy, at first use: in a thread, but not without slowing the loop


async def other_work(ticks: list[float]) -> None:
    """Stands for requests that a server answers while it loads: notes how late each tick of 5 ms is."""
    clock = asyncio.get_running_loop().time
    while True:
        before = clock()
        await asyncio.sleep(0.005)
        ticks.append(clock() - before - 0.005)


async def main(path: str, backend: str, bar: ggufstream.sinks.RichProgress) -> None:
    ticks: list[float] = []
    work = asyncio.create_task(other_work(ticks))
    with bar:
        model = await ggufstream.load(path, backend=backend, sinks=[bar])
    work.cancel()
    async with model:
        report = model.report
        print(f"{len(model)} weights on {report.device}, {report.bytes_per_second / 1e9:.2f} GB/s")
        print(f"meanwhile {len(ticks)} ticks of other work, late by {max(ticks) * 1000:.1f} ms at most")
        weight = next(iter(model.values()))
        print(f"first: {weight}, {len(await weight.read()):,} bytes read back")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "auto", ggufstream.sinks.RichProgress()))
