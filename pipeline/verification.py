"""Is the model that was loaded the model in the file? Every byte is compared, and every product, and rows of every table.

Weights are read back from where they lie, their layout is undone, and the bytes are compared with the file's; where a
weight was decoded when it was loaded, its floats with those that the reference decoder makes of the file's bytes. Then
each weight that can be multiplied is multiplied with two fixed vectors, and the result is compared with the reference
product of the bytes in the file: that finds what comparing bytes cannot, a device that reads them wrongly. Of each
lookup table some rows are asked for, here and on the device that it lies on, and compared bit for bit with what the
reference makes of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Chunk, Slice
from ggufstream.backends.products import Multiply, linear_by_decoding, multiply_in_order
from ggufstream.decode import DECODABLE, decode
from ggufstream.file_bytes import close_file, read_exactly
from ggufstream.gguf_file import Shard
from ggufstream.gguf_layout import TensorInfo
from ggufstream.layouts import Bytes, Extent, Raw
from ggufstream.model import Model, Weight
from ggufstream.options import Intent, Placement
from ggufstream.threads import in_thread

__all__ = ["Difference", "VerifyReport", "verify"]

_VECTORS = 2

_ROWS = 64
_ROWS_BYTES = 16 << 20
"""Of a table as many random rows are compared as ``_ROWS``, or as come to this much memory."""

TOLERANCE = 2e-5
"""Largest difference of a product, relative to the largest value: reference and device may each be 1e-5 off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor that is not what the file has."""

    tensor: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was compared, and what differs."""

    tensors: int
    bytes: int
    """File bytes that were compared."""
    decoded: int
    """Tensors that lie decoded where they were loaded: compared were their floats, with the reference decoder's."""
    products: int
    """Weights whose product was compared."""
    largest_product_error: float
    """Relative to the largest value of the product."""
    tables: int
    """Lookup tables of which rows were compared."""
    rows: int
    """Rows that were compared."""
    differing: tuple[Difference, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = asdict(self)
        return plain


async def verify(model: Model, *, on_tensor: Callable[[str], None] | None = None) -> VerifyReport:
    """Compare a loaded model with its file.

    Args:
        model: Any model, on any backend.
        on_tensor: Called with each tensor's name when it has been compared.

    Raises:
        FileError: The file changed since it was loaded, or cannot be read.
        DeviceError: The device cannot give its bytes back.
    """
    started = time.perf_counter()
    files = await in_thread(partial(_Files, model.index.shards))
    try:
        differing: list[Difference] = []
        products, worst = 0, 0.0
        tables = rows = 0
        for weight in model.values():
            tensor = model.index.tensor(weight.name)
            what = await _compare_bytes(weight, tensor, files)
            if what is None and _can_multiply(weight):
                products += 1
                error = await _product_error(model, weight, tensor, files)
                worst = max(worst, error)
                if not error <= TOLERANCE:
                    what = f"its product is off by {error:.2g} of the largest value, {TOLERANCE:.0e} is allowed"
            if what is None and _can_look_up(weight):
                ids = _sample(tensor)
                tables, rows = tables + 1, rows + ids.size
                what = await _compare_rows(model, weight, ids, await in_thread(partial(files.rows, tensor, ids)))
            if what is not None:
                differing.append(Difference(tensor=weight.name, what=what))
            if on_tensor is not None:
                on_tensor(weight.name)
        await in_thread(files.check_unchanged)  # a difference in what was read after it changed is none
    finally:
        files.close()
    return VerifyReport(
        tensors=len(model),
        bytes=sum(weight.nbytes for weight in model.values()),
        decoded=sum(weight.is_decoded for weight in model.values()),
        products=products,
        largest_product_error=worst,
        tables=tables,
        rows=rows,
        differing=tuple(differing),
        seconds=round(time.perf_counter() - started, 6),
    )


async def _compare_bytes(weight: Weight, tensor: TensorInfo, files: _Files) -> str | None:
    """Where the loaded bytes first differ from the file's, or the floats from the reference decoder's; or ``None``."""
    for first, count in weight.windows():
        loaded = await weight.read_stored(first, count)
        where = await in_thread(partial(files.compare, tensor, first, count, loaded, is_decoded=weight.is_decoded))
        if where is not None and weight.is_decoded:
            return f"float {where // 4:,}, decoded from {tensor.type.name}, is not what the reference makes of the file"
        if where is not None:
            return f"byte {where:,} of {tensor.nbytes:,} differs from the file"
    return None


def _can_multiply(weight: Weight) -> bool:
    return (
        Intent.LINEAR in weight.intent
        and weight.placement is Placement.ARENA
        and weight.nbytes > 0
        and weight.type.name in DECODABLE
    )


async def _product_error(model: Model, weight: Weight, tensor: TensorInfo, files: _Files) -> float:
    """Largest difference from the reference product, relative to the largest value of that."""
    x = np.random.default_rng(0).standard_normal((_VECTORS, tensor.row_elements), np.float32)
    product = await model.linear(weight.name, x)
    reference = await in_thread(partial(files.reference, tensor, x, multiply_in_order))
    if not np.array_equal(np.isfinite(reference), np.isfinite(product)):
        # Where the sum of the magnitudes is beyond float32, the order of summation decides whether the sum is.
        reach = await in_thread(partial(files.reference, tensor, x, _multiply_magnitudes))
        product, reference = product[np.isfinite(reach)], reference[np.isfinite(reach)]
    return _relative_error(product, reference)


def _multiply_magnitudes(x: npt.NDArray[np.float32], rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return np.abs(x) @ np.abs(rows).T


def _relative_error(product: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> float:
    # Blocks of random bytes decode to infinities and NaN; those must be at the same places.
    finite = np.isfinite(reference)
    if not np.array_equal(finite, np.isfinite(product)):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.abs(reference[finite]).max())
    difference = float(np.abs(product[finite].astype(np.float64) - reference[finite]).max())
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))


def _can_look_up(weight: Weight) -> bool:
    return Intent.LOOKUP in weight.intent and weight.nbytes > 0 and weight.type.name in DECODABLE


def _sample(tensor: TensorInfo) -> npt.NDArray[np.int64]:
    """The first row and the last, random ones, and some of these again; in no order."""
    rng = np.random.default_rng(0)
    some = rng.integers(0, tensor.rows, max(1, min(_ROWS, _ROWS_BYTES // (4 * tensor.row_elements))))
    return rng.permutation(np.concatenate([[0, tensor.rows - 1], some, some[:3]]))


async def _compare_rows(
    model: Model, weight: Weight, ids: npt.NDArray[np.int64], reference: npt.NDArray[np.float32]
) -> str | None:
    """Which row first differs from the reference, or ``None``."""
    found = {"": await weight.rows(ids)}
    if weight.device is not None:
        async with await weight.rows(ids, into=weight.device) as rows:
            found[f" on {model.plan.devices[weight.device].device}"] = await rows.read()
    for where, values in found.items():
        same = (values.view(np.uint32) == reference.view(np.uint32)) | (np.isnan(values) & np.isnan(reference))
        if not same.all():
            return f"row {ids[~same.all(axis=1)][0]:,}{where} is not what the reference makes of the file"
    return None


class _FileChunk(Chunk):
    """A shard in the place of device memory, for the reference product."""

    def __init__(self, shard: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.shard = shard

    @property
    def handle(self) -> int:
        return self.shard

    @property
    def view(self) -> Bytes | None:
        return None

    def close(self) -> None:
        return


class _Files:
    """The shards, opened anew: what is compared comes by a way of its own. Methods block."""

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._shards = shards
        self._descriptors: list[int] = []
        try:
            for shard in shards:
                self._descriptors.append(shard.open())
            self.check_unchanged()
        except BaseException:
            self.close()
            raise

    def check_unchanged(self) -> None:
        """All are the files that were loaded."""
        for shard, descriptor in zip(self._shards, self._descriptors, strict=True):
            shard.check_unchanged(descriptor)

    def read(self, tensor: TensorInfo, offset: int, destination: Bytes) -> None:
        read_exactly(
            self._descriptors[tensor.shard],
            destination,
            offset,
            file=self._shards[tensor.shard].path,
            tensor=tensor.name,
        )

    def compare(self, tensor: TensorInfo, first: int, count: int, loaded: Bytes, *, is_decoded: bool) -> int | None:
        """The first byte that differs in these blocks, or in their elements as the reference decodes them; counted from
        the start of the tensor.
        """
        size = tensor.type.block_bytes
        expected = np.empty(count * size, np.uint8)
        self.read(tensor, tensor.offset + first * size, expected)
        if is_decoded:
            expected = decode(tensor.type, expected).view(np.uint8)
        if np.array_equal(expected, loaded):
            return None
        return first * (loaded.size // count) + int(np.flatnonzero(expected != loaded)[0])

    def reference(self, tensor: TensorInfo, x: npt.NDArray[np.float32], multiply: Multiply) -> npt.NDArray[np.float32]:
        """The product of the bytes in the file; with ``multiply_in_order`` as ``cpu_scalar`` computes it."""
        whole = Slice(
            chunk=_FileChunk(tensor.shard, self._shards[tensor.shard].size),
            offset=tensor.offset,
            nbytes=tensor.nbytes,
            extent=Extent(type=tensor.type, rows=tensor.rows, row_blocks=tensor.row_blocks),
            layout=Raw(),
        )
        return linear_by_decoding(
            lambda _, offset, destination: self.read(tensor, offset, destination),
            [whole],
            x,
            multiply,
        )

    def rows(self, tensor: TensorInfo, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Rows as the reference decodes them, from the bytes in the file."""
        blocks = np.empty((ids.size, tensor.row_bytes), np.uint8)
        for row, place in zip(ids.tolist(), blocks, strict=True):
            self.read(tensor, tensor.offset + row * tensor.row_bytes, place)
        return decode(tensor.type, blocks.reshape(-1)).reshape(ids.size, -1)

    def close(self) -> None:
        while self._descriptors:
            close_file(self._descriptors.pop())
