"""Language of docstrings: figures like in well-known projects (CONTRIBUTING.md lists the rules)."""

from __future__ import annotations

from tests.architecture.prose import Text, docstrings, messages, of_files, outside, paragraphs
from tests.architecture.source import PACKAGE, ROOT


def test_docstrings_of_the_package_are_inside_the_band() -> None:
    assert outside(of_files(ROOT / PACKAGE, "docstrings")) == {}, "python -m tests.architecture.prose shows all figures"


def test_planted_prose_is_outside_the_band() -> None:
    planted = '''
def lost(self):
    """Of those that it has, the one that nobody else had, where there is one."""

LEFT = 3
"""What is left of it."""
'''
    assert set(outside(docstrings(planted))) >= {"that, which, who", "one, those, it, they", "opens with a preposition"}
    good = [Text("", "Returns the restarts of an engine. Raises ActorFailed if the budget is used up.")]
    assert outside(good) == {}


def test_messages_and_paragraphs_are_found() -> None:
    source = '"""Module."""\nraise E(f"engine {n} did not answer within {s} seconds")\nx = "two words"\n'
    assert [text.text for text in messages(source)] == ["engine   did not answer within   seconds"]
    page = (
        "# Title\n\nA first paragraph of words.\n\n```\ncode that is none of it\n```\n| a cell with four words | b |\n"
    )
    assert [text.text for text in paragraphs(page)] == ["A first paragraph of words.", "a cell with four words"]
