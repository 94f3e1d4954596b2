"""`python -m skyrl_mega.retriever build|serve|query|run …`: exit code 0 for success, 2 for invalid input (one line)."""

import sys
from collections.abc import Sequence

from skyrl_mega.config.command import guarded


def main(arguments: Sequence[str]) -> int:
    """Runs the subcommand named by the first argument. Returns the exit code: 0 done, or 1 if the service of `run`
    cannot be kept alive.

    Raises:
        UserError: The input is invalid, or a service does not answer a query.
        OSError: A file cannot be written.
        InfrastructureFault, pyarrow.ArrowException: `data.prepare` of the subcommand `run` failed.
    """
    if arguments[:1] == ["run"]:
        from skyrl_mega.cli.serve_retriever import main as run

        return run(arguments[1:])
    from skyrl_mega.retriever.commands import main as command

    return command(arguments)


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(sys.argv[1:])))
