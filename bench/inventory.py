"""Inventories of published models: every tensor's name, type and shape, and what can be made of them without the model.

    python -m bench.inventory                                    what there is
    python -m bench.inventory NAME                               one tensor a line
    python -m bench.inventory NAME --scale 1/16 -o x.gguf        a valid file with random blocks
    python -m bench.inventory NAME --empty -o x.gguf             the same without data: ggufstream plan x.gguf
    python -m bench.inventory --plans                            what each would do on each simulated device
    python -m bench.inventory --plans --update                   the same, into inventories/README.md

``--scale`` keeps that share of each tensor's rows, and whole rows, so that all types stay valid; ``--layers`` keeps the
first layers. Such a file loads like the model, though no forward pass fits it.
"""

from __future__ import annotations

import argparse
import math
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ggufstream.backends.simulated import PROFILES, SimulatedBackend
from ggufstream.errors import DeviceError
from ggufstream.ggml_types import BY_NAME, GGMLType
from ggufstream.gguf_file import FileIdentity, FileIndex, Shard
from ggufstream.gguf_layout import TensorInfo
from ggufstream.load_plan import HOST, LoadPlan
from ggufstream.options import LoadOptions, Placement
from ggufstream.plan import make_plan

FOLDER = Path(__file__).parent / "inventories"

_ALIGNMENT = 32
_STEP_BYTES = 1 << 20
_TABLE = "| model | file GB | device | device GB | host GB | rows GB | fallbacks | fits |"
_STRING = 8  # the value type in the metadata


class Tensor(NamedTuple):
    """``dims`` as in the file: fastest first."""

    name: str
    type: GGMLType
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.dims) // self.type.block_elements * self.type.block_bytes

    @property
    def layer(self) -> int | None:
        match = re.match(r"blk\.(\d+)\.", self.name)
        return int(match[1]) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """One model. ``parameters`` and ``n_tensors`` are the published figures, for the full size."""

    name: str
    title: str
    architecture: str
    parameters: float
    n_tensors: int
    tensors: tuple[Tensor, ...]

    @property
    def elements(self) -> int:
        return sum(math.prod(tensor.dims) for tensor in self.tensors)

    def reduced(self, *, scale: Fraction = Fraction(1), layers: int | None = None) -> Inventory:
        """A share of each tensor's rows, at least one, and the first ``layers`` layers."""
        kept = [t for t in self.tensors if layers is None or t.layer is None or t.layer < layers]
        smaller = [
            t._replace(dims=(*t.dims[:1], *(max(1, int(d * scale)) for d in t.dims[1:2]), *t.dims[2:])) for t in kept
        ]
        return replace(self, tensors=tuple(smaller))

    def index(self, path: str | None = None) -> FileIndex:
        """What a file of this inventory would say, without the file."""
        header, offsets = _header(self)
        data_offset = len(header)
        end = max((o + t.nbytes for o, t in zip(offsets, self.tensors, strict=True)), default=0)
        path = path or f"{self.name}.gguf"
        size = data_offset + end + -end % _ALIGNMENT
        identity = FileIdentity(0, 0, size, 0)
        return FileIndex(
            path=path,
            version=3,
            alignment=_ALIGNMENT,
            shards=(Shard(path=path, size=size, identity=identity, header_bytes=len(header), data_offset=data_offset),),
            metadata=MappingProxyType({"general.architecture": self.architecture, "general.name": self.title}),
            tensors=tuple(
                TensorInfo(name=t.name, type=t.type, dims=t.dims, shard=0, offset=data_offset + o, nbytes=t.nbytes)
                for o, t in zip(offsets, self.tensors, strict=True)
            ),
            warnings=(),
        )

    def write(self, path: Path, *, seed: int = 0, empty: bool = False) -> None:
        """Write a valid file with random blocks whose scales are small finite numbers. A few MiB of memory.

        With ``empty`` the data is a hole in the file: for planning at full size, on next to no disk space.
        """
        rng = np.random.default_rng(seed)
        header, _ = _header(self)
        with path.open("wb") as file:
            file.write(header)
            if empty:
                file.truncate(len(header) + sum(t.nbytes + -t.nbytes % _ALIGNMENT for t in self.tensors))
                return
            for tensor in self.tensors:
                pool = _pool(tensor.type)
                left = tensor.nbytes
                while left:
                    # Anywhere in the pool, so that equal tensors differ.
                    start = int(rng.integers(0, len(pool) // 2 // tensor.type.block_bytes)) * tensor.type.block_bytes
                    left -= file.write(pool[start : start + left])
                file.write(bytes(-tensor.nbytes % _ALIGNMENT))


def names() -> list[str]:
    """All inventories."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def load(name: str) -> Inventory:
    """Read an inventory.

    The first lines are ``# title``, ``architecture NAME``, ``parameters N`` and ``tensors N``; then come lines of
    ``name type dims…``. In a name, ``{0-3,7}`` stands for each of these layers. Tensors of layers are put in the order
    of the layers, between those before and those after.
    """
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    facts: dict[str, str] = {}
    before: list[Tensor] = []
    layers: dict[int, list[Tensor]] = {}
    after: list[Tensor] = []
    for line in text.splitlines():
        words = line.split()
        if not words or words[0] == "#":
            continue
        if words[0] in {"architecture", "parameters", "tensors"}:
            facts[words[0]] = words[1]
            continue
        pattern, type_name, *dims = words
        for expanded in _expand(pattern):
            tensor = Tensor(expanded, BY_NAME[type_name], tuple(map(int, dims)))
            if tensor.layer is not None:
                layers.setdefault(tensor.layer, []).append(tensor)
            else:
                (after if layers else before).append(tensor)
    return Inventory(
        name=name,
        title=title,
        architecture=facts["architecture"],
        parameters=float(facts["parameters"]),
        n_tensors=int(facts["tensors"]),
        tensors=(*before, *(tensor for layer in sorted(layers) for tensor in layers[layer]), *after),
    )


def _expand(pattern: str) -> Iterator[str]:
    head, brace, rest = pattern.partition("{")
    if not brace:
        yield pattern
        return
    numbers, _, tail = rest.partition("}")
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{head}{number}{tail}"


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _header(inventory: Inventory) -> tuple[bytes, list[int]]:
    """The header, padded, and each tensor's offset in the data."""
    pairs = {"general.architecture": inventory.architecture, "general.name": inventory.title}
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(inventory.tensors), len(pairs))]
    parts += [_text(key) + struct.pack("<I", _STRING) + _text(value) for key, value in pairs.items()]
    offsets, end = [], 0
    for tensor in inventory.tensors:
        offsets.append(end)
        n = len(tensor.dims)
        parts.append(_text(tensor.name) + struct.pack(f"<I{n}QIQ", n, *tensor.dims, tensor.type.id, end))
        end += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
    header = b"".join(parts)
    return header + bytes(-len(header) % _ALIGNMENT), offsets


@cache
def _pool(ggml_type: GGMLType) -> memoryview:
    """Random blocks of one type, about a MiB."""
    rng = np.random.default_rng(ggml_type.id)
    n = _STEP_BYTES // ggml_type.block_bytes
    blocks = rng.integers(0, 256, n * ggml_type.block_bytes, np.uint8).view(ggml_type.block_dtype)
    normal = rng.standard_normal(n).astype(np.float32) / 16
    for name, size in ggml_type.fields.items():
        match ggml_type.name, name, size:
            case "F32", _, _:
                values = normal.view("V4")
            case "BF16", _, _:
                values = (normal.view(np.uint32) >> 16).astype(np.uint16).view("V2")
            case "F16", _, _:
                values = normal.astype(np.float16).view("V2")
            case _, ("d" | "dmin" | "m"), 2:
                values = (normal / 16).astype(np.float16).view("V2")
            case "MXFP4", "e", 1:
                values = rng.integers(116, 124, n, np.uint8).view("V1")
            case "NVFP4", "d", 4:
                values = rng.integers(0x10, 0x40, 4 * n, np.uint8).view("V4")
            case _:
                continue
        blocks[name] = values
    return memoryview(blocks.view(np.uint8).tobytes())


def plan(inventory: Inventory, profile: str) -> LoadPlan:
    """What loading it on a simulated device would do."""
    with SimulatedBackend(profile) as backend:
        return make_plan(inventory.index(), backends=[backend], options=LoadOptions())


def plans() -> Iterator[str]:
    """The lines of a Markdown table: every inventory on every simulated device. GB are 10^9 bytes."""
    yield _TABLE
    yield "|---|---:|---|---:|---:|---:|---:|---|"
    for name in names():
        inventory = load(name)
        size = sum(tensor.nbytes for tensor in inventory.tensors)
        for profile in PROFILES:
            start = f"| {name} | {size / 1e9:.2f} | {profile} |"
            try:
                decided = plan(inventory, profile)
            except DeviceError as error:
                yield f"{start} – | – | – | – | no: {error} |"
                continue
            rows = sum(entry.tensor.nbytes for entry in decided.entries if entry.placement is Placement.ROWS)
            host = decided.arenas[HOST].planned_bytes if HOST in decided.arenas else 0
            fits = "yes" if decided.to_dict()["fits"] else "no"
            yield (
                f"{start} {decided.planned_bytes(0) / 1e9:.2f} | {host / 1e9:.2f} | {rows / 1e9:.2f} "
                f"| {len(decided.fallbacks)} | {fits} |"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=names(), help="an inventory; without it, they are listed")
    parser.add_argument("--scale", type=Fraction, default=Fraction(1), help="share of the rows, such as 1/16")
    parser.add_argument("--layers", type=int, help="keep the first layers only")
    parser.add_argument("-o", "--output", type=Path, help="write a GGUF file")
    parser.add_argument("--empty", action="store_true", help="with -o: a hole in place of data, for planning only")
    parser.add_argument("--plans", action="store_true", help="print the table of plans")
    parser.add_argument("--update", action="store_true", help="with --plans: replace the table in the README")
    options = parser.parse_args(arguments)
    if not 0 < options.scale <= 1:
        parser.error("--scale must be above 0 and at most 1")
    if options.plans and options.update:
        readme = FOLDER / "README.md"
        text = readme.read_text(encoding="utf-8").partition(_TABLE)[0]
        readme.write_text(text + "\n".join(plans()) + "\n", encoding="utf-8")
    elif options.plans:
        for line in plans():
            print(line)
    elif options.name is None:
        for name in names():
            inventory = load(name)
            size = sum(tensor.nbytes for tensor in inventory.tensors)
            print(f"{name:26} {len(inventory.tensors):4} tensors, {size / 1e9:6.2f} GB: {inventory.title}")
    else:
        inventory = load(options.name).reduced(scale=options.scale, layers=options.layers)
        if options.output is None:
            for tensor in inventory.tensors:
                print(tensor.name, tensor.type.name, *tensor.dims)
        else:
            inventory.write(options.output, empty=options.empty)
            print(f"{options.output}: {options.output.stat().st_size / 1e9:.3f} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
