"""From what somebody asked for to text or a page of trajectories."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from skyrl_mega.report.document import save
from skyrl_mega.report.records import SORTS, Query, Record, files_of, load
from skyrl_mega.report.terminal import View
from skyrl_mega.rollout.trajectory import GREEDY
from skyrl_mega.telemetry.console import Console as Progress

TEXT_LIMIT = 20
"""Trajectories that are printed without --limit."""
PLAIN_WIDTH = 100
"""Columns where there is no terminal that says its own."""


@dataclass(frozen=True)
class Wanted:
    """Where to look, for what, and in which order."""

    paths: Sequence[Path]
    query: Query
    sort: str
    descending: bool
    limit: int | None


def as_text(wanted: Wanted, brief: bool) -> None:
    """Prints trajectories to standard output, and how many there are."""
    found = _found(wanted)
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, emoji=False, width=PLAIN_WIDTH)
    chosen = found[: wanted.limit or (None if brief else TEXT_LIMIT)]
    view = View(console, chosen)
    if brief:
        view.titles()
    for record in chosen:
        (view.figures if brief else view.whole)(record)
    more = (
        f"; the first {len(chosen)} are shown, --limit shows more, --html FILE all" if len(chosen) < len(found) else ""
    )
    console.print(f"{summary(found)}{more}", style="bright_black", soft_wrap=True)


def as_page(wanted: Wanted, file: Path) -> None:
    """Writes the page, and says where it is."""
    from skyrl_mega.report.browse import page

    found = _found(wanted)[: wanted.limit]
    with _progress("page", len(found)) as update:
        save(file, page(found, update))
    print(f"{summary(found)}\n{file}: {file.stat().st_size / 1e6:.1f} MB, open it in a browser")


def summary(records: Sequence[Record]) -> str:
    """How many there are, how they ended, and their mean reward. ReMax's greedy answers are counted apart."""
    drawn = [r for r in records if r.sample != GREEDY]
    greedy = [r for r in records if r.sample == GREEDY]
    told = [_told(of, kind) for of, kind in ((drawn, "trajectories"), (greedy, "greedy answers")) if of]
    return "; ".join(told) or "no trajectory is as asked for"


def _told(records: Sequence[Record], kind: str) -> str:
    ended = ", ".join(f"{count} {status}" for status, count in Counter(r.status for r in records).most_common())
    mean = sum(r.reward for r in records) / len(records)
    return f"{len(records)} {kind}: {ended}; mean reward {mean:.3f}"


def _found(wanted: Wanted) -> list[Record]:
    files = files_of(wanted.paths)
    with _progress("read trajectories", len(files)) as update:
        records = load(files, wanted.query, update)
    return sorted(records, key=SORTS[wanted.sort], reverse=wanted.descending)


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A line that moves, on a terminal; elsewhere nothing, so that an error is the only line."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    with Progress(out=sys.stderr) as console, console.phase(name, total=total) as phase:
        yield phase.update
