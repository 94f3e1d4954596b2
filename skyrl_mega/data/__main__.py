"""Command line `python -m skyrl_mega.data addition|gsm8k|multiply …`; exit code 0: done, 2: wrong input (one line)."""

import sys

from skyrl_mega.config.command import DONE, guarded
from skyrl_mega.data.prepare import prepare


def main() -> int:
    """Runs `python -m skyrl_mega.data`: writes the files requested in `sys.argv`; returns the exit code 0.

    Raises:
        UserError: An option or a source is wrong.
    """
    prepare(sys.argv[1:])
    return DONE


if __name__ == "__main__":
    sys.exit(guarded(main))
