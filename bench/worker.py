"""One contestant in a process of its own: jobs come in as lines of JSON, answers go out as such.

Only the standard library is imported here, and in :mod:`bench.contestants`: a contestant's interpreter may be another than
the tool's. What a contestant prints goes to stderr.

A contestant is a function that imports and opens what it needs, and returns a function of a job that is a generator of
three steps: prepare, load (this alone is timed; it yields facts about the load), free.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import mmap
import os
import resource
import sys
import time
import traceback
from typing import Any


def touch(nbytes: int) -> None:
    """Let the machine have this much free memory that was in use a moment ago.

    A virtual machine gets memory from its host when it is touched, ten times slower than any load: without this, who
    loads first pays for all. Huge pages, because the host takes those back within a second, and loaders ask for them.
    """
    with mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        ctypes.memset(view, 1, len(memory))
        del view


def _cpu_seconds() -> float:
    """Of this process and of the programs that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def do(load: Any, job: dict[str, Any]) -> dict[str, Any]:
    """One turn. Measured is the second step, in seconds of the clock and of all processors."""
    steps = load(job)
    next(steps)
    touch(job.get("touch", 0))
    gc.collect()
    started, cpu = time.perf_counter(), _cpu_seconds()
    facts = next(steps) or {}
    measured = {"seconds": time.perf_counter() - started, "cpu_seconds": _cpu_seconds() - cpu}
    next(steps, None)
    return measured | facts


def main() -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)

        def answer(facts: dict[str, Any]) -> None:
            print(json.dumps(facts), file=answers, flush=True)

        setup = json.loads(sys.stdin.readline())
        module, _, function = setup["function"].partition(":")
        try:
            load = getattr(importlib.import_module(module), function)(**setup["arguments"])
        except ImportError as error:
            return answer({"missing": f"{type(error).__name__}: {error}"})
        except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
            traceback.print_exc()
            return answer({"missing": f"{type(error).__name__}: {error}"})
        answer({})
        for line in sys.stdin:
            try:
                answer(do(load, json.loads(line)))
            except Exception as error:  # noqa: BLE001
                traceback.print_exc()
                answer({"failed": f"{type(error).__name__}: {error}"})
            _free()
    return None


def _free() -> None:
    gc.collect()
    if "torch" in sys.modules:  # else its next load would find the memory of this one, and others would not
        sys.modules["torch"].cuda.empty_cache()


if __name__ == "__main__":
    main()
