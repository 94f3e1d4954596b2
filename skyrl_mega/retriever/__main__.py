"""`python -m skyrl_mega.retriever build|serve|query|run …`: exit code 0 for success, 2 for invalid input (one line)."""

import sys
from collections.abc import Sequence

from skyrl_mega.config.command import guarded


def main(arguments: Sequence[str]) -> int:
    """Runs the subcommand named by the first argument; returns the exit code. Raises UserError for invalid input."""
    if arguments[:1] == ["run"]:
        from skyrl_mega.cli.serve_retriever import main as run

        return run(arguments[1:])
    from skyrl_mega.retriever.commands import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
