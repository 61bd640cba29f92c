"""Tables of tensors, with layers that are alike in one row. Takes the plain values of ``inspect`` and ``plan``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ggufstream.errors import printable

__all__ = ["plan_table", "tensor_table"]

_MAX_RANGES = 3
_BLOCK = re.compile(r"(.*?\bblk\.)([0-9]{1,9})(\..+)")  # a hostile number has more digits than int() takes


def plan_table(tensors: Sequence[Mapping[str, Any]], *, grouped: bool) -> list[dict[str, Any]]:
    """Rows for the tensors of ``LoadPlan.to_dict()``."""
    return tensor_table(
        tensors,
        grouped=grouped,
        alike=("type", "shape", "intent", "layout", "placement", "arena", "slices", "reason"),
        total=("file_bytes", "device_bytes", "host_bytes"),
    )


def tensor_table(
    tensors: Sequence[Mapping[str, Any]], *, grouped: bool, alike: Sequence[str], total: Sequence[str]
) -> list[dict[str, Any]]:
    """Tensors with printable names; where ``grouped``, those of several blocks that are ``alike`` as one.

    That is named ``blk.0–29.attn_q.weight ×30``, and its numbers of ``total`` are sums.
    """
    groups: dict[tuple[object, ...], list[tuple[int, Mapping[str, Any]]]] = {}
    for position, tensor in enumerate(tensors):
        match = _BLOCK.fullmatch(tensor["name"]) if grouped else None
        same = (match[1], match[3], *(str(tensor[key]) for key in alike)) if match else (position,)
        groups.setdefault(same, []).append((int(match[2]) if match else 0, tensor))
    result = []
    for same, members in groups.items():
        row = dict(members[0][1])
        if len(members) > 1:
            row["name"] = f"{same[0]}{_ranges([number for number, _ in members])}{same[1]} ×{len(members)}"
            row |= {key: sum(tensor[key] for _, tensor in members) for key in total}
        row["name"] = printable(row["name"])
        result.append(row)
    return result


def _ranges(numbers: Sequence[int]) -> str:
    """``0–2,5`` for 0, 1, 2 and 5; ``0…17`` for many with gaps."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    if len(found) > _MAX_RANGES:
        return f"{found[0][0]}…{found[-1][1]}"
    return ",".join(str(first) if first == last else f"{first}–{last}" for first, last in found)
