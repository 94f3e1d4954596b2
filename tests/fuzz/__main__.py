"""The command line: feeds targets for some seconds, says how far it is, keeps the cases that end as they must not."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from skyrl_mega.config.terminal import printable
from tests.fuzz.apart import feed_apart
from tests.fuzz.feed import Began, Ended, Share, case_of, feed
from tests.fuzz.targets import TARGETS

CASES = Path(__file__).with_name("cases")
Source = Callable[[Sequence[str], int, Mapping[str, Share]], Generator[Began | Ended]]
QUIET_S = 10.0
"""Between two lines of progress."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, and says how many cases there were and which failed; 1 where some did."""
    p = argparse.ArgumentParser(prog="python -m tests.fuzz", description=main.__doc__)
    p.add_argument("--seconds", type=float, default=60.0)
    p.add_argument("--seed", type=int, default=None, help="default: one of the clock's, which is printed")
    p.add_argument("--only", default=",".join(TARGETS), help="targets, with commas (default: all)")
    p.add_argument("--keep", type=Path, default=CASES, help="folder for cases that failed")
    args = p.parse_args(arguments)
    seed = time.time_ns() % 10**9 if args.seed is None else args.seed
    names = args.only.split(",")
    if unknown := [name for name in names if name not in TARGETS]:
        p.error(f"--only {unknown[0]}: allowed: {', '.join(TARGETS)}")
    args.keep.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"seed {seed}")
    had, failed = fuzz(names, seed, args.seconds, args.keep, console, feed_apart)
    console.print(table(had))
    console.print(f"seed {seed}: {sum(share.cases for share in had.values())} cases, {len(failed)} failed")
    return 1 if failed else 0


def fuzz(
    names: Sequence[str],
    seed: int,
    seconds: float,
    keep: Path,
    console: Console | None = None,
    source: Source = feed,
) -> tuple[dict[str, Share], list[Path]]:
    """Feeds targets, at least one case each.

    Args:
        names: Targets.
        seed: Decides all cases.
        seconds: For how long.
        keep: Folder for cases that failed.
        console: Where progress and failures are told.
        source: Feeds.

    Returns:
        What each target has had, and the files of the cases that failed.
    """
    had, failed = {name: Share() for name in names}, list[Path]()
    start = said = time.monotonic()
    with contextlib.closing(source(names, seed, had)) as events, contextlib.suppress(KeyboardInterrupt):
        for event in events:
            if isinstance(event, Ended):
                had[event.name].count(event)
                if event.error is not None:
                    failed.append(kept(event, seed, keep))
                    if console:
                        told = f"{event.name} case {event.number} of seed {seed}, kept as {failed[-1]}:"
                        console.print(f"{told}\n{printable(event.error, keep=chr(10))}")
            now = time.monotonic()
            if console and now - said >= QUIET_S:
                said = now
                console.print(progress(had, len(failed), seconds - (now - start)))
            if now - start >= seconds and all(share.cases for share in had.values()):
                break
    return had, failed


def kept(ended: Ended, seed: int, folder: Path) -> Path:
    """The file of a case that failed."""
    text = json.dumps({"target": ended.name, "case": case_of(ended.name, seed, ended.number)}, indent=1)
    file = folder / f"{ended.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
    file.write_text(text)
    return file


def progress(had: Mapping[str, Share], failed: int, left: float) -> str:
    """One line."""
    counts = ", ".join(f"{name} {share.cases}" for name, share in had.items())
    return f"{max(0.0, left):.0f} s left, {failed} failed: {counts}"


def table(had: Mapping[str, Share]) -> Table:
    """What each target has had."""
    out = Table("target", "cases", "failed", "seconds", "slowest", "which")
    for name, share in had.items():
        slow = share.slowest
        row = (
            (name, share.cases, share.failed, f"{share.seconds:.0f}", f"{slow.seconds:.2f} s", slow.number)
            if slow
            else (name,)
        )
        out.add_row(*map(str, row))
    return out


if __name__ == "__main__":
    sys.exit(main())
