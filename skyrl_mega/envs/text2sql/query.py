"""Reads SQL from stdin, runs it read-only, prints what came back. A script of the standard library, run in the sandbox.

stdin: JSON with `database` (path), `queries` (one, or prediction and gold), `seconds`, `rows` (rows read at most),
`shown` (rows printed at most), `width` (characters of a printed value), `compare` (`set` or `rows`), `ordered` (whether
the gold query orders its rows).
stdout: a line of JSON per query (`columns`, `rows`, `count` or `error`), then `differ`: why two gave different results,
or null.
A query that takes longer than `seconds` ends, in the middle of an instruction where it must be: then the kernel ends
this process, and the lines that are missing say which query it was.
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
"""They describe the schema and write nothing, however they are called."""

TABLES = ("json_each", "json_tree")
"""Table-valued functions that only read."""

LONGEST_SQL, LARGEST_VALUE = 100_000, 16 * 2**20

EXPLAIN = "EXPLAIN "
NOTHING = re.compile(r"(?:[ \t\r\n\f;]|--[^\n]*|/\*.*?\*/)*", re.DOTALL)
"""What may stand before a query, but not between `EXPLAIN` and it: empty statements, and comments."""

GRACE_S = 0.25
"""For a query to notice that its time is up, before it is ended."""

ORDERS = 1000
"""Orders of columns that are tried."""

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Result:
    """What a query that ran gave."""

    columns: list[str]
    rows: list[Row]
    tables: frozenset[str]
    """Those of the database that it reads, through views and subqueries too; virtual ones are not among them."""


def main() -> None:
    """Runs the queries that standard input names; prints their results, and why two of them differ."""
    order = json.load(sys.stdin)
    found = []
    for sql in order["queries"]:
        # Each on a connection of its own: what one leaves behind the other does not meet.
        signal.setitimer(signal.ITIMER_REAL, order["seconds"] + GRACE_S)
        result = run(order, sql)
        signal.setitimer(signal.ITIMER_REAL, 0)
        found.append(result)
        print(json.dumps(_told(order, result)), flush=True)
    if len(found) == 2:
        ours, gold = found
        signal.setitimer(signal.ITIMER_REAL, order["seconds"] + GRACE_S)
        print(json.dumps({"differ": differ(ours, gold, order["compare"], order["ordered"])}))


def differ(ours: Result | str, gold: Result | str, compare: str, ordered: bool) -> str | None:
    """Why a solution's result is not the gold one's; None where it is.

    What reads no table is no answer to a question that gold answers from one, whatever it returns; and where gold
    returns no rows, which are equal to no rows of anything, the tables that are read tell what was asked.

    Args:
        ours: What the solution gave; a text after an error.
        gold: What the gold query gave.
        compare: `set`, as SkyRL-SQL: neither order nor duplicates count. `rows`, as Spider's test suite: duplicates
            count, order too where gold is `ordered`, and columns may stand in another order.
        ordered: Whether the gold query orders its rows.
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
    """Orders of our columns in which each holds the values of the gold one: at most `ORDERS` of them."""
    left = [Counter(column) for column in zip(*ours, strict=True)]
    right = [Counter(column) for column in zip(*gold, strict=True)]
    places = [[at for at, column in enumerate(left) if column == wanted] for wanted in right]

    def orders(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == len(places):
            yield chosen
            return
        for at in places[len(chosen)]:
            if at not in chosen:
                yield from orders((*chosen, at))

    return itertools.islice(orders(()), ORDERS)


def run(order: dict[str, Any], sql: str) -> Result | str:
    """What a query gives; a text when it fails."""
    connection = connect(order["database"], order["seconds"])
    try:
        cursor = connection.execute(sql)
        if cursor.description is None:
            return "it is no query: it has no columns"
        columns = [column[0] for column in cursor.description]
        rows = cursor.fetchmany(order["rows"] + 1)
        tables = _opened(connection, sql)
    except sqlite3.OperationalError as error:
        late = str(error) == "interrupted"
        return f"timeout: it ran longer than {order['seconds']:g} s" if late else str(error)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        return str(error)
    except MemoryError:
        return "it needs more memory than a query may have"
    finally:
        connection.close()
    if len(rows) > order["rows"]:
        return f"it returns more than {order['rows']} rows"
    return Result(columns, rows, tables)


def _told(order: dict[str, Any], result: Result | str) -> dict[str, Any]:
    """What to print of a result."""
    if isinstance(result, str):
        return {"error": result}
    width = order["width"]
    shown = [[_short(value, width) for value in row] for row in result.rows[: order["shown"]]]
    return {"columns": [_short(c, width) for c in result.columns], "rows": shown, "count": len(result.rows)}


def _opened(connection: sqlite3.Connection, sql: str) -> frozenset[str]:
    """The tables that a query's program opens, by the pages where they and their indices begin.

    The authorizer would not do: it is told of a table that only `USING` or `NATURAL` looks into no more than of none,
    and of a subquery that has a table's name as of the table.
    """
    pages = dict(connection.execute("SELECT rootpage, tbl_name FROM sqlite_master"))
    program = connection.execute(EXPLAIN + NOTHING.sub("", sql, count=1))
    return frozenset(pages[page] for _, name, _, page, *_ in program if name == "OpenRead" and page in pages)


def connect(database: str, seconds: float) -> sqlite3.Connection:
    """Read-only, and only for statements that read."""
    connection = sqlite3.connect(f"file:{quote(database)}?mode=ro&immutable=1", uri=True, isolation_level=None)
    connection.text_factory = lambda data: data.decode(errors="surrogateescape")  # two broken texts stay two
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, len(EXPLAIN) + LONGEST_SQL)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA trusted_schema = OFF")
    for function in TABLES:  # made now: a vtable is declared by a statement that the authorizer would refuse
        with contextlib.suppress(sqlite3.Error):  # this SQLite has none; a broken file is told of by the query
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
