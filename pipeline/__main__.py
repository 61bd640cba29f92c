"""``python -m ggufstream`` is the command line."""

import sys

from ggufstream.cli import main

if __name__ == "__main__":
    sys.exit(main())
