"""A small corpus of plain facts, with questions that need two passages for the answer.

A capital's passage names the country; a country's passage names the currency, language and continent; a river's passage
names the capitals on the river. So "What is the currency of the country whose capital is Budapest?" leads from the
first passage to the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("facts.txt")
"""Rows of facts, with `|` between the fields of `Country`; empty fields are not asked about."""


@dataclass(frozen=True)
class Country:
    """A row of the table; empty fields are not asked about."""

    name: str
    capital: str
    river: str
    currency: str
    language: str
    continent: str

    @property
    def name_in_sentence(self) -> str:
        """Name within a sentence, with the article if usual: `the United States`."""
        return f"the {self.name}" if self.name.startswith(("United", "Democratic")) else self.name

    @property
    def passage(self) -> str:
        """Text of the country's passage, without the name of the capital."""
        language = f" Its official language is {self.language}." if self.language else ""
        text = (
            f"{self.name_in_sentence} is a country in {self.continent}. Its currency is the {self.currency}.{language}"
        )
        return text[0].upper() + text[1:]

    @property
    def capital_passage(self) -> str:
        """Text of the capital's passage, without further facts about the country."""
        return f"{self.capital} is the capital of {self.name_in_sentence}."


@dataclass(frozen=True)
class FactQuestion:
    """A question and the two passages that answer the question."""

    text: str
    answers: tuple[str, ...]
    """Right answers, each sufficient."""
    chain: tuple[str, str]
    """Titles of the passages, in the order that leads to the answer."""
    country: str
    """Name of the country asked about."""


def countries() -> list[Country]:
    """Reads and returns all rows of `TABLE`."""
    _, *rows = TABLE.read_text(encoding="utf-8").splitlines()
    return [Country(*row.split("|")) for row in rows]


def passages() -> dict[str, str]:
    """Returns title → text of the passages about all countries, capitals and rivers of the table."""
    texts, capitals = {}, defaultdict(list)
    for c in countries():
        texts[c.name], texts[c.capital] = c.passage, c.capital_passage
        if c.river:
            capitals[c.river].append(c.capital)
    for river, cities in capitals.items():
        title = river_title(river)
        texts[title] = " ".join(f"{city} lies on the {river}." for city in cities)
    return texts


def river_title(river: str) -> str:
    """Returns a river's title, different from all names of countries (the Niger)."""
    return river if river.startswith("Río") or river.endswith("River") else f"{river} River"


def questions(subjects: Iterable[Country]) -> Iterator[FactQuestion]:
    """Yields two to four questions about each of the countries `subjects`, country by country."""
    for c in subjects:
        whose = f"the country whose capital is {c.capital}"
        chain = (c.capital, c.name)
        yield FactQuestion(f"What is the currency of {whose}?", (c.currency,), chain, c.name)
        yield FactQuestion(f"On which continent is {whose}?", (c.continent,), chain, c.name)
        if c.language:
            yield FactQuestion(f"What is the official language of {whose}?", (c.language,), chain, c.name)
        if c.river:
            title = river_title(c.river)
            answers = tuple(dict.fromkeys((c.river, title)))
            text = f"On which river does the capital of {c.name_in_sentence} lie?"
            yield FactQuestion(text, answers, (c.capital, title), c.name)
