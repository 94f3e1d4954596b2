"""Command line `python -m skyrl_mega.data addition|gsm8k|multiply …`; exit code 0: done, 1: a fault, 2: wrong input
(one line)."""

import sys

from skyrl_mega.common.terminal import one_line
from skyrl_mega.config.command import DONE, FAULT, guarded, print_error
from skyrl_mega.data.prepare import prepare
from skyrl_mega.envs.faults import InfrastructureFault


def main() -> int:
    """Runs `python -m skyrl_mega.data`: writes the files requested in `sys.argv`; returns the exit code: 0,
    or 1 after a fault of a service, such as a registry of images.

    Raises:
        UserError: An option or a source is wrong, or a file cannot be read or written.
        pyarrow.ArrowException: A value of a source does not have the type of its column.
        SystemExit: After printing the help for `--help`.
    """
    try:
        prepare(sys.argv[1:])
    except InfrastructureFault as error:
        print_error(f"fault: {one_line(str(error))}")
        return FAULT
    return DONE


if __name__ == "__main__":
    sys.exit(guarded(main))
