"""A load with a bar of tqdm, from the events of a job.

    python examples/tqdm_progress.py MODEL.gguf [BACKEND]

``async for`` ends with the load, however it went. A loop that is slow sees the latest progress, and stops nobody.
"""

from __future__ import annotations

import asyncio
import sys

from tqdm import tqdm

import ggufstream
from ggufstream.events import Planned, Progress


async def main(path: str, backend: str) -> None:
    async with ggufstream.Loader() as loader:
        job = loader.submit(path, backend=backend)
        with tqdm(unit="B", unit_scale=True, unit_divisor=1024) as bar:
            async for event in job.events():
                match event:
                    case Planned():
                        bar.total = event.bytes_total
                        bar.set_description(event.device)
                    case Progress():
                        bar.set_postfix(tensors=event.tensors_done, refresh=False)
                        bar.update(event.bytes_done - bar.n)
        async with await job as model:  # or the error that ended the load
            print(f"{len(model)} weights, {model.report.bytes_per_second / 1e9:.2f} GB/s")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "auto"))
