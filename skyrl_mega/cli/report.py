"""`python -m skyrl_mega.report trajectories RUN_OR_FILE…`: the policy's trajectories, as text or as a page.

`python -m skyrl_mega.report run RUN…`: the course of a run, or a comparison of several, as a page.

`python -m skyrl_mega.report timeline RUN`: activity of engines, environments and policy over time, as text or as a
trace.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import DONE, MOST, Parser, guarded, integer, path_of

LOOPBACK = "127.0.0.1"


def trajectories(argv: Sequence[str]) -> None:
    """Prints trajectories as text, or writes an HTML page of them: the subcommand `trajectories`, with its arguments.
    Raises UserError if an option is wrong, a path contains no trajectories, or the page cannot be written."""
    p = Parser(
        prog="python -m skyrl_mega.report trajectories",
        description="Shows what the policy did: as text, or with --html as a page for a browser.",
        allow_abbrev=False,
    )
    p.add_argument(
        "paths",
        nargs="+",
        type=path_of,
        metavar="RUN_OR_FILE",
        help="runs/<name>, a file of its trajectories/, or evaluation/",
    )
    p.add_argument("--step", metavar="N", help="of this step, or of steps N..M")
    p.add_argument(
        "--status",
        action="append",
        default=[],
        metavar="STATUS",
        help="that ended so, such as truncated; may be repeated",
    )
    p.add_argument("--reward", metavar="MIN..MAX", help="with a reward in this range: 0.5.. or ..0 or 1")
    p.add_argument("--search", default="", metavar="TEXT", help="with this text in a message, in any case")
    p.add_argument("--error", default="", metavar="TEXT", help="that failed with this text in the error, in any case")
    p.add_argument(
        "--sort",
        default="step",
        metavar="KEY",
        help="step, reward, tokens, turns, seconds or prompt; -reward puts the largest first",
    )
    p.add_argument(
        "--limit", type=integer(1, MOST), metavar="N", help="the first N; without it 20 as text, all of them as a page"
    )
    p.add_argument("--brief", action="store_true", help="one line each, without the conversation")
    p.add_argument("--html", type=path_of, metavar="FILE", help="writes a page for a browser instead, in one file")
    args = p.parse_args(_with_values(argv))

    from skyrl_mega.report import records, show

    key = args.sort.removeprefix("-")
    if key not in records.SORTS:
        raise UserError(
            f"allowed: {', '.join(records.SORTS)}, each also with - before it", key="--sort", value=args.sort
        )
    query = records.Query(
        steps=_range("--step", args.step),
        statuses=records.statuses(args.status),
        reward=_range("--reward", args.reward),
        text=args.search,
        error=args.error,
    )
    selection = show.Selection(args.paths, query, key, args.sort.startswith("-"), args.limit)
    if args.html:
        show.as_page(selection, args.html)
    else:
        show.as_text(selection, brief=args.brief)


def run(argv: Sequence[str]) -> None:
    """Prints summaries of runs and writes one HTML page about them: the subcommand `run`.

    With `--serve`, serves a live page of a single run instead, until interrupted, and writes no file.

    Args:
        argv: The arguments after the subcommand.

    Raises:
        UserError: A folder does not belong to a run or has a file that cannot be read, options contradict each other,
            or the page cannot be written; with `--serve`, the address cannot be bound.
    """
    p = Parser(
        prog="python -m skyrl_mega.report run",
        description="Prints what was run and what happened, and writes one page on how a run went; with several runs, "
        "how they compare. The last line is the page's path.",
        allow_abbrev=False,
    )
    p.add_argument("runs", nargs="+", type=path_of, metavar="RUN", help="a run's folder, such as runs/<name>")
    p.add_argument("--html", type=path_of, metavar="FILE", help="without it RUN/report.html, of the first run")
    p.add_argument(
        "--serve",
        type=integer(0, 65535),
        metavar="PORT",
        help="serves a page that follows the run; 0: any port",
    )
    p.add_argument("--host", default=LOOPBACK, help=f"--serve: address (default: {LOOPBACK})")
    args = p.parse_args(argv)
    if args.serve is not None:
        if args.html or len(args.runs) > 1:
            raise UserError("it serves the page of one run, and writes no file", key="--serve")
        from skyrl_mega.report.live import foreground

        return foreground.serve_until_interrupted(args.runs[0], args.host, args.serve)
    if args.host != LOOPBACK:
        raise UserError("it has an effect only with --serve; give --serve PORT, or leave it out", key="--host")

    from skyrl_mega.report import header, incidents, overview, run_data

    for folder in args.runs:
        data = run_data.read(folder)
        print("\n".join([*header.text(data), *incidents.text(data)]))
    print(overview.write(args.runs, args.html))


def timeline(argv: Sequence[str]) -> None:
    """Prints the activity during some steps of a run: the subcommand `timeline`. With `--trace`, `--html` or both,
    writes a trace, an HTML page or both, and prints only the paths.

    Args:
        argv: The arguments after the subcommand.

    Raises:
        UserError: `--step` is no range, none of the steps has a timeline, or a file cannot be read or written.
    """
    p = Parser(
        prog="python -m skyrl_mega.report timeline",
        description="Shows what engines, environments and policy did when: as text, as a trace, or as a page.",
        allow_abbrev=False,
    )
    p.add_argument("run", type=path_of, metavar="RUN", help="a run's folder, such as runs/<name>")
    p.add_argument("--step", metavar="N", help="this step, or steps N..M; without it the newest three")
    p.add_argument("--trace", type=path_of, metavar="FILE", help="writes a trace for ui.perfetto.dev, FILE.json.gz")
    p.add_argument("--html", type=path_of, metavar="FILE", help="writes a page for a browser, in one file")
    args = p.parse_args(argv)

    from skyrl_mega.report import overview, timeline_trace
    from skyrl_mega.report import timeline as report

    steps = report.wanted(args.run, _range("--step", args.step))
    if args.trace:
        timeline_trace.write(steps, args.trace)
        print(f"{args.trace}: {len(steps)} steps, open it at ui.perfetto.dev")
    if args.html:
        print(overview.write_timeline(args.run, steps, args.html))
    if not (args.trace or args.html):
        print("\n".join(report.as_text(steps)))


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"trajectories": trajectories, "run": run, "timeline": timeline}
"""Functions by subcommand; each takes the remaining arguments."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m skyrl_mega.report` with a subcommand: trajectories, run or timeline.

    Args:
        arguments: The command line without the program; None takes `sys.argv`.

    Returns:
        The exit code: 0 done, 1 fault (such as a full disk), 2 invalid input. 1 and 2 print one line per error.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    top = Parser(prog="python -m skyrl_mega.report", description=__doc__, allow_abbrev=False)
    top.add_argument("command", choices=COMMANDS, help="each has --help of its own")

    def shown() -> int:
        COMMANDS[top.parse_args(argv[:1]).command](argv[1:])
        return DONE

    return guarded(shown)


def _with_values(argv: Sequence[str]) -> list[str]:
    """Joins `--reward -1..0` to `--reward=-1..0`, as argparse would take the value for an option."""
    out: list[str] = []
    for word in argv:
        if out and out[-1] in ("--reward", "--sort"):
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out


def _range(option: str, text: str | None) -> tuple[float, float] | None:
    """Returns the inclusive bounds of `a..b`, `a..`, `..b` or `a`."""
    if text is None:
        return None
    low, dots, high = text.partition("..")
    try:
        lowest = float(low) if low else -math.inf
        highest = (float(high) if high else math.inf) if dots else lowest
    except ValueError:
        lowest = math.nan
        highest = math.nan
    if not lowest <= highest or not (low or high):
        raise UserError(f"{option} {text}: allowed: a number, or a range from low to high, such as 0..1, 0.5.. or ..0")
    return lowest, highest
