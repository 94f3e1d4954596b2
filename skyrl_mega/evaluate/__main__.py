"""`python -m skyrl_mega.evaluate --config FILE [group.key=value …] [--set NAME=FILE …] [--endpoint URL …]`."""

import sys

from skyrl_mega.evaluate.cli import main

if __name__ == "__main__":
    sys.exit(main())
