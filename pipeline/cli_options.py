"""The options of the command line: their declarations, and what they and the environment come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

import click

from ggufstream.errors import OptionError
from ggufstream.options import (
    ENVIRONMENT,
    STAGING_BYTES,
    IOMode,
    LazyMode,
    LoadOptions,
    PageCacheMode,
    Placement,
    RowStrategy,
    UploadMode,
    parse_bytes,
)
from ggufstream.terminal import LogFormat, configure_logging

__all__ = [
    "digest_options",
    "every_row_option",
    "loading_options",
    "page_cache_option",
    "rows_option",
    "settle",
    "shared_options",
    "trace_option",
]

_F = TypeVar("_F", bound=Callable[..., Any])

_SHARED = (
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    click.option(
        "--log-format",
        type=click.Choice(get_args(LogFormat)),
        default="auto",
        show_default=True,
        help="Of the log on stderr; auto: console on a terminal, else JSON.",
    ),
    click.option("-v", "--verbose", count=True, help="Log each step; twice for everything."),
    # `ggufstream.cli` looks for it itself, because an error may come before the options are parsed
    click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an unexpected error."),
)


def shared_options(function: _F) -> _F:
    """Gives a verb the options that all have."""
    for option in reversed(_SHARED):
        function = option(function)
    return function


def _choice(*names: str) -> click.Choice[str]:
    return click.Choice(names, case_sensitive=False)


_VARIABLES = {name: variable for variable, (name, _) in ENVIRONMENT.items()}


def _option(flag: str, field: str, *, help: str, default: str | None = None, **more: Any) -> Callable[[_F], _F]:  # noqa: A002
    """An option for a field of ``LoadOptions``. Help names its environment variable and default, but click applies
    neither: ``LoadOptions.from_environment`` does, and its errors name the variable.
    """
    value = getattr(LoadOptions(), field) if default is None else default
    facts = [f"env var: {_VARIABLES[field]}"] if field in _VARIABLES else []
    facts += [f"default: {value}"] if value not in (None, False, ()) else []
    text = f"{help}  [{'; '.join(facts)}]" if facts else help
    return click.option(flag, field, help=text, **more)


rows_option = _option(
    "--rows", "row_strategy", type=_choice(*get_args(RowStrategy)), help="How rows of tables come out of the file."
)
page_cache_option = _option(
    "--page-cache", "page_cache", type=_choice(*get_args(PageCacheMode)), help="What the page cache holds afterwards."
)

_LOADING = (
    _option(
        "--backend",
        "backend",
        metavar="NAME",
        help="auto, cpu, cpu_scalar, vulkan, or simulated:PROFILE for hardware that is not here (profiles: see "
        "`ggufstream devices`). auto: a real GPU if there is one, else cpu.",
    ),
    _option("--device", "device", metavar="DEVICE", help="Index of the device, or a part of its name."),
    click.option(
        "--devices",
        metavar="A,B",
        help="Several backends in place of one, such as vulkan:0,vulkan:1; layers are split over them in order.",
    ),
    _option(
        "--weights", "device_weights", metavar="X,Y", help="With --devices: their shares.", default="by free memory"
    ),
    _option("--io", "io", type=_choice(*get_args(IOMode)), help="How bytes come out of the file."),
    _option(
        "--upload",
        "upload",
        type=_choice(*get_args(UploadMode)),
        help="Into device memory in place (direct), via pinned memory (staged), or let the device read the file's own "
        "pages (alias).",
    ),
    _option("--lazy", "lazy", type=_choice(*get_args(LazyMode)), help="Which lookup tables stay in the file."),
    rows_option,
    _option(
        "--row-cache",
        "row_cache_bytes",
        metavar="BYTES",
        help="Most host memory for rows of tables in the file that were read, such as 16M; 0 keeps none.",
        default=f"{LoadOptions().row_cache_bytes >> 20}M",
    ),
    page_cache_option,
    _option(
        "--staging",
        "staging_bytes",
        metavar="BYTES",
        help="Most host memory for moving bytes, such as 64M.",
        default=f"{STAGING_BYTES >> 20}M, or a quarter of free memory",
    ),
    _option(
        "--workers",
        "workers",
        type=click.IntRange(1),
        metavar="N",
        help="Worker threads.",
        default="by processors",
    ),
    _option("--select", "select", metavar="REGEX", help="Only tensors whose name matches."),
    _option(
        "--override",
        "overrides",
        metavar="REGEX=PLACE",
        multiple=True,
        help="Where tensors whose name matches go: ARENA, HOST, ROWS or device:N. May be repeated; the first match "
        "decides.",
    ),
    _option("--validation", "validation", is_flag=True, help="Run Vulkan's validation layer, and log what it reports."),
)


def loading_options(function: _F) -> _F:
    """Gives a verb the options that all have, and those of a load; ``settle`` takes what they bring."""
    function = shared_options(function)
    for option in reversed(_LOADING):
        function = option(function)
    return function


every_row_option = click.option(
    "--all", "every_row", is_flag=True, help="A row for every tensor; a terminal else shows alike layers as one."
)

_DIGESTS = (
    _option(
        "--digest",
        "digest",
        metavar="MANIFEST",
        help="Compare every tensor with a manifest of `ggufstream digest` or llama.cpp's gguf-hash.",
    ),
    _option(
        "--sha256",
        "sha256",
        metavar="HEX",
        multiple=True,
        help="Compare the whole file with its sha256; once for each shard, in order.",
    ),
)


def digest_options(function: _F) -> _F:
    """Gives a verb the options of what a load is compared with."""
    for option in reversed(_DIGESTS):
        function = option(function)
    return function


trace_option = click.option(
    "--trace",
    metavar="FILE",
    help="Write what happened when, for `ggufstream report` or ui.perfetto.dev; also of a load that fails.",
)


def settle(
    *,
    log_format: LogFormat,
    verbose: int,
    devices: str | None,
    device_weights: str | None,
    staging_bytes: str | None,
    row_cache_bytes: str | None,
    overrides: Sequence[str],
    validation: bool,
    **given: Any,
) -> tuple[LoadOptions, tuple[str, ...]]:
    """The environment's options, changed by those on the command line; and the backends where several are asked for.

    Also sets up the log, as the options have it.

    Raises:
        OptionError: A value is wrong, or two options exclude each other.
    """
    changes = {name: value for name, value in given.items() if value is not None}
    if devices is not None and "backend" in changes:
        raise OptionError("--backend and --devices exclude each other", remedy="Give one of them")
    if device_weights is not None:
        changes["device_weights"] = tuple(_share(text) for text in device_weights.split(","))
    for flag, name, text in (
        ("--staging", "staging_bytes", staging_bytes),
        ("--row-cache", "row_cache_bytes", row_cache_bytes),
    ):
        if text is not None:
            try:
                changes[name] = parse_bytes(text)
            except OptionError as error:
                raise OptionError(f"{flag}: {error.what}", remedy=error.remedy) from None
    if overrides:
        changes["overrides"] = tuple(_override(text) for text in overrides)
    if validation:
        changes["validation"] = True
    options = LoadOptions.from_environment().replace(**changes)
    several = () if devices is None else tuple(name.strip() for name in devices.split(","))
    if several and options.device is not None:
        raise OptionError(
            f"--device {options.device} does not say which of the devices it is for",
            remedy=f"Name it among the devices, as in vulkan:{options.device}",
        )
    configure_logging(log_format, verbose)
    return options, several


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not math.isfinite(share):
        raise OptionError(f"--weights: {text!r} is not a number", remedy="Write a number for each device, such as 1,2")
    return share


def _override(text: str) -> tuple[str, str]:
    pattern, equals, place = text.rpartition("=")
    if not equals:
        raise OptionError(f"--override {text!r} names no place", remedy="Write it like 'ffn_.*_exps=HOST'")
    return pattern, place.upper() if place.upper() in Placement.__members__ else place
