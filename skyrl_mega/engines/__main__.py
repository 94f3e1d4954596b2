"""`python -m skyrl_mega.engines list|add|remove RUN_FOLDER …`: the engines of a running run."""

import sys

from skyrl_mega.cli.engines import main

if __name__ == "__main__":
    sys.exit(main())
