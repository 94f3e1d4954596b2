"""Plants each fault of `tests/support/plants.py` into a copy of the project and sees its test fail.

    .venv/bin/python -m benchmarks.plants [--only TEXT] [--jobs 2]

All tests must pass without a fault first. benchmarks/results/plants.json has each fault's seconds. Exits with 1 where a
test passes though its fault is there, or ends otherwise than by failing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.plants import PLANTS, Plant

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plants.json"
COPIED = ("skyrl_mega", "tests", "benchmarks", "configs", "docs", "pyproject.toml")
PASSED, FAILED = 0, 1
"""Exit statuses of pytest."""


def copy(folder: Path) -> Path:
    """Copies what tests need into a folder, beside a link to the real data where this machine has some.

    Returns:
        The copy's root.
    """
    root = folder / "project"
    root.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, root / name)
    if (shared := ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(shared.resolve())
    return root


def run(root: Path, tests: Sequence[str]) -> tuple[int, str, float]:
    """Runs tests on the package of a copy.

    Returns:
        pytest's exit status, its last lines, and the seconds it took.
    """
    start = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout[-2000:], time.perf_counter() - start


def plant(root: Path, fault: Plant) -> None:
    """Puts a fault into a copy.

    Raises:
        ValueError: The old text is not there exactly once.
    """
    file = root / fault.path
    text = file.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.path} has {text.count(fault.old)} times {fault.old!r}")
    file.write_text(text.replace(fault.old, fault.new))


def caught(fault: Plant) -> tuple[int, str, float]:
    """Runs a fault's test on a copy that has the fault; returns what `run` does."""
    with tempfile.TemporaryDirectory() as folder:
        root = copy(Path(folder))
        plant(root, fault)
        return run(root, [fault.test])


def main() -> int:
    """Runs all of them, or those whose description, path or test has a text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plants")
    parser.add_argument("--only", default="", help="a text in a fault's description, path or test")
    parser.add_argument("--jobs", type=int, default=2, help="faults at once")
    options = parser.parse_args()
    chosen = [p for p in PLANTS if options.only in " ".join(p)]
    with tempfile.TemporaryDirectory() as folder:
        status, said, seconds = run(copy(Path(folder)), list(dict.fromkeys(p.test for p in chosen)))
    print(f"without a fault: pytest exits with {status} after {seconds:.0f} s", flush=True)
    if status != PASSED:
        print(said)
        return 1
    rows = []
    with ThreadPoolExecutor(options.jobs) as threads:
        for fault, (status, said, seconds) in zip(chosen, threads.map(caught, chosen), strict=True):
            found = status == FAILED
            rows.append({**fault._asdict(), "caught": found, "seconds": round(seconds, 1)})
            print(f"{'caught' if found else 'MISSED'}  {seconds:5.1f} s  {fault.fault}  ({fault.test})", flush=True)
            if not found:
                print(said)
    missed = sum(not row["caught"] for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} faults are caught")
    if not options.only:
        RESULTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
