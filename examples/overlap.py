"""Compute while the model still loads: the first token is there soon after the last layer is.

It shows where loading takes longer than computing: a large model, a cold file, a slow disk. A small model out of the page
cache is all on the device before the first layer is computed.

    python examples/overlap.py MODEL.gguf [BACKEND]

Ranges go out in layer order, so a forward pass follows the load layer by layer: ``await job.ready(r"^blk\\.0\\.")``
returns when layer 0 is on the device, while the others stream. The model is that of ``transformer.py``.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from logits import prompts_of, text_of
from transformer import FAMILIES, Floats, Past, Transformer

import ggufstream


class Arriving:
    """A job with the face of a model: a product waits for its weight."""

    def __init__(self, job: ggufstream.LoadJob) -> None:
        assert job.index is not None
        self.job = job
        self.index = job.index
        self.metadata: Mapping[str, object] = job.index.metadata
        self.vectors: dict[str, Floats] = {}

    def __contains__(self, name: str) -> bool:
        return any(tensor.name == name for tensor in self.index.tensors)

    async def linear(self, name: str, x: Floats) -> Floats:
        return await (await self.job.weight(name)).linear(x)

    async def rows(self, name: str, ids: Any) -> Floats:
        return await (await self.job.weight(name)).rows(ids)

    async def arrive(self, pattern: str) -> None:
        """Wait for some weights, and read those of them that are bound as they are."""
        for weight in await self.job.ready(pattern):
            if weight.intent == ggufstream.Intent.BINDABLE:
                self.vectors[weight.name] = np.frombuffer(await weight.read(), "<f4").reshape(weight.shape)


def layer_by_layer(family: type[Transformer], model: Arriving) -> Transformer:
    """A transformer of that family that waits for each layer before it computes it."""

    class LayerByLayer(family):  # type: ignore[misc, valid-type]
        async def layer(self, n: int, x: Floats, past: Past, context: Floats | None) -> Floats:
            await model.arrive(rf"^blk\.{n}\.")
            x = await super().layer(n, x, past, context)
            done, total = model.job.progress.bytes_done, model.job.progress.bytes_total
            print(f"layer {n:2} computed, {done / total:4.0%} of the model on the device", flush=True)
            if n == self.layers - 1:
                await model.arrive(r"^output")
            return x

    transformer: Transformer = LayerByLayer(model, model.vectors)
    return transformer


async def main(path: str, backend: str) -> None:
    started = time.perf_counter()
    async with ggufstream.Loader() as loader:
        job = loader.submit(path, backend=backend)
        await job.ready(r"^token_embd\.weight$")
        model = Arriving(job)
        await model.arrive(r"^(?!blk\.|output)")
        architecture = str(model.metadata["general.architecture"])
        transformer = layer_by_layer(FAMILIES[architecture], model)
        logits = await transformer.logits(prompts_of(model.metadata)[0], Past())
        seconds = time.perf_counter() - started
        async with await job as loaded:
            print(f"loaded after {loaded.report.seconds['total']:.2f} s, first token after {seconds:.2f} s: ", end="")
            print(repr(text_of(loaded.metadata, [int(logits.argmax())])))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cpu"))
