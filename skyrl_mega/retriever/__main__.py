"""`python -m skyrl_mega.retriever build|serve|query …`: exit code 0 for success, 2 for invalid input (one line)."""

import sys

from skyrl_mega.config.command import guarded
from skyrl_mega.retriever.commands import main

if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
