"""Which device each layer goes to, where there are several. Pure; used by ``plan`` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, repeat

from ggufstream.backends.base import Capabilities
from ggufstream.errors import OptionError
from ggufstream.gguf_layout import TensorInfo
from ggufstream.layouts import Extent
from ggufstream.options import LoadOptions
from ggufstream.placements import Decider
from ggufstream.roles import Role

__all__ = ["split_layers"]


def split_layers(
    tensors: Sequence[TensorInfo],
    roles: Sequence[Role],
    devices: Sequence[Capabilities],
    options: LoadOptions,
    decider: Decider,
) -> list[int]:
    """The device of each tensor: consecutive layers, in proportion to the weights, or to what each device has free."""
    shares = options.device_weights or _free_shares(devices)
    if len(shares) != len(devices):
        raise OptionError(
            f"device_weights has {len(shares)} value{'s' * (len(shares) != 1)} for {len(devices)} "
            f"device{'s' * (len(devices) != 1)}",
            remedy="Give one weight a device",
        )
    if len(devices) == 1:
        return [0] * len(tensors)
    costs = _layer_costs(tensors, roles, len(devices), decider)
    # Layers are laid side by side, each as wide as it is on the mean device, and the shares beside them: a layer goes
    # to the device whose share covers most of it.
    widths = {layer: sum(costs[layer]) / len(devices) for layer in sorted(costs)}
    total = sum(widths.values())
    ends = [share / sum(shares) * total for share in accumulate(shares)]
    takers = [device for device in range(len(devices)) if shares[device]]
    result: dict[int, int] = {}
    before = 0.0
    for layer, width in widths.items():
        after = before + width
        covered = {d: min(after, ends[d]) - max(before, ends[d - 1] if d else 0.0) for d in takers}
        result[layer] = max(covered, key=lambda d: covered[d])
        takers = [d for d in takers if d >= result[layer]]
        before = after
    if options.device_weights is None:
        _relieve(result, costs, devices)
    return [result[role.layer] for role in roles]


def _layer_costs(
    tensors: Sequence[TensorInfo], roles: Sequence[Role], devices: int, decider: Decider
) -> dict[int, list[int]]:
    """Bytes that each layer takes on each device: layouts differ, tables may stay in the file, halves may be widened."""
    costs: dict[int, list[int]] = {}
    for device in range(devices):
        decisions = decider.decide(tensors, roles, repeat(device))
        for tensor, role, decision in zip(tensors, roles, decisions, strict=True):
            layer = costs.setdefault(role.layer, [0] * devices)
            if decision.device == device:
                whole = Extent(type=tensor.type, rows=tensor.rows, row_blocks=tensor.row_blocks)
                layer[device] += decision.layout.nbytes(whole)
    return costs


def _relieve(layers: dict[int, int], costs: Mapping[int, Sequence[int]], devices: Sequence[Capabilities]) -> None:
    """Move the last layers of a device that is over its budget to the next."""
    for device in range(len(devices) - 1):
        budget = devices[device].budget_bytes
        mine = [layer for layer in sorted(layers) if layers[layer] == device]
        while mine and budget is not None and sum(costs[layer][device] for layer in mine) > budget:
            layers[mine.pop()] = device + 1


def _free_shares(devices: Sequence[Capabilities]) -> Sequence[float]:
    budgets = [device.budget_bytes for device in devices]
    known = [budget for budget in budgets if budget is not None]
    if len(known) < len(devices) or not any(known):
        return [1.0] * len(devices)
    return [float(budget) for budget in known]
