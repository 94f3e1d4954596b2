"""Script running SQL from stdin read-only and printing the results. Standard library only; runs in the sandbox.

stdin: JSON with `database` (path), `queries` (one, or prediction and gold), `seconds`, `rows` (rows read at most),
`shown` (rows printed at most), `width` (characters of a printed value), `compare` (`set` or `rows`), `ordered` (true if
the gold query orders its rows).
stdout: a line of JSON per query (`columns`, `rows`, `count` or `error`), then `differ`: the reason why two results
differ, or null. If the database cannot be read: a line with `unread`, the reason, and nothing after it.
A query exceeding `seconds` is interrupted. During a single long instruction the kernel ends this process instead; the
missing output lines identify the query.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

ALLOWED = {
    getattr(sqlite3, name)
    for name in ("SQLITE_SELECT", "SQLITE_READ", "SQLITE_FUNCTION", "SQLITE_RECURSIVE")
    if hasattr(sqlite3, name)
}
REFUSED_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
PRAGMAS = {"table_info", "table_xinfo", "table_list", "foreign_key_list", "index_list", "index_info"}
"""Pragmas describing the schema; whatever the arguments, none writes anything."""

TABLES = ("json_each", "json_tree")
"""Table-valued functions without side effects."""

LONGEST_SQL, LARGEST_VALUE = 100_000, 16 * 2**20
"""Maximum bytes of a query, and of a value or a row."""

EXPLAIN = "EXPLAIN "
EMPTY_STATEMENTS = re.compile(r"(?:[ \t\r\n\f;]|--[^\n]*|/\*.*?\*/)*", re.DOTALL)
"""Text allowed before a query, but not between `EXPLAIN` and the query: empty statements, and comments."""

GRACE_S = 0.25
"""Seconds for a query to notice the time limit before the kernel ends the process."""

MAX_COLUMN_ORDERS = 1000
"""Maximum number of column orders to try."""

Row = tuple[Any, ...]


DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
"""Errors of SQLite about the file, which no query causes. Errors of input and output are missing here, because SQLite
gives one of them for a lack of memory too."""


@dataclass(frozen=True)
class Result:
    """Result of a successful query, with all rows."""

    columns: list[str]
    rows: list[Row]
    tables: frozenset[str]
    """Tables of the database read by the query, also through views and subqueries; virtual tables are excluded."""


def main() -> None:
    """Runs the queries of the JSON request on standard input.

    Prints a line of JSON for each result, and a line with the reason if two results differ (null if equal). If the
    database cannot be read, prints a line with the reason and ends.
    """
    request = json.load(sys.stdin)
    results = []
    for sql in request["queries"]:
        # A new connection per query: no query sees side effects of another.
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + GRACE_S)
        try:
            result = run(request, sql)
        except sqlite3.DatabaseError as error:
            print(json.dumps({"unread": str(error)}), flush=True)
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        results.append(result)
        print(json.dumps(_printable(request, result)), flush=True)
    if len(results) == 2:
        ours, gold = results
        signal.setitimer(signal.ITIMER_REAL, request["seconds"] + GRACE_S)
        print(json.dumps({"differ": differ(ours, gold, request["compare"], request["ordered"])}))


def differ(ours: Result | str, gold: Result | str, compare: str, ordered: bool) -> str | None:
    """Returns the reason why a solution's result differs from the gold result; None if equal.

    A query that reads no table does not answer a question whose gold query reads a table, whatever the result. If gold
    returns no rows, any empty result is equal, so the query must also read all tables that gold reads.

    Args:
        ours: Result of the solution; a text after an error.
        gold: Result of the gold query; a text after an error.
        compare: `set`, as SkyRL-SQL: neither order nor duplicates count. `rows`, as Spider's test suite: duplicates
            count, order too if gold is `ordered`, and columns may be permuted.
        ordered: True if the gold query orders its rows.
    """
    if isinstance(ours, str) or isinstance(gold, str):
        return "a query failed"
    if len(ours.columns) != len(gold.columns):
        return f"it has {len(ours.columns)} columns, and the gold query's result has {len(gold.columns)}"
    if gold.tables and not ours.tables:
        return "it reads no table"
    if not gold.rows and not gold.tables <= ours.tables:
        return f"no rows are to be returned, and it does not read {', '.join(sorted(gold.tables - ours.tables))}"
    return None if _equal(ours.rows, gold.rows, compare, ordered) else "the rows are others"


def _equal(ours: list[Row], gold: list[Row], compare: str, ordered: bool) -> bool:
    if compare == "set":
        return frozenset(ours) == frozenset(gold)
    if len(ours) != len(gold):
        return False
    return not gold or any(_same_rows(ours, gold, order, ordered) for order in _column_orders(ours, gold))


def _same_rows(ours: list[Row], gold: list[Row], order: tuple[int, ...], ordered: bool) -> bool:
    moved = [tuple(row[at] for at in order) for row in ours]
    return moved == gold if ordered else Counter(moved) == Counter(gold)


def _column_orders(ours: list[Row], gold: list[Row]) -> Iterator[tuple[int, ...]]:
    """Yields orders of our columns with the same values per column as gold, at most `MAX_COLUMN_ORDERS`."""
    our_columns = [Counter(column) for column in zip(*ours, strict=True)]
    gold_columns = [Counter(column) for column in zip(*gold, strict=True)]
    candidates = [
        [at for at, column in enumerate(our_columns) if column == gold_column] for gold_column in gold_columns
    ]

    def orders(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == len(candidates):
            yield chosen
            return
        for at in candidates[len(chosen)]:
            if at not in chosen:
                yield from orders((*chosen, at))

    return itertools.islice(orders(()), MAX_COLUMN_ORDERS)


def run(request: dict[str, Any], sql: str) -> Result | str:
    """Runs a query on a new connection; returns its result, or a text with the error.

    Args:
        request: `database` (the file), `seconds` (time limit) and `rows` (maximum number of rows).
        sql: The query.

    Raises:
        sqlite3.DatabaseError: The file cannot be opened, is no database, or is damaged.
    """
    connection = connect(request["database"], request["seconds"])
    try:
        cursor = connection.execute(sql)
        if cursor.description is None:
            return "it is no query: it has no columns"
        columns = [column[0] for column in cursor.description]
        rows = cursor.fetchmany(request["rows"] + 1)
        tables = _tables_read(connection, sql)
    except sqlite3.OperationalError as error:
        timed_out = str(error) == "interrupted"
        return f"timeout: it ran longer than {request['seconds']:g} s" if timed_out else str(error)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGED:  # the other bits tell kinds of one error apart
            raise
        return str(error)
    except MemoryError:
        return "it needs more memory than a query may have"
    finally:
        connection.close()
    if len(rows) > request["rows"]:
        return f"it returns more than {request['rows']} rows"
    return Result(columns, rows, tables)


def _printable(request: dict[str, Any], result: Result | str) -> dict[str, Any]:
    """Returns a result in printable form."""
    if isinstance(result, str):
        return {"error": result}
    width = request["width"]
    rows = [[_short(value, width) for value in row] for row in result.rows[: request["shown"]]]
    return {"columns": [_short(c, width) for c in result.columns], "rows": rows, "count": len(result.rows)}


def _tables_read(connection: sqlite3.Connection, sql: str) -> frozenset[str]:
    """Returns the tables opened by a query's program, identified by the first pages of tables and indices.

    The authorizer does not suffice: a table used only by `USING` or `NATURAL` is not reported, and a subquery with a
    table's name is reported as the table.
    """
    pages = dict(connection.execute("SELECT rootpage, tbl_name FROM sqlite_master"))
    program = connection.execute(EXPLAIN + EMPTY_STATEMENTS.sub("", sql, count=1))
    return frozenset(pages[page] for _, name, _, page, *_ in program if name == "OpenRead" and page in pages)


def connect(database: str, seconds: float) -> sqlite3.Connection:
    """Opens and returns a read-only connection to the file `database`, on which only statements for reading are
    allowed; the caller closes it.

    Statements are interrupted `seconds` seconds after this call.

    Raises:
        sqlite3.OperationalError: The file cannot be opened.
    """
    connection = sqlite3.connect(f"file:{quote(database)}?mode=ro&immutable=1", uri=True, isolation_level=None)
    connection.text_factory = lambda data: data.decode(errors="surrogateescape")  # distinct broken texts stay distinct
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, len(EXPLAIN) + LONGEST_SQL)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA trusted_schema = OFF")
    for function in TABLES:  # created before the authorizer, which refuses the declaration of a virtual table
        with contextlib.suppress(sqlite3.Error):  # missing in this SQLite; the query itself reports a broken file
            connection.execute(f"SELECT 1 FROM {function}('[]')").fetchall()
    connection.set_authorizer(_authorize)
    deadline = time.monotonic() + seconds
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
    return connection


def _authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in REFUSED_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in PRAGMAS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


def _short(value: Any, width: int) -> str:
    text = "NULL" if value is None else f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)
    text = text[:width] + "…" if len(text) > width else text
    return text.encode(errors="surrogateescape").decode(errors="replace")


if __name__ == "__main__":
    main()
