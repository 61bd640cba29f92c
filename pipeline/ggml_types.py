"""The quant types of ggml: one table of id, name, block size and the fields of a block.

A tensor is rows of *blocks*; a block packs ``block_elements`` values into ``block_bytes`` bytes. The field lists follow
the ``block_*`` structs of ggml's ``ggml-common.h`` in order, without padding. ``block_dtype`` is a numpy structured
dtype of opaque (void) fields: it is what layouts use to split a block into planes, so the table is the layout.

Ids 4, 5, 31 to 33 and 36 to 38 were removed from ggml and have no entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

__all__ = ["BY_ID", "BY_NAME", "Q2_0_G128", "REMOVED", "GGMLType"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GGMLType:
    """One element type: ``fields`` maps each field of a block to its bytes, in file order."""

    id: int
    name: str
    block_elements: int
    fields: Mapping[str, int]
    block_bytes: int = field(init=False)
    block_dtype: np.dtype[np.void] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", MappingProxyType(dict(self.fields)))
        dtype = np.dtype([(name, f"V{nbytes}") for name, nbytes in self.fields.items()])
        object.__setattr__(self, "block_dtype", dtype)
        object.__setattr__(self, "block_bytes", dtype.itemsize)

    @property
    def is_quantized(self) -> bool:
        """True where a block holds more than one element."""
        return self.block_elements > 1

    def __repr__(self) -> str:
        return f"<GGMLType {self.id} {self.name}: {self.block_elements} elements in {self.block_bytes} bytes>"


def _table(rows: list[tuple[int, str, int, dict[str, int]]]) -> dict[int, GGMLType]:
    return {id_: GGMLType(id=id_, name=name, block_elements=n, fields=fields) for id_, name, n, fields in rows}


BY_ID: Mapping[int, GGMLType] = MappingProxyType(
    _table(
        [
            (0, "F32", 1, {"x": 4}),
            (1, "F16", 1, {"x": 2}),
            (2, "Q4_0", 32, {"d": 2, "qs": 16}),
            (3, "Q4_1", 32, {"d": 2, "m": 2, "qs": 16}),
            (6, "Q5_0", 32, {"d": 2, "qh": 4, "qs": 16}),
            (7, "Q5_1", 32, {"d": 2, "m": 2, "qh": 4, "qs": 16}),
            (8, "Q8_0", 32, {"d": 2, "qs": 32}),
            (9, "Q8_1", 32, {"d": 2, "s": 2, "qs": 32}),
            (10, "Q2_K", 256, {"scales": 16, "qs": 64, "d": 2, "dmin": 2}),
            (11, "Q3_K", 256, {"hmask": 32, "qs": 64, "scales": 12, "d": 2}),
            (12, "Q4_K", 256, {"d": 2, "dmin": 2, "scales": 12, "qs": 128}),
            (13, "Q5_K", 256, {"d": 2, "dmin": 2, "scales": 12, "qh": 32, "qs": 128}),
            (14, "Q6_K", 256, {"ql": 128, "qh": 64, "scales": 16, "d": 2}),
            (15, "Q8_K", 256, {"d": 4, "qs": 256, "bsums": 32}),
            (16, "IQ2_XXS", 256, {"d": 2, "qs": 64}),
            (17, "IQ2_XS", 256, {"d": 2, "qs": 64, "scales": 8}),
            (18, "IQ3_XXS", 256, {"d": 2, "qs": 96}),
            (19, "IQ1_S", 256, {"d": 2, "qs": 32, "qh": 16}),
            (20, "IQ4_NL", 32, {"d": 2, "qs": 16}),
            (21, "IQ3_S", 256, {"d": 2, "qs": 64, "qh": 8, "signs": 32, "scales": 4}),
            (22, "IQ2_S", 256, {"d": 2, "qs": 64, "qh": 8, "scales": 8}),
            (23, "IQ4_XS", 256, {"d": 2, "scales_h": 2, "scales_l": 4, "qs": 128}),
            (24, "I8", 1, {"x": 1}),
            (25, "I16", 1, {"x": 2}),
            (26, "I32", 1, {"x": 4}),
            (27, "I64", 1, {"x": 8}),
            (28, "F64", 1, {"x": 8}),
            (29, "IQ1_M", 256, {"qs": 32, "qh": 16, "scales": 8}),
            (30, "BF16", 1, {"x": 2}),
            (34, "TQ1_0", 256, {"qs": 48, "qh": 4, "d": 2}),
            (35, "TQ2_0", 256, {"qs": 64, "d": 2}),
            (39, "MXFP4", 32, {"e": 1, "qs": 16}),
            (40, "NVFP4", 64, {"d": 4, "qs": 32}),
            (41, "Q1_0", 128, {"d": 2, "qs": 16}),
            (42, "Q2_0", 64, {"d": 2, "qs": 16}),
        ]
    )
)
"""Every type of ggml by its id in the file."""

Q2_0_G128 = GGMLType(id=42, name="Q2_0_G128", block_elements=128, fields={"d": 2, "qs": 32})
"""Q2_0 as it was published before ggml took it in with 64 elements a block: the same id and codes, 128 elements a
scale. Only the place of the tensors in a file tells the two apart (``gguf_layout.settle_q2_0``)."""

BY_NAME: Mapping[str, GGMLType] = MappingProxyType({t.name: t for t in (*BY_ID.values(), Q2_0_G128)})
"""Every type by its ggml name, ``"Q4_K"`` and so on, and ``"Q2_0_G128"``."""

REMOVED: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
    }
)
"""Ids that ggml once had; files with them must be converted anew."""
