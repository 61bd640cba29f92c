"""Options: every default in one place, and messages that say what would be right."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufstream.errors import GGUFStreamError, OptionError
from ggufstream.options import (
    ENVIRONMENT,
    Intent,
    IOMode,
    LazyMode,
    LoadChanges,
    LoadOptions,
    PageCacheMode,
    Placement,
    UploadMode,
    parse_bytes,
)
from tests.plans import Spec, index_of, plan_of


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("268435456", 268435456),
        ("256MiB", 256 << 20),
        ("256M", 256 << 20),
        ("256 mb", 256 << 20),
        (" 1g ", 1 << 30),
        ("1.5g", 3 << 29),
        ("1.5GiB", 3 << 29),
        ("0.5", 0),
        ("2T", 2 << 40),
        ("12B", 12),
        ("3KB", 3072),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "x", "-1", "+1", "1e3", "1.", ".5", "1 2", "1PB", "GiB", "0x10", "1,000", "1_000", "١", "nan", "inf",
        "9" * 5000, "9" * 400 + ".5", "1\0",
    ],
)  # fmt: skip
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError, match="not a size") as caught:
        parse_bytes(text)
    assert caught.value.remedy


@settings(max_examples=200)
@given(
    text=st.one_of(st.text(max_size=8), st.from_regex(r"[0-9]{1,40}(\.[0-9]{1,40})?[kKmMgGtT]?i?[bB]?", fullmatch=True))
)
def test_any_text_is_a_size_or_an_option_error(text: str) -> None:
    with contextlib.suppress(OptionError):
        assert parse_bytes(text) >= 0


def test_defaults_are_valid_and_frozen() -> None:
    options = LoadOptions()
    assert (options.backend, options.io, options.lazy, options.page_cache) == ("auto",) * 4
    assert options == LoadOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.io = "mmap"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(options)) == options


def test_every_field_has_a_doc_line_and_a_default() -> None:
    for field in dataclasses.fields(LoadOptions):
        assert field.default is not dataclasses.MISSING, field.name


@pytest.mark.parametrize(
    ("name", "literal"), [("io", IOMode), ("lazy", LazyMode), ("page_cache", PageCacheMode), ("upload", UploadMode)]
)
def test_choices(name: str, literal: Any) -> None:
    for value in get_args(literal):
        assert getattr(LoadOptions().replace(**{name: value}), name) == value
    for value in ("", "AUTO", "x", None, 1, []):
        with pytest.raises(OptionError) as caught:
            LoadOptions().replace(**{name: value})
        assert name in str(caught.value)
        for allowed in get_args(literal):
            assert allowed in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "least"),
    [("staging_bytes", 1 << 20), ("range_bytes", 4096), ("lazy_bytes", 0), ("workers", 1), ("chunk_bytes", 4096)],
)
def test_least_values(name: str, least: int) -> None:
    assert getattr(LoadOptions().replace(**{name: least}), name) == least
    for value in (least - 1, -1, "5", 1e9, float("nan")):
        with pytest.raises(OptionError, match=name) as caught:
            LoadOptions().replace(**{name: value})
        assert f"{least:,}" in caught.value.remedy


def test_optional_numbers_may_be_left_out() -> None:
    assert LoadOptions(workers=None, chunk_bytes=None, staging_bytes=None).workers is None
    for name in ("range_bytes", "lazy_bytes"):
        with pytest.raises(OptionError, match=name):
            LoadOptions().replace(**{name: None})


def test_select_must_be_a_pattern() -> None:
    assert LoadOptions(select=r"blk\.[0-3]\.").select
    for value in ("(", "[", "*", 5, b"blk"):
        with pytest.raises(OptionError, match="select"):
            LoadOptions().replace(select=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("intents", None),
        ("intents", {}),
        ("intents", {"a": Intent.LINEAR | Intent.LOOKUP}),
        ("intents", {"a": Intent.LINEAR}.get),
        ("overrides", ()),
        ("overrides", [("a", "HOST"), ["b", "ROWS"]]),
        ("device_weights", None),
        ("device_weights", [1, 0.5]),
        ("device_weights", (0, 1)),
    ],
)
def test_collections_that_can_be_used(name: str, value: Any) -> None:
    kept = getattr(LoadOptions().replace(**{name: value}), name)
    if isinstance(value, list | tuple):  # frozen
        assert isinstance(kept, tuple)
        assert [list(item) if isinstance(item, tuple) else item for item in kept] == [
            list(item) if isinstance(item, tuple) else item for item in value
        ]
    else:
        assert kept == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("intents", 5),
        ("intents", "LINEAR"),
        ("intents", Intent.LINEAR),
        ("intents", [("a", Intent.LINEAR)]),
        ("intents", {"a": None}),
        ("intents", {"a": "LINEAR"}),
        ("intents", {"a": 1}),
        ("intents", {"a": Intent(0)}),
        ("intents", {1: Intent.LINEAR}),
        ("overrides", None),
        ("overrides", 5),
        ("overrides", "attn"),
        ("overrides", b"attn"),
        ("overrides", {"attn": "HOST"}),
        ("overrides", {("attn", "HOST")}),
        ("overrides", ["ab"]),
        ("overrides", ("attn", "HOST")),
        ("overrides", [("attn",)]),
        ("overrides", [("attn", "HOST", "ROWS")]),
        ("overrides", [("attn", Placement)]),
        ("overrides", [(b"attn", "HOST")]),
        ("overrides", [5]),
        ("device_weights", 5),
        ("device_weights", "11"),
        ("device_weights", b"11"),
        ("device_weights", {0: 1}),
        ("device_weights", []),
        ("device_weights", [0, 0.0]),
        ("device_weights", [1, -1]),
        ("device_weights", [1, "1"]),
        ("device_weights", [1, None]),
        ("device_weights", [True, 1]),
        ("device_weights", [1, 1j]),
        ("device_weights", [1, float("nan")]),
        ("device_weights", [1, float("inf")]),
        ("device_weights", [1e308, 1e308]),
    ],
)
def test_collections_of_a_wrong_shape_are_named(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"^{name}") as caught:
        LoadOptions().replace(**{name: value})
    assert caught.value.remedy


@pytest.mark.parametrize("answer", [Intent(0), "LINEAR", 1, Placement.HOST, [Intent.LINEAR]])
def test_a_function_that_gives_no_intent_is_named_with_the_tensor(answer: Any) -> None:
    index = index_of([Spec("blk.0.attn_q.weight")])
    with pytest.raises(OptionError, match=r"^intents.*blk\.0\.attn_q\.weight") as caught:
        plan_of(index, intents=lambda name: answer)
    assert caught.value.remedy
    assert plan_of(index, intents=lambda name: None).entries[0].intent is Intent.LINEAR


def test_an_unknown_option_names_the_closest() -> None:
    with pytest.raises(OptionError, match="Did you mean 'page_cache'"):
        LoadOptions().replace(pagecache="drop")
    with pytest.raises(OptionError, match="staging_bytes"):
        LoadOptions().replace(zzz=1)


def test_replace_leaves_the_rest() -> None:
    options = LoadOptions(io="mmap", workers=3)
    changed = options.replace(lazy="off")
    assert (changed.io, changed.workers, changed.lazy, options.lazy) == ("mmap", 3, "off", "auto")


def test_environment() -> None:
    options = LoadOptions.from_environment(
        {
            "GGUFSTREAM_BACKEND": "cpu",
            "GGUFSTREAM_DEVICE": "1",
            "GGUFSTREAM_UPLOAD": "staged",
            "GGUFSTREAM_IO": "pread",
            "GGUFSTREAM_LAZY": "all",
            "GGUFSTREAM_PAGE_CACHE": "keep",
            "GGUFSTREAM_STAGING": "64MiB",
            "GGUFSTREAM_WORKERS": "7",
            "GGUFSTREAM_VULKAN_VALIDATION": "1",
            "UNRELATED": "x",
        }
    )
    assert options == LoadOptions(
        backend="cpu",
        device="1",
        upload="staged",
        io="pread",
        lazy="all",
        page_cache="keep",
        staging_bytes=64 << 20,
        workers=7,
        validation=True,
    )
    assert LoadOptions.from_environment({}) == LoadOptions()
    assert LoadOptions.from_environment(dict.fromkeys(ENVIRONMENT, "")) == LoadOptions(), "set but empty is not set"


def test_the_real_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGUFSTREAM_IO", "direct")
    assert LoadOptions.from_environment().io == "direct"


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("1", True),
        ("true", True),
        ("YES", True),
        ("on", True),
        ("0", False),
        ("False", False),
        ("no", False),
        ("off", False),
    ],
)
def test_switches(text: str, on: bool) -> None:
    assert LoadOptions.from_environment({"GGUFSTREAM_VULKAN_VALIDATION": text}).validation is on


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("GGUFSTREAM_IO", "fast"),
        ("GGUFSTREAM_STAGING", "lots"),
        ("GGUFSTREAM_STAGING", "1k"),
        ("GGUFSTREAM_STAGING", "9" * 400 + ".0"),
        ("GGUFSTREAM_WORKERS", "many"),
        ("GGUFSTREAM_WORKERS", "0"),
        ("GGUFSTREAM_WORKERS", "9" * 5000),
        ("GGUFSTREAM_LAZY", "ON"),
        ("GGUFSTREAM_VULKAN_VALIDATION", "maybe"),
        ("GGUFSTREAM_VULKAN_VALIDATION", "2"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(OptionError, match=variable) as caught:
        LoadOptions.from_environment({variable: text})
    assert isinstance(caught.value, GGUFStreamError)
    assert caught.value.exit_code == 2


def test_names_of_intents_and_placements() -> None:
    assert str(Intent.LINEAR) == "LINEAR"
    assert str(Intent.LINEAR | Intent.LOOKUP) == "LINEAR|LOOKUP"
    assert [str(placement) for placement in Placement] == ["ARENA", "HOST", "ROWS"]


def test_changes_are_the_fields() -> None:
    assert get_type_hints(LoadChanges) | {"backend": str} == get_type_hints(LoadOptions)


@pytest.mark.parametrize("text", ["x", "-1", "1.5"])
def test_a_count_in_the_environment_is_a_whole_number(text: str) -> None:
    with pytest.raises(OptionError, match=f"GGUFSTREAM_WORKERS='{text}': '{text}' is not a whole number"):
        LoadOptions.from_environment({"GGUFSTREAM_WORKERS": text})
