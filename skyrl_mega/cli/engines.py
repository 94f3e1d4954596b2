"""`python -m skyrl_mega.engines list|add|remove RUN_FOLDER …`: shows, adds and removes engines of a running run.

add and remove leave a request in the run's folder and wait for the answer (docs/elastic.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed
from skyrl_mega.common.tables import aligned
from skyrl_mega.common.terminal import one_line
from skyrl_mega.config.command import DONE, WRONG_INPUT, Parser, guarded, integer, path_of, real
from skyrl_mega.trainer.engine_requests import MOST_ENGINES, EngineRequest, has_ended, new_id, read_state, send

WAIT_S = 60.0
"""Default seconds to wait for the run's answer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, and prints the engines or the run's answer.

    Args:
        arguments: The arguments; None takes those of this process.

    Returns:
        The exit code: 0 done, 2 invalid input or refused by the run, with a line on standard error; 1 after a disk
        fault.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(lambda: _run(argv))


def _run(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    if args.command == "list":
        print(_listed(args.run))
        return DONE
    given = {name: value for name, value in vars(args).items() if name not in ("command", "run", "wait")}
    request = EngineRequest(new_id(), args.command, **{**given, "engines": tuple(given.get("engines", ()))})
    try:
        request.check()
    except Malformed as error:
        raise UserError(
            str(error), key=args.command, fix=f"see python -m skyrl_mega.engines {args.command} --help"
        ) from error
    accepted, text = send(args.run, request, args.wait)
    print(text, file=sys.stdout if accepted else sys.stderr)
    return DONE if accepted else WRONG_INPUT


def _parser() -> Parser:
    top = Parser(prog="python -m skyrl_mega.engines", description=__doc__, allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="rank, state and node of every engine", allow_abbrev=False)
    adding = commands.add_parser("add", help="starts further engines", allow_abbrev=False)
    removing = commands.add_parser("remove", help="takes engines out; their requests finish first", allow_abbrev=False)
    for command in (listing, adding, removing):
        command.add_argument("run", type=path_of, metavar="RUN_FOLDER", help="the folder of a running run, runs/<name>")
    adding.add_argument("--count", type=integer(1, MOST_ENGINES), default=1, help="number of engines (default 1)")
    adding.add_argument(
        "--endpoint", default="", metavar="URL", help="a server to add as an engine (docs/endpoints.md)"
    )
    adding.add_argument("--kind", default="", help="kind of the server: vllm (default), sglang, or a class of the run")
    adding.add_argument("--sync", default="", help="how the server takes new weights: group, files or directory")
    adding.add_argument(
        "--token-env", default="", metavar="NAME", help="the run's environment variable with the server's API key"
    )
    removing.add_argument("engines", nargs="*", type=integer(0, 10**6), metavar="RANK", help="ranks of the engines")
    removing.add_argument(
        "--grace", dest="grace_s", type=real(0, 86400), metavar="S", help="seconds for requests to finish"
    )
    for command in (adding, removing):
        command.add_argument(
            "--node", default="", metavar="ADDRESS", help="the engines of this node of the Ray cluster"
        )
        command.add_argument(
            "--wait",
            type=real(0.1, 3600),
            default=WAIT_S,
            metavar="S",
            help=f"seconds for an answer (default {WAIT_S:g})",
        )
    return top


def _listed(run: Path) -> str:
    """Returns the engines of a run as lines: rank, state, node, and since when; a sentence if the run has ended."""
    state = read_state(run)
    if has_ended(state):
        return "the run has ended, and its engines with it"
    engines = state.get("engines")
    rows = [["engine", "state", "node", "since"], *map(_row, engines if isinstance(engines, list) else [])]
    return "\n".join(aligned(rows, left=4))


def _row(engine: Any) -> list[str]:
    """Returns the words of a line; values of the file are only shown, never used."""
    fields = engine if isinstance(engine, dict) else {}
    words = [one_line(str(fields.get(name, "")), 60) for name in ("rank", "state", "node")]
    return [*words, "joined" if fields.get("joined") else "start"]
