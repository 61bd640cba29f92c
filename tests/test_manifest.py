"""Manifests as llama.cpp's gguf-hash writes them, and what is none, or not of the file."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufstream import digest
from ggufstream.errors import ManifestError, UnsupportedFileError
from ggufstream.gguf_file import FileIndex
from ggufstream.manifest import Manifest, format_manifest, parse_manifest
from tests.plans import Spec, index_of

TEXT = """\
xxh64     f66e9cd66a4396a0  test.gguf:tensor_0
sha1      59f79ecefd8125a996fdf419239051a7e99e5f20  test.gguf:tensor_0
sha256    c0510d38fa060c46265e0160a85c7243096b01dd31c2f355bdbb5516b20de1bd  test.gguf:tensor_0
xxh64     7d3a1f9ac04d0537  test.gguf:tensor_1
sha1      4765f592eacf096df4628ba59476af94d767080a  test.gguf:tensor_1
sha256    8514cbcc73692a2c56bd7a33a022edd5ff819614bd23b19915d7224387f397a7  test.gguf:tensor_1
xxh64     ab6bb2e6a4d5ea9e  test.gguf
"""
"""As gguf-hash writes it, with all of its algorithms and a line for the whole model."""


def small_index(path: str = "test.gguf") -> FileIndex:
    return index_of([Spec("tensor_0"), Spec("tensor_1")], path=path)


def parsed(text: str, index: FileIndex | None = None) -> Manifest:
    return parse_manifest(text.encode("utf-8", "surrogateescape"), "manifest", index or small_index())


def test_what_gguf_hash_writes_is_read() -> None:
    found = parsed(TEXT)
    assert (found.path, found.algorithm) == ("manifest", "xxh64")
    assert found.digests == {"tensor_0": "f66e9cd66a4396a0", "tensor_1": "7d3a1f9ac04d0537"}


@pytest.mark.parametrize("algorithm", ["sha256", "sha1", "xxh64"])
def test_each_algorithm_alone_is_read(algorithm: str) -> None:
    text = "".join(line for line in TEXT.splitlines(keepends=True) if line.startswith(algorithm))
    found = parsed(text)
    assert found.algorithm == algorithm
    assert len(found.digests["tensor_0"]) == len(digest.new_hash(algorithm).hexdigest())


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("\n", "\r\n"),
        TEXT.upper().replace("XXH64", "xxh64").replace("TEST.GGUF:TENSOR", "test.gguf:tensor"),
        TEXT.replace("test.gguf", "some/folder/test.gguf"),
        TEXT.replace("test.gguf", "other.gguf") + TEXT,
        TEXT + TEXT,
        "manifest of a model\n\n"
        + TEXT
        + "uuid      5dd9e8a2-1c24-5a3e-8a0c-3c9a7e3b6c2e  test.gguf\nxxh7 00  test.gguf:tensor_0\n",
        TEXT + TEXT.replace("test.gguf", "backup/test.gguf").replace("f66e9cd66a4396a0", "0" * 16),
    ],
    ids=["line ends", "upper case", "folder", "several files", "twice", "other lines", "exact path first"],
)
def test_what_does_not_matter_in_a_manifest(text: str) -> None:
    assert parsed(text).digests == parsed(TEXT).digests


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line of it is a digest"),
        ("GGUF\0\0\0", "no line of it is a digest"),
        ("md5  00  test.gguf:tensor_0\n", "known kind .*xxh64"),
        (TEXT.replace("f66e9cd66a4396a0", "f66e9cd66a4396a"), "line 1: .* is no xxh64 digest, which has 16 digits"),
        (TEXT.replace("test.gguf", "a.gguf"), "says nothing about tensors of 'test.gguf', but about 'a.gguf'"),
        (TEXT.replace("test.gguf", "mytest.gguf"), "says nothing about"),
        ("xxh64     ab6bb2e6a4d5ea9e  test.gguf\n", "says nothing about"),
        (TEXT.replace("tensor_1", "tensor_0"), "line 4: another digest of tensor 'tensor_0'"),
        (TEXT.replace("tensor_1", "tensor_2"), "1 tensor is missing in the manifest: 'tensor_1'"),
        (TEXT.replace("test.gguf:tensor_0", "test.gguf:a") + TEXT, "1 tensor is missing in test.gguf: 'a'"),
    ],
)
def test_what_is_no_manifest_of_the_file(text: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message) as caught:
        parsed(text)
    assert caught.value.file == "manifest"
    assert caught.value.exit_code == 3
    assert caught.value.remedy


def test_missing_tensors_are_named() -> None:
    with pytest.raises(ManifestError) as caught:
        parsed(
            TEXT, index_of([Spec("tensor_0"), Spec("tensor_1"), *(Spec(f"w.{i}") for i in range(9))], path="test.gguf")
        )
    assert "9 tensors are missing in the manifest: 'w.0', 'w.1', 'w.2' and 6 more" in str(caught.value)
    assert caught.value.tensor == "w.0"


def test_shards_have_their_own_lines() -> None:
    index = index_of([Spec("a", shard=0), Spec("b", shard=1)], path="m")
    lines = "xxh64  0000000000000001  m:a\nxxh64  0000000000000002  m.1:b\n"
    assert parsed(lines, index).digests == {"a": "0" * 15 + "1", "b": "0" * 15 + "2"}
    with pytest.raises(ManifestError, match=r"is not of m: 1 tensor is missing in m: 'b'"):
        parsed(lines.replace("m.1:", "m:"), index)
    with pytest.raises(ManifestError, match=r"says nothing about tensors of 'm.1'"):
        parsed(lines.splitlines()[0], index)


names = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=100)
@given(tensors=st.lists(names, min_size=1, max_size=5, unique=True), path=names)
def test_a_manifest_that_is_written_is_read(tensors: list[str], path: str) -> None:
    index = index_of([Spec(name) for name in tensors], path=path.replace("\0", " "))
    digests = {name: {"xxh64": f"{i:016x}", "xxh3": f"{i + 100:016x}"} for i, name in enumerate(tensors)}
    found = parsed(format_manifest(index, digests), index)
    assert found.algorithm == "xxh3"
    assert found.digests == {name: each["xxh3"] for name, each in digests.items()}


def test_paths_of_any_bytes() -> None:
    index = small_index(os.fsdecode(b"m\xff.gguf"))
    digests = {name: {"xxh64": "0" * 16} for name in ("tensor_0", "tensor_1")}
    assert parsed(format_manifest(index, digests), index).digests["tensor_0"] == "0" * 16


@pytest.mark.parametrize("name", ["a\nb", "a\rb"])
def test_a_line_break_fits_in_no_manifest(name: str) -> None:
    with pytest.raises(UnsupportedFileError, match="line break"):
        format_manifest(index_of([Spec(name)]), {name: {"xxh64": "0" * 16}})


FRAGMENTS = (
    b"xxh64",
    b"sha1",
    b"  ",
    b" ",
    b"0" * 16,
    b"f" * 40,
    b"test.gguf",
    b":",
    b"tensor_0",
    b"\n",
    b"\r",
    b"\xff",
    b"\0",
)


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.binary(max_size=80) | st.lists(st.sampled_from(FRAGMENTS), max_size=24).map(b"".join))
def test_any_bytes_are_a_manifest_or_an_error(data: bytes) -> None:
    with suppress(ManifestError):
        assert set(parse_manifest(data, "manifest", small_index()).digests) == {"tensor_0", "tensor_1"}
