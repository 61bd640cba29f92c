"""The verbs of the command line. Everything heavy is imported inside them, so that ``--help`` answers at once."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ggufstream.cli_options import (
    digest_options,
    every_row_option,
    loading_options,
    page_cache_option,
    rows_option,
    settle,
    shared_options,
    trace_option,
)
from ggufstream.errors import FileError, OptionError
from ggufstream.options import Intent, LoadOptions
from ggufstream.terminal import (
    LogFormat,
    OutputError,
    ProgressDisplay,
    configure_logging,
    progress_bar,
    run_interruptible,
    write_json,
    write_out,
)

if TYPE_CHECKING:
    from ggufstream.events import EventSink
    from ggufstream.gguf_file import FileIndex
    from ggufstream.job import LoadJob
    from ggufstream.model import Model

__all__ = ["commands", "describe_index", "run_verb"]

DIFFERS = 5
"""Exit code of ``verify``."""

_EXIT_CODES = {
    0: 'done; of `plan` also if the model does not fit (--json: "fits")',
    1: "a bug in ggufstream, or the output could not be written",
    2: "usage: an option, its value, or a missing package",
    3: "the file is bad, cannot be read, or differs from its digest",
    4: "device or memory",
    5: "`verify` found a difference",
    130: "SIGINT (SIGTERM: 143), after everything in flight was freed",
}


def _print_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from importlib import metadata

    try:
        version = metadata.version("ggufstream")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    click.echo(f"ggufstream {version}")
    context.exit()


class _Group(click.Group):
    """A group whose help ends with the exit codes."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in _EXIT_CODES.items()])


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def commands() -> None:
    """Stream GGUF model files onto a device.

    Each verb takes --json: one JSON object on stdout, logs on stderr. Options may also come from environment
    variables, which each verb's --help names.
    """


@commands.command(short_help="Show header, metadata, tensors and shards.")
@click.argument("file")
@click.option("--arrays", is_flag=True, help="With --json: every element of metadata arrays.")
@every_row_option
@shared_options
def inspect(file: str, *, arrays: bool, every_row: bool, as_json: bool, log_format: LogFormat, verbose: int) -> None:
    """Show what the header of FILE says; reads no tensor data."""
    from ggufstream.gguf_file import read_index

    configure_logging(log_format, verbose)

    index = run_interruptible(lambda: read_index(file))
    found = describe_index(index, arrays=arrays and as_json)
    if as_json:
        write_json(found)
        return
    from ggufstream.render import show_inspect

    show_inspect(found, every_row=every_row)


def describe_index(index: FileIndex, *, arrays: bool = False) -> dict[str, Any]:
    """A file index in plain values: what ``inspect --json`` prints. Sizes and offsets in bytes."""
    from ggufstream.gguf_file import LazyArray

    metadata: dict[str, Any] = {}
    for key, value in index.metadata.items():
        if isinstance(value, LazyArray):
            metadata[key] = {"array": value.element_type, "length": len(value)}
            if arrays:
                metadata[key]["values"] = value.tolist()
        else:
            metadata[key] = value
    types: dict[str, dict[str, int]] = {}
    for tensor in index.tensors:
        total = types.setdefault(tensor.type.name, {"tensors": 0, "bytes": 0})
        total["tensors"] += 1
        total["bytes"] += tensor.nbytes
    return {
        "file": index.path,
        "version": index.version,
        "alignment": index.alignment,
        "architecture": index.architecture,
        "file_bytes": index.file_bytes,
        "tensor_bytes": index.tensor_bytes,
        "shards": [
            {"file": s.path, "bytes": s.size, "header_bytes": s.header_bytes, "data_offset": s.data_offset}
            for s in index.shards
        ],
        "metadata": metadata,
        "types": dict(sorted(types.items(), key=lambda item: -item[1]["bytes"])),
        "tensors": [
            {
                "name": t.name,
                "type": t.type.name,
                "shape": list(t.shape),
                "shard": t.shard,
                "offset": t.offset,
                "bytes": t.nbytes,
            }
            for t in index.tensors
        ],
        "warnings": list(index.warnings),
    }


@commands.command(short_help="Show what a load would do, tensor by tensor.")
@click.argument("file")
@every_row_option
@loading_options
def plan(file: str, *, every_row: bool, as_json: bool, **given: Any) -> None:
    """Show what `load` would do with each tensor of FILE; moves no byte.

    The exit code is 0 even if the model does not fit; "fits" in the output of --json tells.
    """
    options, several = settle(**given)
    found = run_interruptible(lambda: _plan(file, options, several))
    if as_json:
        write_json(found)
        return
    from ggufstream.render import show_plan

    show_plan(found, every_row=every_row)


async def _plan(file: str, options: LoadOptions, several: Sequence[str]) -> dict[str, Any]:
    from ggufstream.backends.registry import open_for
    from ggufstream.gguf_file import read_index
    from ggufstream.plan import check_tables, make_plan
    from ggufstream.threads import in_thread

    index = await read_index(file)

    def work() -> dict[str, Any]:
        with ExitStack() as opened:
            names = several or (options.backend,)
            share = index.tensor_bytes // len(names)
            backends = [
                opened.enter_context(open_for(options.replace(backend=name), load_bytes=share)[0]) for name in names
            ]
            load_plan = make_plan(index, backends=backends, options=options)
            check_tables(load_plan, options)
            return load_plan.to_dict()

    return await in_thread(work)


def _spare(sources: Iterable[str], path: str, flag: str) -> None:
    """Refuse to write over what is read: a file, or any shard of a split one."""
    from ggufstream.gguf_file import split_paths

    for source in (part for given in sources for part in split_paths(given)):
        if os.path.exists(path) and os.path.exists(source) and os.path.samefile(path, source):
            raise OptionError(f"{flag} {path} is a file that is read", remedy="Name another file")


@asynccontextmanager
async def _loaded(
    file: str, options: LoadOptions, several: Sequence[str], *, trace: str | None, sink: EventSink
) -> AsyncIterator[Model]:
    """The model, open as long as the block lasts. What happened is written to ``trace``, however the load ends."""
    from ggufstream.loader import Loader

    if trace is not None:
        from ggufstream.timeline import Timeline
        from ggufstream.trace_file import write_trace

        _spare([file, *([] if options.digest is None else [os.fspath(options.digest)])], trace, "--trace")
        # An empty one: that it cannot be written should not come out after minutes.
        await _written(write_trace(Timeline(), trace))
    job: LoadJob | None = None
    try:
        async with Loader(max_jobs=1, options=options) as loader:
            job = loader.submit(file, devices=several, sinks=[sink])
            async with await job as model:
                yield model
    except BaseException:
        if trace is not None and job is not None:
            with suppress(OutputError):  # what went wrong with the load says more
                await _written(job.write_trace(trace))
        raise
    if trace is not None:
        await _written(job.write_trace(trace))


async def _written(writing: Awaitable[None]) -> None:
    import anyio

    try:
        with anyio.CancelScope(shield=True):
            await writing
    except OSError as error:
        raise OutputError(error) from None


@commands.command(short_help="Load, print the report, free.")
@click.argument("file")
@trace_option
@digest_options
@loading_options
def load(file: str, *, trace: str | None, as_json: bool, log_format: LogFormat, **given: Any) -> None:
    """Load FILE onto a device, print the report, and free everything."""
    options, several = settle(log_format=log_format, **given)

    async def work() -> dict[str, Any]:
        with progress_bar(log_format) as bar:
            async with _loaded(file, options, several, trace=trace, sink=bar) as model:
                return model.report.to_dict()

    report = run_interruptible(work)
    if as_json:
        write_json(report)
        return
    from ggufstream.render import show_report

    show_report(report)


@commands.command(short_help="Load, and compare every byte with the file.")
@click.argument("file")
@trace_option
@digest_options
@loading_options
def verify(file: str, *, trace: str | None, as_json: bool, log_format: LogFormat, **given: Any) -> int:
    """Load FILE and check what arrived.

    Every tensor is read back and compared with the file, byte for byte (one that was decoded, with what the reference
    decodes), its products with the reference, and rows of lookup tables, too. Exit code 5 if anything differs.
    """
    options, several = settle(log_format=log_format, **given)
    from ggufstream.verification import verify as verify_model

    async def work() -> dict[str, Any]:
        with progress_bar(log_format) as bar:
            async with _loaded(file, options, several, trace=trace, sink=bar) as model:
                found = await verify_model(model, on_tensor=_comparing(model, bar))
                report = model.report
            place = {"backend": report.backend, "device": report.device, "io": report.io, "upload": report.upload}
            return {"file": report.file, **place, **found.to_dict()}

    result = run_interruptible(work)
    if as_json:
        write_json(result)
    else:
        from ggufstream.render import show_verify

        show_verify(result)
    return DIFFERS if result["differing"] else 0


def _comparing(model: Model, display: ProgressDisplay) -> Callable[[str], None]:
    """Shows a second bar: how much of the model has been compared."""
    sizes = {name: weight.nbytes for name, weight in model.items()}
    title, total = f"comparing with {os.path.basename(model.report.file)}", sum(sizes.values())
    done = 0
    display.show(title, done, total)

    def on_tensor(name: str) -> None:
        nonlocal done
        done += sizes[name]
        display.show(title, done, total)

    return on_tensor


@commands.command(short_help="Write digests of each tensor.")
@click.argument("file")
@click.option("-o", "--output", metavar="FILE", help="Where to write them; default: stdout.")
@shared_options
def digest(file: str, *, output: str | None, as_json: bool, log_format: LogFormat, verbose: int) -> None:
    """Write a manifest of FILE, digests of each tensor, in the format of llama.cpp's gguf-hash.

    `load --digest` and `gguf-hash --check` compare a file with it.
    """
    from ggufstream.digest import tensor_digests
    from ggufstream.manifest import format_manifest
    from ggufstream.threads import in_thread
    from ggufstream.whole_files import try_to_write, write_whole

    configure_logging(log_format, verbose)
    if output is not None:
        _spare([file], output, "--output")

    async def work() -> tuple[str, dict[str, dict[str, str]]]:
        if output is not None:
            await _written(try_to_write(output))  # not after minutes
        with progress_bar(log_format) as bar:
            title = f"digest of {os.path.basename(file)}"
            index, digests = await tensor_digests(file, on_bytes=partial(bar.show, title))
        text = await in_thread(partial(format_manifest, index, digests))
        if output is not None:
            await _written(write_whole(output, text.encode("utf-8", "surrogateescape")))
        return text, digests

    text, digests = run_interruptible(work)
    if as_json:
        write_json({"file": file, "tensors": digests, "manifest": output})
    else:
        write_out(text if output is None else f"{output}\n")


@commands.command(short_help="Make a page of a trace.")
@click.argument("trace")
@click.option("-o", "--output", metavar="FILE", help="The page; default: beside the trace, with the ending .html.")
@shared_options
def report(trace: str, *, output: str | None, as_json: bool, log_format: LogFormat, verbose: int) -> None:
    """Make one self-contained HTML page of TRACE, which `load --trace` has written: a picture of the load, what bounds
    it, its figures and its plan.
    """
    from ggufstream.report_page import write_page

    configure_logging(log_format, verbose)
    path = f"{os.path.splitext(trace)[0]}.html" if output is None else output
    _spare([trace], path, "--output")
    try:
        nbytes = run_interruptible(lambda: write_page(trace, path))
    except FileError:
        raise
    except OSError as error:
        raise OutputError(error) from None
    if as_json:
        write_json({"trace": trace, "page": path, "bytes": nbytes})
        return
    write_out(f"{path}\n")


@commands.command(short_help="Show rows of a lookup table.")
@click.argument("file")
@click.argument("tensor")
@click.argument("ids", nargs=-1, required=True)
@rows_option
@page_cache_option
@shared_options
def rows(
    file: str,
    tensor: str,
    *,
    ids: Sequence[str],
    as_json: bool,
    log_format: LogFormat,
    verbose: int,
    **given: Any,
) -> None:
    """Show rows of the table TENSOR of FILE, decoded; reads nothing else.

    IDS are row numbers: 3 17, or 3,17, or 20-25 for all six. With --json every value is printed.
    """
    numbers = _row_numbers(ids)
    changes = {name: value for name, value in given.items() if value is not None}
    options = LoadOptions.from_environment().replace(backend="cpu", **changes)
    if options.row_strategy == "device-read":
        raise OptionError("row_strategy=device-read needs a device, and rows uses none", remedy="Choose another")
    configure_logging(log_format, verbose)
    found = run_interruptible(lambda: _rows(file, tensor, numbers, options))
    if as_json:
        write_json(found)
        return
    width = len(str(max(found["ids"], default=0)))
    for number, values in zip(found["ids"], found["rows"], strict=True):
        shown = "  ".join(f"{value:12.6g}" for value in values[:_SHOWN])
        write_out(f"{number:>{width}}  {shown}{'  …' if len(values) > _SHOWN else ''}\n")


_SHOWN = 6
_MOST_ROWS = 1 << 20


def _row_numbers(texts: Sequence[str]) -> list[int]:
    """Row numbers as they are typed: ``3``, ``3,17`` and ``20-25``."""
    numbers: list[int] = []
    for text in ",".join(texts).split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:-([0-9]{1,18}))?\s*", text, re.ASCII)
        if match is None:
            raise OptionError(f"{text!r} is no row number", remedy="Write them like 3 17 20-25")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise OptionError(f"{text!r} runs backwards", remedy=f"Write {last}-{first}")
        if last - first >= _MOST_ROWS - len(numbers):
            raise OptionError(f"{text} and what is before are too many rows", remedy=f"At most {_MOST_ROWS:,} at once")
        numbers.extend(range(first, last + 1))
    return numbers


async def _rows(file: str, tensor: str, numbers: list[int], options: LoadOptions) -> dict[str, Any]:
    from ggufstream.gguf_file import read_index
    from ggufstream.loader import load as load_model

    info = (await read_index(file)).tensor(tensor)
    # The table alone, and out of the file, whatever else a model would want it for.
    alone = options.replace(select=f"^{re.escape(tensor)}$", intents={tensor: Intent.LOOKUP}, lazy="on")
    async with await load_model(file, options=alone) as model:
        values = await model.rows(tensor, numbers)
        counts = model.statistics()["rows"][tensor]
        return {
            "file": model.report.file,
            "tensor": tensor,
            "type": info.type.name,
            "shape": list(info.shape),
            "strategy": counts["strategy"],
            "reason": model.report.rows[0].reason,
            "fetches": counts["fetches"],
            "bytes_read": counts["bytes_read"],
            "seconds": counts["seconds"],
            "ids": numbers,
            "rows": values.tolist(),
        }


@commands.command(short_help="Show what each backend sees here.")
@shared_options
def devices(*, as_json: bool, log_format: LogFormat, verbose: int) -> None:
    """Show what each backend sees here, what it lacks, and how to get it."""
    from ggufstream.backends.registry import describe_backends

    configure_logging(log_format, verbose)
    found = describe_backends()
    if as_json:
        write_json({"backends": found})
        return
    from ggufstream.render import show_devices

    show_devices(found)


def _log_validation() -> None:
    """Log what Vulkan's validation layer has reported, where it ran."""
    vulkan = sys.modules.get("ggufstream.backends.vulkan")
    if vulkan is not None and vulkan.VALIDATION_MESSAGES:
        import structlog

        for message in vulkan.VALIDATION_MESSAGES:
            structlog.get_logger("ggufstream").warning("vulkan_validation", message=message)


def _is_of_a_verb(option: str) -> bool:
    return any(option in parameter.opts for verb in commands.commands.values() for parameter in verb.params)


def run_verb(name: str, arguments: Sequence[str]) -> int:
    """Run the verb that ``arguments`` name, and return the exit code.

    In place of click's own ``main``, which takes every ``EOFError``, a truncated file among them, for the end of what
    a user types.

    Raises:
        OptionError: An argument is wrong.
    """
    if os.environ.get(f"_{name.upper()}_COMPLETE"):
        commands.main(list(arguments), prog_name=name)  # a shell asks for completions
    try:
        with commands.make_context(name, list(arguments)) as context:
            try:
                code = commands.invoke(context)
            finally:
                _log_validation()
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else name
        what = error.format_message().rstrip(".")
        if isinstance(error, click.NoSuchOption) and path == name and _is_of_a_verb(error.option_name):
            what = f"{error.option_name} comes after the command"
        raise OptionError(f"{what} (see `{path} --help`)") from None
    return code if isinstance(code, int) else 0
