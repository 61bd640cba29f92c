"""Every file under ``data/cases``: good ones index exactly as listed, bad ones fail with the facts in the message."""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ggufstream.errors import FileError
from ggufstream.gguf_arrays import LazyArray
from ggufstream.gguf_file import FileIndex, read_index
from tests.cases import BAD, CASES, FOLDER, GOOD, check_mentions

SPARE_BYTES = 8 << 20


async def outcome(case: dict[str, Any]) -> FileIndex | FileError:
    """What opening gives, checked against the limit of memory that holds for good and bad files alike."""
    size = sum((FOLDER / name).stat().st_size for name in case["files"])
    tracemalloc.start()
    try:
        result: FileIndex | FileError = await read_index(FOLDER / case["open"])
    except FileError as error:
        result = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < size + SPARE_BYTES
    return result


def plain(value: object) -> object:
    return value.tolist() if isinstance(value, LazyArray) else value


def check_index(case: dict[str, Any], index: FileIndex) -> None:
    listed = {t["name"]: t for t in case.get("tensors", [])}
    assert {t.name for t in index.tensors} == set(listed)
    assert [(t.shard, t.offset) for t in index.tensors] == sorted((t.shard, t.offset) for t in index.tensors)
    for tensor in index.tensors:
        expected = listed[tensor.name]
        path = index.shards[tensor.shard].path
        assert path == str(FOLDER / expected["file"])
        assert list(tensor.dims) == expected["dims"]
        assert list(tensor.shape) == expected["shape"]
        assert (tensor.type.name, tensor.type.id) == (expected["type"], expected["type_id"])
        assert (tensor.offset, tensor.nbytes) == (expected["offset"], expected["nbytes"])
        assert tensor.rows * tensor.row_bytes == tensor.nbytes
        stored = Path(path).read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        assert hashlib.sha256(stored).hexdigest() == expected["sha256"]
    for key, value in case.get("metadata", {}).items():
        found = plain(index.metadata[key])
        assert type(found) is type(value)
        assert found == value


def check_error(case: dict[str, Any], error: FileError) -> None:
    message = str(error)
    assert "\n" not in message
    assert error.remedy
    check_mentions(message, case["mentions"])


@pytest.mark.asyncio
@pytest.mark.parametrize("case", GOOD)
async def test_good_case(case: dict[str, Any]) -> None:
    result = await outcome(case)
    if isinstance(result, FileError):
        raise result
    check_index(case, result)


@pytest.mark.asyncio
@pytest.mark.parametrize("case", BAD)
async def test_bad_case(case: dict[str, Any]) -> None:
    result = await outcome(case)
    if isinstance(result, FileIndex):
        assert case.get("also_ok"), f"opened, but {case.get('note', 'it must not')}"
        check_index(case, result)
    else:
        check_error(case, result)


def test_manifest_is_complete() -> None:
    assert len(CASES) == 92
    assert all((FOLDER / name).is_file() for case in CASES for name in case["files"])


@pytest.mark.asyncio
async def test_trailing_bytes_give_a_warning() -> None:
    index = await read_index(FOLDER / "ok_trailing_bytes" / "model.gguf")
    assert len(index.warnings) == 1
    assert "after the last tensor" in index.warnings[0]


@pytest.mark.asyncio
async def test_a_split_opens_from_any_shard() -> None:
    first = await read_index(FOLDER / "ok_split_two" / "m-00001-of-00002.gguf")
    second = await read_index(FOLDER / "ok_split_two" / "m-00002-of-00002.gguf")
    assert first.tensors == second.tensors
    assert first.shards == second.shards
    assert list(first.metadata) == list(second.metadata)
    assert first.metadata["split.no"] == 0
