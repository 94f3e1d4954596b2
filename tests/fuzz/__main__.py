"""The command line: feeds targets for some seconds, prints progress and keeps failed cases."""

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

from skyrl_mega.common.terminal import printable
from tests.fuzz.apart import feed_apart
from tests.fuzz.feed import Began, Ended, Share, case_of, feed
from tests.fuzz.targets import TARGETS

CASES = Path(__file__).with_name("cases")
Source = Callable[[Sequence[str], int, Mapping[str, Share]], Generator[Began | Ended]]
QUIET_S = 10.0
"""Seconds between two lines of progress."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the fuzzing, prints the number of cases and the failures, and returns 1 if any case failed."""
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
    shares, failed = fuzz(names, seed, args.seconds, args.keep, console, feed_apart)
    console.print(table(shares))
    console.print(f"seed {seed}: {sum(share.cases for share in shares.values())} cases, {len(failed)} failed")
    return 1 if failed else 0


def fuzz(
    names: Sequence[str],
    seed: int,
    seconds: float,
    keep: Path,
    console: Console | None = None,
    source: Source = feed,
) -> tuple[dict[str, Share], list[Path]]:
    """Feeds every target at least one case.

    Args:
        names: Targets.
        seed: Seed of all cases.
        seconds: Duration.
        keep: Folder for failed cases.
        console: Output of progress and failures.
        source: Generator of events: `feed` or `feed_apart`.

    Returns:
        The share of each target and the files of failed cases.
    """
    shares, failed = {name: Share() for name in names}, list[Path]()
    start = printed_at = time.monotonic()
    with contextlib.closing(source(names, seed, shares)) as events, contextlib.suppress(KeyboardInterrupt):
        for event in events:
            if isinstance(event, Ended):
                shares[event.name].count(event)
                if event.error is not None:
                    failed.append(kept(event, seed, keep))
                    if console:
                        headline = f"{event.name} case {event.number} of seed {seed}, kept as {failed[-1]}:"
                        console.print(f"{headline}\n{printable(event.error, keep=chr(10))}")
            now = time.monotonic()
            if console and now - printed_at >= QUIET_S:
                printed_at = now
                console.print(progress(shares, len(failed), seconds - (now - start)))
            if now - start >= seconds and all(share.cases for share in shares.values()):
                break
    return shares, failed


def kept(ended: Ended, seed: int, folder: Path) -> Path:
    """Writes a failed case to a file and returns the file."""
    text = json.dumps({"target": ended.name, "case": case_of(ended.name, seed, ended.number)}, indent=1)
    file = folder / f"{ended.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
    file.write_text(text)
    return file


def progress(shares: Mapping[str, Share], failed: int, left: float) -> str:
    """Returns a one-line summary."""
    counts = ", ".join(f"{name} {share.cases}" for name, share in shares.items())
    return f"{max(0.0, left):.0f} s left, {failed} failed: {counts}"


def table(shares: Mapping[str, Share]) -> Table:
    """Returns a table with the cases, failures and times of each target."""
    out = Table("target", "cases", "failed", "seconds", "slowest", "which")
    for name, share in shares.items():
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
