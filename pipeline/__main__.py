"""``python -m ggufstream``, and the command ``ggufstream``."""

import os
import signal
import sys


def main() -> int:
    """The command line. A signal that comes while it is being imported ends the process, without a traceback."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _: os._exit(128 + number))
    from ggufstream.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
