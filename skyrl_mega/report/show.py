"""The `trajectories` report: selection of trajectories, and output as text or as a page."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from skyrl_mega.report.document import save
from skyrl_mega.report.records import SORTS, Query, Record, files_of, load, step_of
from skyrl_mega.report.terminal import View
from skyrl_mega.telemetry.console import Console as Progress
from skyrl_mega.trajectories.trajectory import GREEDY

TEXT_LIMIT = 20
"""Trajectories printed without --limit."""
PLAIN_WIDTH = 100
"""Columns of output outside a terminal."""


@dataclass(frozen=True)
class Selection:
    """Files to search, filter, order and limit of the wanted trajectories."""

    paths: Sequence[Path]
    """Run folders, `trajectories/` folders or files."""
    query: Query
    """The filter."""
    sort: str
    """Key of `records.SORTS`."""
    descending: bool
    """True to reverse the order."""
    limit: int | None
    """Maximum number of trajectories; None uses the default of the output."""


def as_text(selection: Selection, brief: bool) -> None:
    """Prints trajectories and a summary of all matching trajectories to standard output. Without a limit, prints every
    trajectory if `brief`, else the first `TEXT_LIMIT`.

    Args:
        selection: The wanted trajectories.
        brief: True for a line per trajectory, False for whole conversations.

    Raises:
        UserError: A path contains no trajectories, or none of a wanted step; or a file cannot be read.
    """
    records = _select(selection)
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=PLAIN_WIDTH)
    chosen = records[: selection.limit or (None if brief else TEXT_LIMIT)]
    view = View(console, chosen)
    if brief:
        view.titles()
    for record in chosen:
        (view.figures if brief else view.whole)(record)
    more = (
        f"; the first {len(chosen)} are shown, --limit shows more, --html FILE all"
        if len(chosen) < len(records)
        else ""
    )
    console.print(f"{summary(records)}{more}", style="bright_black", soft_wrap=True)


def as_page(selection: Selection, file: Path) -> None:
    """Writes the HTML page of trajectories to `file`, and prints a summary with the location. Without a limit, the page
    has all matching trajectories. An older page is replaced.

    Raises:
        UserError: A path contains no trajectories, or none of a wanted step; a file cannot be read; or the page cannot
            be written.
    """
    from skyrl_mega.report.browse import page

    records = _select(selection)[: selection.limit]
    with _progress("page", len(records)) as update:
        save(file, page(records, update))
    print(f"{summary(records)}\n{file}: {file.stat().st_size / 1e6:.1f} MB, open it in a browser")


def summary(records: Sequence[Record]) -> str:
    """Returns a line with the number of trajectories, the number of each status, and the mean reward.

    ReMax's greedy answers are counted separately. Without trajectories, the line says so.
    """
    samples = [r for r in records if r.sample != GREEDY]
    greedy = [r for r in records if r.sample == GREEDY]
    summaries = [_summary(of, kind) for of, kind in ((samples, "trajectories"), (greedy, "greedy answers")) if of]
    return "; ".join(summaries) or "no trajectory matches the options"


def _summary(records: Sequence[Record], kind: str) -> str:
    ended = ", ".join(f"{count} {status}" for status, count in Counter(r.status for r in records).most_common())
    mean = sum(r.reward for r in records) / len(records)
    return f"{len(records)} {kind}: {ended}; mean reward {mean:.3f}"


def _select(selection: Selection) -> list[Record]:
    files = files_of(selection.paths)
    wanted = sum(selection.query.takes_step(step_of(file)) for _, file in files)
    with _progress("read trajectories", wanted) as update:
        records = load(files, selection.query, update)
    return sorted(records, key=SORTS[selection.sort], reverse=selection.descending)


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress line on a terminal, and nothing elsewhere, so that an error is the only line there."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    with Progress(out=sys.stderr) as console, console.phase(name, total=total) as phase:
        yield phase.update
