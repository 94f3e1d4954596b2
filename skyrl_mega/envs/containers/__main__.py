"""Command line `python -m skyrl_mega.envs.containers pull|check …`; exit code 0: done, 1: fault, 2: wrong input."""

import sys

from skyrl_mega.config.command import guarded
from skyrl_mega.envs.containers.prepare import run

if __name__ == "__main__":
    sys.exit(guarded(lambda: run(sys.argv[1:])))
