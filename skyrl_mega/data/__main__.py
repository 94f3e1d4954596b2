"""Command line `python -m skyrl_mega.data addition|gsm8k|multiply …`; exit code 0: done, 2: wrong input (one line)."""

import sys

from skyrl_mega.config.command import DONE, guarded
from skyrl_mega.data.prepare import prepare


def main() -> int:
    """Writes the files requested on the command line; returns the exit code."""
    prepare(sys.argv[1:])
    return DONE


if __name__ == "__main__":
    sys.exit(guarded(main))
