"""`python -m skyrl_mega.preflight --config FILE [group.key=value …] [--json]`."""

import sys

from skyrl_mega.cli.preflight import main

if __name__ == "__main__":
    sys.exit(main())
