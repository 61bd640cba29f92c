"""Compare ggufstream with the hardware's limit and with the other loaders, side by side in one run.

    python -m bench --quick          small files, about two minutes
    python -m bench                  the whole comparison
    python -m bench --gpu            on a machine with an NVIDIA GPU and PyTorch

Every figure of a row is from this run. Loads from the page cache (warm) and from the disk (cold) are never in one table;
mincore is asked before each load. Contestants take turns, each in a process of its own, and whatever memory a load needs
has been touched just before. Packages that are not here are named as missing.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from bench.cpu import PARTS, Suite
from bench.files import CACHE
from bench.machine import describe
from bench.results import Run
from ggufstream.options import parse_bytes


def _command(options: argparse.Namespace) -> str:
    """The choices of this call, without paths of the machine: results are made to be shown."""
    words = [f"--{name}" for name in ("quick", "gpu") if getattr(options, name)]
    words += [
        word for name in ("bytes", "repeats") if (value := getattr(options, name)) for word in (f"--{name}", str(value))
    ]
    words += ["--only", *options.only] if tuple(options.only) != PARTS else []
    return shlex.join(
        ["python", "-m", "bench", *words, *(["--llama-python", "PYTHON"] if options.llama_python else [])]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small files, few repeats")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--llama-python", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--gpu", action="store_true", help="the suite for an NVIDIA GPU")
    parser.add_argument(
        "--bytes", type=parse_bytes, help="size of the file on the disk or for the GPU; default: 4 GiB, quick 256 MiB"
    )
    parser.add_argument("--repeats", type=int, help="turns that count; default: 5, quick 3")
    parser.add_argument("--output", type=Path, default=CACHE / "result.json", help="JSON; .md, .png, .html beside it")
    options = parser.parse_args()
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - started:4.0f} s  {text}", file=sys.stderr, flush=True)

    run = Run(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=_command(options),
        machine=describe(CACHE),
    )
    nbytes = options.bytes or (256 << 20 if options.quick else 4 << 30)
    repeats = options.repeats or (3 if options.quick else 5)
    if options.gpu:
        from bench.gpu import run_gpu

        run_gpu(run, nbytes=nbytes, repeats=repeats, patience=15, say=say)
    else:
        sizes = (256 << 20, 1 << 30) if options.quick else (1 << 30, 4 << 30, 16 << 30)
        suite = Suite(
            run=run, cold_bytes=nbytes, warm_bytes=min(nbytes, 1 << 30), peak_bytes=sizes, repeats=repeats, has_time=not options.quick,
            llama_python=options.llama_python, say=say,
        )  # fmt: skip
        for part in PARTS:
            if part in options.only:
                getattr(suite, part)()
    run.seconds = time.perf_counter() - started
    print(run.markdown())
    for path in run.write(options.output):
        print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
