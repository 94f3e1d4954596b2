"""`python -m skyrl_mega.export RUN --output DIR [--step N] [--dtype …] [--workers N] [--from master] [--verify]`."""

import sys

from skyrl_mega.export.cli import main

if __name__ == "__main__":
    sys.exit(main())
