"""A few small databases, made by rule, with questions of which each has one query as its answer."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from skyrl_mega.cluster.whole import refuse_file

THEMES = {
    "library": ("book", "title", "genre", ("history", "poetry", "science", "travel"), "pages", (40, 900)),
    "garden": ("plant", "name", "colour", ("red", "white", "yellow", "violet"), "height_cm", (5, 300)),
    "harbour": ("ship", "name", "flag", ("Malta", "Norway", "Panama", "Japan"), "tonnage", (500, 90000)),
    "kitchen": ("dish", "name", "cuisine", ("Greek", "Indian", "Mexican", "Thai"), "minutes", (5, 240)),
    "museum": ("painting", "title", "style", ("baroque", "cubist", "gothic", "modern"), "year", (1400, 1990)),
    "airport": ("flight", "code", "airline", ("Aer", "Condor", "Finnair", "Swiss"), "distance_km", (100, 9000)),
    "school": ("pupil", "name", "house", ("east", "north", "south", "west"), "score", (0, 100)),
    "zoo": ("animal", "name", "enclosure", ("aviary", "aquarium", "forest", "savanna"), "weight_kg", (1, 4000)),
}
"""Database → table, its label, its group with values, its number with a range."""

HELD_OUT = ("museum", "zoo")
"""Databases whose questions are for testing: none of their tables is seen in training."""

ROWS = 40
_ID = b"skyr"
"""The application's ID in the header of a database."""
_CHANGES = 3
"""How often `write` has changed a database, by its header."""


class Question(NamedTuple):
    """A question to one of the databases, and the query that answers it."""

    db_id: str
    question: str
    query: str


def write(folder: Path, seed: int) -> None:
    """Makes `<folder>/<name>/<name>.sqlite` for every theme, a few KB each."""
    for place, (name, (table, label, group, groups, number, (low, high))) in enumerate(THEMES.items()):
        rng = np.random.default_rng([seed, place])
        file = folder / name / f"{name}.sqlite"
        file.parent.mkdir(parents=True, exist_ok=True)
        refuse_file(file, "--output", _is_ours)
        file.unlink(missing_ok=True)
        numbers = rng.choice(np.arange(low, high + 1), ROWS, replace=False).tolist()  # no ties
        rows = [(i, f"{table}-{i:02d}", groups[int(rng.integers(len(groups)))], n) for i, n in enumerate(numbers, 1)]
        connection = sqlite3.connect(file)
        connection.execute(f"PRAGMA application_id = {int.from_bytes(_ID)}")
        connection.execute(
            f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {label} TEXT, {group} TEXT, {number} INTEGER)"
        )
        connection.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", rows)
        connection.commit()
        connection.close()


def _is_ours(file: Path) -> bool:
    """True for a database that `write` made, and that nobody has written to since (sqlite.org/fileformat.html)."""
    with file.open("rb") as opened:
        head = opened.read(100)
    return head[68:72] == _ID and int.from_bytes(head[24:28]) == _CHANGES


def questions(name: str) -> Iterator[Question]:
    """Every question about one database."""
    table, label, group, groups, number, (low, high) = THEMES[name]
    yield Question(name, f"How many {table}s are there?", f"SELECT count(*) FROM {table}")
    for word, function in (("average", "avg"), ("largest", "max"), ("smallest", "min"), ("total", "sum")):
        yield Question(name, f"What is the {word} {number}?", f"SELECT {function}({number}) FROM {table}")
        yield Question(
            name,
            f"What is the {word} {number} for each {group}?",
            f"SELECT {group}, {function}({number}) FROM {table} GROUP BY {group}",
        )
        for value in groups:
            yield Question(
                name,
                f"What is the {word} {number} where the {group} is {value}?",
                f"SELECT {function}({number}) FROM {table} WHERE {group} = '{value}'",
            )
    for value in groups:
        yield Question(
            name,
            f"List the {label} of every {table} whose {group} is {value}.",
            f"SELECT {label} FROM {table} WHERE {group} = '{value}'",
        )
    for word, order in (("largest", "DESC"), ("smallest", "ASC")):
        yield Question(
            name,
            f"Which {table} has the {word} {number}? Give its {label}.",
            f"SELECT {label} FROM {table} ORDER BY {number} {order} LIMIT 1",
        )
    for share in (0.2, 0.4, 0.6, 0.8):
        bound = int(low + share * (high - low))
        yield Question(
            name,
            f"How many {table}s have a {number} above {bound}?",
            f"SELECT count(*) FROM {table} WHERE {number} > {bound}",
        )
