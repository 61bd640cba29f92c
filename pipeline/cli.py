"""The entry point ``ggufstream``: runs a verb and turns how it ended into an exit code and one line.

======= ===========================================
0       done
1       a bug here, or the output could not be written
2       usage: an option, its value, or a missing extra
3       the file is bad or cannot be read
4       device or memory
5       ``verify`` found a difference
130     SIGINT; 143 SIGTERM
======= ===========================================
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence

from ggufstream.errors import FileError, GGUFStreamError
from ggufstream.terminal import Interrupted, OutputError, log_failure, logs_json, signals_handled

__all__ = ["main"]

_NAME = "ggufstream"
_EXTRA_MODULES = ("click", "rich")
_FACTS = (
    "file",
    "tensor",
    "offset",
    "needed",
    "available",
    "backend",
    "name",
    "errno",
    "algorithm",
    "expected",
    "found",
    "remedy",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _fill_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # a name that the terminal's encoding lacks is escaped, never an exception
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with signals_handled(lambda error: _fail(error, str(error), error.exit_code, arguments)):
        code = _run(arguments)
        try:
            sys.stdout.flush()
        except OSError:
            _discard_stdout()
    return code


def _fill_closed_streams() -> None:
    """Whoever starts us without stdout or stderr (``>&-``) wants silence, not an error."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - as long as the process


def _run(arguments: Sequence[str]) -> int:
    try:
        from ggufstream.commands import run_verb

        code = run_verb(_NAME, arguments)
    except Interrupted as error:
        return _fail(error, str(error), error.exit_code, arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA_MODULES:
            return _unexpected(error, arguments)
        remedy = f"the command line needs {error.name}; install it with: pip install {' '.join(_EXTRA_MODULES)}"
        return _fail(error, remedy, 2, arguments)
    except GGUFStreamError as error:
        return _fail(error, _in_flags(error), error.exit_code, arguments)
    except BrokenPipeError:
        return _discard_stdout()
    except OutputError as error:
        _discard_stdout()
        return _fail(error, str(error), 1, arguments)
    except MemoryError as error:
        return _fail(error, "the host is out of memory. Close other programs, or give less --staging", 4, arguments)
    except Exception as error:  # noqa: BLE001 - the last line of defence: a person gets a sentence, not a traceback
        if (
            isinstance(error, OSError)
            and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EIO}
            and error.filename is None
        ):
            _discard_stdout()  # click writes help and version itself
            return _fail(error, str(OutputError(error)), 1, arguments)
        if type(error) is RuntimeError and "start new thread" in str(error):
            return _fail(error, "the host is out of memory or of threads. Raise the limits (ulimit -a)", 4, arguments)
        if _lacks_descriptors(error):
            return _fail(error, "this process may open no more files. Raise its limit (ulimit -n)", 3, arguments)
        return _unexpected(error, arguments)
    return code


def _lacks_descriptors(error: BaseException | None) -> bool:
    """Whether an error came of having no descriptor left: that can be met anywhere, while importing for one."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_lacks_descriptors, error.exceptions))
    number = error.errno if isinstance(error, OSError) else None
    return number in {errno.EMFILE, errno.ENFILE} or (error is not None and _lacks_descriptors(error.__context__))


def _unexpected(error: Exception, arguments: Sequence[str]) -> int:
    what = f"unexpected {type(error).__name__}: {error}. This is a bug in ggufstream; --debug shows where"
    return _fail(error, what, 1, arguments, debug="--debug" in arguments)


def _in_flags(error: GGUFStreamError) -> str:
    """The message with the options named as on the command line: ``--staging 1`` for ``staging_bytes=1``."""
    message = str(error)
    if isinstance(error, FileError):
        return message if error.file.strip() else f"{error.file!r}{message.removeprefix(error.file)}"
    if message.startswith("environment variable"):
        return message
    for pattern, flag in _FLAGS:
        message = pattern.sub(flag, message)
    return message


_FLAGS = (
    (re.compile(r"(?<![\w/.-])(backend|digest|io|lazy|select|sha256|upload|workers)="), r"--\1 "),
    (re.compile(r"\bpage_cache\b=?"), "--page-cache "),
    (re.compile(r"\bstaging_bytes\b=?"), "--staging "),
    (re.compile(r"\brow_strategy\b=?"), "--rows "),
    (re.compile(r"\brow_cache_bytes\b=?"), "--row-cache "),
    (re.compile(r"\bdevice_weights\b(=| (?=has))"), "--weights "),
    (re.compile(r"(?<=with )(a wider )?select\b"), r"\1--select"),
    (re.compile(r"(?<=by )select\b"), "--select"),
)


def _fail(error: BaseException, message: str, code: int, arguments: Sequence[str], *, debug: bool = False) -> int:
    """Say what went wrong: one line or record on stderr, and an object on stdout where JSON was asked for."""
    try:
        as_json = logs_json(_log_format(arguments))
        facts: dict[str, object] = {"error_type": type(error).__name__, "exit_code": code}
        if debug:
            trace = "".join(traceback.format_exception(error))
            facts["exception"] = trace
            if not as_json:
                print(trace, file=sys.stderr, end="")
        log_failure(message, facts, as_json=as_json)
        if "--json" in arguments:
            import json

            more = {name: _plain(getattr(error, name, None)) for name in _FACTS}
            known = {name: value for name, value in more.items() if value not in (None, "")}
            body = {"type": type(error).__name__, "message": message, "exit_code": code, **known}
            print(json.dumps({"error": body}), flush=True)
    except OSError:
        _discard_stdout()  # an error about the error helps nobody
    return code


def _log_format(arguments: Sequence[str]) -> str:
    """What ``--log-format`` says; read here, because an error may come before the options are parsed."""
    found = "auto"
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, value = argument.partition("=")
        if name == "--log-format":
            found = value or following
    return found


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | None) else str(value)


def _discard_stdout() -> int:
    """Whoever read stdout has left (``| head``), or the disk is full: keep the interpreter from flushing again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return 1
