"""Queries against SQLite files, each in a sandboxed process of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_mega.config.errors import UserError
from skyrl_mega.envs.sandbox import Outcome, Sandbox
from skyrl_mega.envs.sandbox.scoring import scored
from skyrl_mega.envs.text2sql import query
from skyrl_mega.envs.text2sql.ordering import orders_rows

PROGRAM = Path(__file__).with_name("query.py")
ENDED = {
    "output": "it returns too much",
    "memory": "it was ended, as all queries at once had too much memory",
}
"""What to say of a query whose process the sandbox ended."""
COMPILE_S = 5.0
"""For what a connection does before it compiles a query."""
START_S = 10.0
"""For the process to start and to end, beside the query's own time."""


@dataclass(frozen=True)
class Table:
    """What a query gave back."""

    columns: list[str]
    rows: list[list[str]]
    """The first ones, as text."""
    count: int
    """Of all rows."""
    error: str | None = None
    """Why there is nothing."""

    def text(self, most: int) -> str:
        """For the policy to read: a header, a row per line, `most` characters at most."""
        if self.error is not None:
            return f"Error: {self.error}"
        lines = [" | ".join(self.columns), *(" | ".join(row) for row in self.rows)]
        text = "\n".join(lines)
        left = self.count - len(self.rows)
        if len(text) > most:
            text, left = text[:most] + "…", max(left, 1)
        return f"{text}\n({self.count} rows, cut)" if left else text if self.count else f"{text}\n(no rows)"


@dataclass(frozen=True)
class Database:
    """A SQLite file that is only ever read.

    Args:
        file: The file.
        box: Where queries run.
        rows: Rows that a query may return; past it, an error.
        shown: Rows of them that the policy sees.
        width: Characters that it sees of a value.
        compare: `set` or `rows`: when two results are the same.
    """

    file: Path
    box: Sandbox
    rows: int = 100_000
    shown: int = 50
    width: int = 200
    compare: str = "set"

    def query(self, sql: str, seconds: float) -> Table:
        """Runs one query; whatever goes wrong is in the table's `error`."""
        return _table(self._run([sql], seconds)[0][0])

    def differ(self, sql: str, gold: str, seconds: float) -> tuple[str | None, Table, Table]:
        """Why a solution does not give what the gold query gives, None where it does; and what each gave."""
        (ours, theirs), why = self._run([sql, gold], seconds)
        return why, _table(ours), _table(theirs)

    def _run(self, queries: list[str], seconds: float) -> tuple[list[dict[str, Any]], str | None]:
        """What became of each query, and why two gave different results."""
        file = str(self.file.resolve())
        order = {
            "database": file,
            "queries": queries,
            "seconds": seconds,
            "rows": self.rows,
            "shown": self.shown,
            "width": self.width,
            "compare": self.compare,
            "ordered": orders_rows(queries[-1]),
        }
        box = replace(self.box, read=(*self.box.read, file))
        whole = len(queries) * seconds
        limits = replace(box.limits, wall_s=whole + START_S, cpu_s=int(whole + START_S), output_kib=64 * 1024)

        def run(left: float) -> Outcome:
            return box.run(
                [os.path.abspath(sys.executable), "-I", "-S", "-B", "query.py"],
                stdin=json.dumps(order),
                files={"query.py": PROGRAM.read_text(encoding="utf-8")},
                limits=replace(limits, wall_s=left),
            )

        outcome = scored(run, limits.wall_s)
        told = [json.loads(line) for line in outcome.stdout.splitlines(keepends=True) if line.endswith("\n")]
        why = told.pop()["differ"] if told and "differ" in told[-1] else "a query was ended"
        late = outcome.status == "timeout" or outcome.exit == -signal.SIGALRM
        cause = f"timeout: it ran longer than {seconds:g} s" if late else "it needs more memory than a query may have"
        cause = ENDED.get(outcome.status, cause)
        ended = [{"error": cause}, *[{"error": "it was not run: the one before it was ended"}] * len(queries)]
        return [*told, *ended][: len(queries)], why


def _table(result: dict[str, Any]) -> Table:
    if "error" in result:
        return Table([], [], 0, result["error"])
    return Table(result["columns"], result["rows"], result["count"])


def refuse_unmerged(file: Path) -> None:
    """Refuses a database with a write-ahead log: read without its log it may be empty, or of another day.

    Raises:
        UserError: There is a log with something in it.
    """
    log = file.with_name(f"{file.name}-wal")
    if log.is_file() and log.stat().st_size:
        raise UserError(
            f"{log}: it holds changes that are not in {file.name} yet, which is read without them; merge them: "
            f"sqlite3 {shlex.quote(str(file))} 'PRAGMA journal_mode = DELETE'"
        )


def wrong_query(file: Path, sql: str) -> str | None:
    """Returns why a database cannot compile a query; None if it can. The query is not run. For files that are trusted.

    Args:
        file: The database.
        sql: The query.
    """
    try:
        connection = query.connect(str(file.resolve()), COMPILE_S)
        try:
            connection.execute(query.EXPLAIN + query.NOTHING.sub("", sql, count=1))
        finally:
            connection.close()
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        return str(error)
    return None


def schema(file: Path, most: int) -> str:
    """The statements that made a database's tables, `most` characters at most. For files that are trusted.

    Raises:
        OSError: It cannot be opened as a database.
        UserError: A part of it lies in another file.
    """
    refuse_unmerged(file)
    connection = sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)
    try:
        made = connection.execute(
            "SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
        ).fetchall()
    except sqlite3.DatabaseError as error:
        raise OSError(0, str(error)) from error
    finally:
        connection.close()
    text = ";\n".join(" ".join(statement.split()) for (statement,) in made)
    return text if len(text) <= most else text[:most] + " …"
