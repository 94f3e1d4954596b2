"""The tables of docs/migration.md, generated from `table.yaml`."""

from __future__ import annotations

from skyrl_mega.config.other_programs.table import Counterpart, Table, programs

MARK = "<!-- What follows is made by `python -m skyrl_mega.config.other_programs docs/migration.md`. -->"


def tables() -> str:
    """Returns Markdown with two tables per program: keys with a counterpart here, and keys without, grouped by note."""
    return (
        "\n".join(line for program, table in programs().items() for line in ("", f"## {program}", "", *_rows(table)))
        + "\n"
    )


def renewed(page: str) -> str:
    """Returns the page's text with everything after `MARK` generated again; a page without `MARK` is unchanged."""
    top, mark, _ = page.partition(MARK)
    return f"{top}{MARK}\n{tables()}" if mark else page


def _rows(table: Table) -> list[str]:
    rows = [f"| {_code(key)} | {_cell(entry)} |" for key, entry in table.items() if entry.here or entry.values]
    without: dict[str, list[str]] = {}
    for key, entry in table.items():
        if not entry.here and not entry.values:
            without.setdefault(entry.note, []).append(_code(key))
    return [
        "| there | here |",
        "|---|---|",
        *rows,
        "",
        "| there, and not here | what to do |",
        "|---|---|",
        *(f"| {', '.join(keys)} | {note} |" for note, keys in without.items()),
    ]


def _cell(entry: Counterpart) -> str:
    values = (f"{_code(value)}: {_told(by_value)}" for value, by_value in entry.values.items())
    return "; ".join((_told(entry), *values))


def _told(entry: Counterpart) -> str:
    here = ", ".join(map(_code, entry.here))
    return f"{here} ({entry.note})" if here and entry.note else here or f"none ({entry.note})"


def _code(key: str) -> str:
    return f"`{key}`"
