"""Vocabulary of user texts: the field's words, as used in searches."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import ROOT

WORDS = {
    "mend": "fix",
    "mends": "fixes",
    "anew": "again, new",
    "cargo": "bucket",
    "itinerary": "program",
    "seat": "place",
    "seats": "places",
    "seated": "placed",
    "nobody answers": "no response",
    "the first cause": "the root cause",
    "by custom": "by convention",
    "whereabouts": "place",
    "betimes": "early",
    "hitherto": "until now",
    "thence": "from there",
    "whence": "from where",
}
"""Words forbidden in user texts, and the field's words."""

PATTERN = re.compile(r"\b(" + "|".join(map(re.escape, WORDS)) + r")\b", re.IGNORECASE)
NOT_OURS = {"skyrl_mega/envs/math/units.py"}
"""Files with lists of words from mathematics problems."""


def documents() -> Iterator[Path]:
    """Yields all files for users except programs."""
    yield ROOT / "README.md"
    for folder in ("docs", "configs", "slurm", "launch", "docker"):
        yield from (p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix != ".pyc")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yields the strings of a program with their lines: messages, help, docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def wrong(text: str) -> list[str]:
    """Returns the forbidden words in a text; backticks mark names."""
    return [word.lower() for word in PATTERN.findall(re.sub(r"`[^`\n]*`", "", text))]


def test_documents_use_the_fields_words() -> None:
    places = [f"{p.relative_to(ROOT)}: {word}" for p in documents() for word in wrong(p.read_text())]
    assert places == []


def test_messages_and_docstrings_use_the_fields_words() -> None:
    places = []
    for file in sorted((ROOT / "skyrl_mega").rglob("*.py")):
        name = str(file.relative_to(ROOT))
        if name not in NOT_OURS:
            places += [f"{name}:{line}: {word}" for line, text in texts(file.read_text()) for word in wrong(text)]
    assert places == []


def test_planted_words_are_found() -> None:
    assert wrong("The first cause: nobody answers; give the `seat` anew.") == [
        "the first cause",
        "nobody answers",
        "anew",
    ]
    assert [w for _, text in texts('raise E(f"mend {x}")') for w in wrong(text)] == ["mend"]


SAME_NAME = {"BaseTextEnv", "BaseTextEnvStepOutput"}
"""Names given by another program: `envs/skyrl_gym.py` stands in for SkyRL's own package."""


def test_a_class_name_has_one_meaning() -> None:
    """Checks that no two classes of the package share a name, so that a search leads to one place."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "skyrl_mega").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: at for name, at in places.items() if len(at) > 1 and name not in SAME_NAME} == {}
