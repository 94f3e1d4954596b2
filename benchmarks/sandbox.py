"""Measures sandboxed steps of policies: steps per second, and the duration of a step.

    python -m benchmarks.sandbox [--seconds 10] [--at-once 2] [--only python sql]

Prints JSON: for a Python program, an SQLite query and a command in a session, steps per second, and milliseconds at the
median and the 99th percentile. To compare two versions, run both in turn on an otherwise idle machine; `--only python
sql` also works in versions without `Sandbox.workspace`.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from skyrl_mega.envs.sandbox import CommandLimits, Sandbox
from skyrl_mega.envs.sandbox.run import python
from skyrl_mega.envs.text2sql.database import Database

PROGRAM = "print(sum(i * i for i in range(10_000)))"
QUERY = "SELECT name, sum(price) FROM sale JOIN item USING (id) GROUP BY name ORDER BY 2 DESC LIMIT 10"
WARM_UP = 5
"""Steps that are not counted."""

Step = Callable[[], None]


def main() -> None:
    """Parses the command line and prints a JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each kind")
    parser.add_argument("--at-once", type=int, default=2, help="steps at once")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    print(json.dumps({kind: measure(KINDS[kind], args.seconds, args.at_once) for kind in args.only}, indent=1))


def measure(kind: Callable[[], Iterator[Step]], seconds: float, at_once: int) -> dict[str, float]:
    """Runs steps for `seconds`, `at_once` in parallel; returns the figures."""
    with contextmanager(kind)() as step, ThreadPoolExecutor(at_once) as pool:
        for _ in range(WARM_UP):
            step()
        start = time.perf_counter()

        def work(_: int) -> list[float]:
            durations = []
            while (begin := time.perf_counter()) < start + seconds:
                step()
                durations.append(time.perf_counter() - begin)
            return durations

        durations = sorted(one for some in pool.map(work, range(at_once)) for one in some)
        whole = time.perf_counter() - start
    return {
        "steps": len(durations),
        "steps_per_second": round(len(durations) / whole, 2),
        "median_ms": round(1000 * statistics.median(durations), 1),
        "p99_ms": round(1000 * durations[int(0.99 * (len(durations) - 1))], 1),
    }


def _python() -> Iterator[Step]:
    box = Sandbox(CommandLimits())

    def step() -> None:
        outcome = box.run(python(), files={"main.py": PROGRAM})
        assert outcome.stdout == "333283335000\n", outcome

    yield step


def _sql() -> Iterator[Step]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shop.sqlite"
        with sqlite3.connect(file) as connection:
            connection.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT)")
            connection.execute("CREATE TABLE sale (id INTEGER, price REAL)")
            connection.executemany("INSERT INTO item VALUES (?, ?)", ((i, f"item {i}") for i in range(100)))
            connection.executemany("INSERT INTO sale VALUES (?, ?)", ((i % 100, i / 7) for i in range(10_000)))
        connection.close()
        database = Database(file, Sandbox(CommandLimits(processes=4)))

        def step() -> None:
            table = database.query(QUERY, 5.0)
            assert table.count == 10, table

        yield step


def _session() -> Iterator[Step]:
    box = Sandbox(CommandLimits())
    workspace = box.workspace()

    def step() -> None:
        outcome = box.run(["/bin/sh", "-c", "echo hello | cat"], workspace=workspace)
        assert outcome.stdout == "hello\n", outcome

    yield step
    workspace.close()


KINDS = {"python": _python, "sql": _sql, "session": _session}

if __name__ == "__main__":
    main()
