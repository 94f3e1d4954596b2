"""`python -m skyrl_mega.launch --config FILE [group.key=value …] [--dry-run] [--json]`."""

import sys

from skyrl_mega.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
