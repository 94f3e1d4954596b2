"""The command line: feeds targets by turns for some seconds, and keeps the cases that end otherwise than they may."""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NoReturn

from tests.fuzz.targets import TARGETS, one_line

CASES = Path(__file__).with_name("cases")
HANG_S = 20.0


class Hung(BaseException):
    """A case took longer than `HANG_S`. No reader can survive it by accident."""


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
    print(f"seed {seed}", flush=True)
    done, failed = fuzz(names, seed, args.seconds, args.keep)
    print(", ".join(f"{name} {done[name]}" for name in names) + f"; {len(failed)} failed")
    return 1 if failed else 0


def fuzz(names: Sequence[str], seed: int, seconds: float, keep: Path) -> tuple[Counter[str], list[Path]]:
    """Feeds targets by turns.

    Args:
        names: Targets.
        seed: Decides all cases.
        seconds: For how long.
        keep: Folder for cases that failed.

    Returns:
        How many cases each target had, and the files of those that failed.
    """
    end, done, failed = time.monotonic() + seconds, Counter[str](), list[Path]()
    while time.monotonic() < end:
        for name in names:
            case = TARGETS[name].make(Random(f"{seed}/{name}/{done[name]}"))
            done[name] += 1
            if (error := outcome(name, case)) is not None:
                text = json.dumps({"target": name, "case": case}, indent=1)
                file = keep / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.json"
                file.write_text(text)
                failed.append(file)
                print(f"{name} case {done[name] - 1} of seed {seed}, kept as {file}:\n{error}", file=sys.stderr)
    return done, failed


def outcome(name: str, case: Any) -> str | None:
    """None where a case ends as it may, else the traceback."""
    target = TARGETS[name]
    before = signal.signal(signal.SIGALRM, _hang)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        with tempfile.TemporaryDirectory() as folder:
            target.run(case, Path(folder))
    except target.errors as error:
        try:
            one_line(error)
        except AssertionError:
            return traceback.format_exc()
    except (Exception, Hung):
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return None


def _hang(number: int, frame: FrameType | None) -> NoReturn:
    raise Hung(f"longer than {HANG_S:g} s")


if __name__ == "__main__":
    sys.exit(main())
