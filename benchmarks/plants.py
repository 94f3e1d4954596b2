"""Plants each fault of `tests/support/plants.py` into a copy of the project and expects the fault's test to fail.

    .venv/bin/python -m benchmarks.plants [--only TEXT] [--jobs 2] [--results FILE]

All tests must pass without a fault first. benchmarks/results/plants.json holds the seconds per fault. Exits with 1 if a
test passes despite the fault, or ends in another way than by failing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.plants import PLANTS, Plant

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plants.json"
COPIED = ("skyrl_mega", "tests", "benchmarks", "configs", "docs", "pyproject.toml")
OURS = ("skyrl_mega", "tests", "benchmarks")
PRELOADED = ("torch", "transformers", "megatron.core", "pyarrow.dataset", "hypothesis")
"""Libraries with imports of several seconds: the processes of all tests are forked from a process after these
imports."""
PASSED, FAILED = 0, 1
"""Exit statuses of pytest."""
LONGEST_S = 900


def copy(folder: Path) -> Path:
    """Copies the files needed by tests into a folder, next to a link to the real data if this machine has real data.

    Returns:
        The root of the copy.
    """
    root = folder / "project"
    root.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name)
        else:
            shutil.copy(ROOT / name, root / name)
    if (shared := ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(shared.resolve())
    return root


def plant(root: Path, fault: Plant) -> None:
    """Puts a fault into a copy.

    Raises:
        ValueError: The file does not contain the old text exactly once.
    """
    file = root / fault.path
    text = file.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.path} has {text.count(fault.old)} times {fault.old!r}")
    file.write_text(text.replace(fault.old, fault.new))


def run(faults: Sequence[Plant], tests: Sequence[str]) -> tuple[int, str, float]:
    """Runs tests on a copy with these faults. The calling process is unusable afterwards.

    Returns:
        pytest's exit status, the last lines of output, and seconds.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = copy(Path(folder))
        for fault in faults:
            plant(root, fault)
        for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
            del sys.modules[name]
        sys.path.insert(0, str(root))
        os.environ["PYTHONPATH"] = str(root)
        os.chdir(root)
        output = Path(folder) / "output"
        with output.open("w") as opened:
            for stream in (1, 2):
                os.dup2(opened.fileno(), stream)
        status = int(pytest.main(["-q", "-x", "--tb=short", "-p", "no:cacheprovider", *tests]))
        used = Path(str(importlib.import_module("skyrl_mega").__file__))
        if not used.is_relative_to(root):
            raise RuntimeError(f"the tests have used {used}")
        sys.stdout.flush()
        return status, output.read_text()[-2000:], time.perf_counter() - start


def main() -> int:
    """Runs all faults, or those with a given text in description, path or test."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plants")
    parser.add_argument("--only", default="", help="a text in a fault's description, path or test")
    parser.add_argument("--jobs", type=int, default=2, help="faults at once")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where a run of all faults is written")
    options = parser.parse_args()
    chosen = [fault for fault in PLANTS if options.only in " ".join(fault)]
    for library in PRELOADED:
        importlib.import_module(library)
    tasks = [((), list(dict.fromkeys(fault.test for fault in chosen))), *(((fault,), [fault.test]) for fault in chosen)]
    rows = []
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as processes:
        whole, *answers = [processes.apply_async(run, task) for task in tasks]
        status, output, seconds = whole.get(LONGEST_S)
        print(f"without a fault: pytest exits with {status} after {seconds:.0f} s", flush=True)
        if status != PASSED:
            print(output)
            return 1
        for fault, answer in zip(chosen, answers, strict=True):
            status, output, seconds = answer.get(LONGEST_S)
            caught = status == FAILED
            rows.append({**fault._asdict(), "caught": caught, "seconds": round(seconds, 1)})
            print(f"{'caught' if caught else 'MISSED'} {seconds:6.1f} s  {fault.fault}  ({fault.test})", flush=True)
            if not caught:
                print(output, flush=True)
    missed = sum(not row["caught"] for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} faults are caught")
    if not options.only:
        options.results.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
