"""Queries on SQLite files, each in a separate sandboxed process."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.sandbox import Sandbox, SandboxResult
from skyrl_mega.envs.sandbox.scoring import run_with_retries
from skyrl_mega.envs.text2sql import query
from skyrl_mega.envs.text2sql.ordering import orders_rows

PROGRAM = Path(__file__).with_name("query.py")
ERROR_OF_STATUS = {
    "output": "it returns too much",
    "memory": "it was ended, as all queries at once had too much memory",
}
"""Sandbox status → error text of a query."""
COMPILE_S = 5.0
"""Time limit for preparing a connection before compiling a query, in seconds."""
START_S = 10.0
"""Seconds for starting and ending the process, in addition to the query's own time."""


@dataclass(frozen=True)
class QueryResult:
    """Result of a query for the policy: the first rows as text, or an error."""

    columns: list[str] = field(default_factory=list)
    """Names of the columns."""
    rows: list[list[str]] = field(default_factory=list)
    """First rows, as text."""
    count: int = 0
    """Number of all rows."""
    error: str | None = None
    """Reason for a missing result."""

    def text(self, max_characters: int) -> str:
        """Returns the table for the policy: a header, a row per line, at most `max_characters` characters, then a note
        if rows are missing or none exist. After an error: `Error:` and the reason, never cut."""
        if self.error is not None:
            return f"Error: {self.error}"
        lines = [" | ".join(self.columns), *(" | ".join(row) for row in self.rows)]
        text = "\n".join(lines)
        hidden_rows = self.count - len(self.rows)
        if len(text) > max_characters:
            text, hidden_rows = text[:max_characters] + "…", max(hidden_rows, 1)
        return f"{text}\n({self.count} rows, cut)" if hidden_rows else text if self.count else f"{text}\n(no rows)"


@dataclass(frozen=True)
class Database:
    """A SQLite file, opened only for reading.

    Args:
        file: The file.
        box: Sandbox for queries.
        rows: Maximum number of rows of a result; more rows are an error.
        shown: Number of rows shown to the policy.
        width: Number of characters shown of a value.
        compare: `set` or `rows`, the rule for equal results.
    """

    file: Path
    box: Sandbox
    rows: int = 100_000
    shown: int = 50
    width: int = 200
    compare: str = "set"

    def query(self, sql: str, seconds: float) -> QueryResult:
        """Runs a single query in the sandbox within `seconds` seconds, and returns the first `shown` rows as text, with
        the number of all rows; a failing query is reported in the result's `error`.

        Raises:
            InfrastructureFault: The sandbox cannot start, or was killed from outside, or the database cannot be read.
            UserError: The machine lacks an isolation feature that the sandbox requires.
        """
        return self._run([sql], seconds)[0][0]

    def differ(self, sql: str, gold: str, seconds: float) -> tuple[str | None, QueryResult, QueryResult]:
        """Runs two queries, and compares the results. A query that fails or takes too long raises no error, but is a
        reason.

        Args:
            sql: The policy's solution.
            gold: The gold query.
            seconds: Time limit of each query.

        Returns:
            The reason why the results differ (None if equal), the solution's result, and the gold result.

        Raises:
            InfrastructureFault: The sandbox cannot start, or was killed from outside, or the database cannot be read.
            UserError: The machine lacks an isolation feature that the sandbox requires.
        """
        (ours, theirs), reason = self._run([sql, gold], seconds)
        return reason, ours, theirs

    def _run(self, queries: list[str], seconds: float) -> tuple[list[QueryResult], str | None]:
        """Returns the result of each query, and the reason why two results differ."""
        file = str(self.file.resolve())
        request = {
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
        total_s = len(queries) * seconds
        limits = replace(box.limits, wall_s=total_s + START_S, cpu_s=int(total_s + START_S), output_kib=64 * 1024)

        def run(seconds_left: float) -> SandboxResult:
            return box.run(
                [os.path.abspath(sys.executable), "-I", "-S", "-B", "query.py"],
                stdin=json.dumps(request),
                files={"query.py": PROGRAM.read_text(encoding="utf-8")},
                limits=replace(limits, wall_s=seconds_left),
            )

        outcome = run_with_retries(run, limits.wall_s)
        results = [json.loads(line) for line in outcome.stdout.splitlines(keepends=True) if line.endswith("\n")]
        if results and "unread" in results[-1]:
            raise InfrastructureFault(f"the database {file} cannot be read: {results[-1]['unread']}")
        reason = results.pop()["differ"] if results and "differ" in results[-1] else "a query was ended"
        timed_out = outcome.status == "timeout" or outcome.exit == -signal.SIGALRM
        cause = (
            f"timeout: it ran longer than {seconds:g} s" if timed_out else "it needs more memory than a query may have"
        )
        cause = ERROR_OF_STATUS.get(outcome.status, cause)
        failures = [{"error": cause}, *[{"error": "it was not run: the one before it was ended"}] * len(queries)]
        return [QueryResult(**result) for result in [*results, *failures][: len(queries)]], reason


def refuse_unmerged(file: Path) -> None:
    """Checks that a database has no write-ahead log: without the log, the database may look empty or outdated.

    Args:
        file: The database; the log is `<file>-wal`.

    Raises:
        UserError: The log exists and is not empty. The message has the command that merges it.
    """
    log = file.with_name(f"{file.name}-wal")
    if log.is_file() and log.stat().st_size:
        raise UserError(
            f"this log has changes that are not in {file.name} yet, and the database is read without the log",
            key=log,
            fix=f"merge them: sqlite3 {shlex.quote(str(file))} 'PRAGMA journal_mode = DELETE'",
        )


def wrong_query(file: Path, sql: str) -> str | None:
    """Returns the reason why a database cannot compile a query; None if the query compiles.

    The query is not run. Only for trusted files.

    Args:
        file: The database.
        sql: The query.
    """
    try:
        connection = query.connect(str(file.resolve()), COMPILE_S)
        try:
            connection.execute(query.EXPLAIN + query.EMPTY_STATEMENTS.sub("", sql, count=1))
        finally:
            connection.close()
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        return str(error)
    return None


def schema(file: Path, max_characters: int) -> str:
    """Returns the statements that create a database's tables, a line each, with `;` between them; "" without tables. A
    longer text is cut to `max_characters`, and ` …` is added. Only for trusted files.

    Raises:
        OSError: The file is no database.
        sqlite3.OperationalError: The file cannot be opened.
        UserError: The database has a write-ahead log (`refuse_unmerged`).
    """
    refuse_unmerged(file)
    connection = sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)
    try:
        statements = connection.execute(
            "SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
        ).fetchall()
    except sqlite3.DatabaseError as error:
        raise OSError(0, str(error)) from error
    finally:
        connection.close()
    text = ";\n".join(" ".join(statement.split()) for (statement,) in statements)
    return text if len(text) <= max_characters else text[:max_characters] + " …"
