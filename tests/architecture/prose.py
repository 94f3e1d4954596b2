"""Measures how prose reads: indirect words per 1,000 words, and the share of texts that open without a subject.

`python -m tests.architecture.prose` prints the figures of docstrings, messages and pages, with the worst docstrings.
A figure inside the band does not prove good prose. One far outside it shows that readers will struggle.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.architecture.source import PACKAGE, ROOT

RATES = {
    "that, which, who": "that which who whose whom",
    "one, those, it, they": "one ones those others it they them its their",
    "where, what, whether": "where what whether",
    "has, have, had": "has have had",
}
"""Groups of indirect words, used in place of a noun or a verb."""
PREPOSITIONS = "of to for by as with in nor also not from between beside"
PRONOUNS = (
    "it they those one nobody whoever who what whether where how all others some none its their these this so such "
    "more another"
)
BAND = {
    "that, which, who": 9.5,
    "one, those, it, they": 13.5,
    "where, what, whether": 3.5,
    "has, have, had": 3.5,
    "opens with a preposition": 2.0,
    "opens with a pronoun": 4.0,
}
"""The highest figures of docstrings in nine well-known projects, rounded up: prime-rl, slime, SkyRL, torchtitan,
nanochat, verl, vLLM v1, Ray Serve and Megatron-core (August 2026). Per 1,000 words; openings in percent of texts."""
SENTENCE = 4
"""The lowest number of words of a message."""


class Text(NamedTuple):
    """A docstring, a message or a paragraph."""

    place: str
    """File and line."""
    text: str


def docstrings(source: str, file: str = "") -> Iterator[Text]:
    """Yields the docstrings of modules, classes and functions, and the strings below assignments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module) and (
            text := ast.get_docstring(node)
        ):
            yield Text(f"{file}:{getattr(node, 'lineno', 1)}", text)
        if isinstance(node, ast.ClassDef | ast.Module):
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, ast.Assign | ast.AnnAssign) and (text := _string(after)):
                    yield Text(f"{file}:{after.lineno}", text)


def messages(source: str, file: str = "") -> Iterator[Text]:
    """Yields the string constants of at least four words, except docstrings, without placeholders."""
    tree = ast.parse(source)
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = " ".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare | inner:
            text = node.value
        if len(re.findall(r"[A-Za-z']+ ", text)) >= SENTENCE:
            yield Text(f"{file}:{getattr(node, 'lineno', 1)}", text)


def paragraphs(page: str, file: str = "") -> Iterator[Text]:
    """Yields the paragraphs and table cells of a Markdown page, without code blocks and headings."""
    prose = re.sub(r"^```.*?^```|^    .*?$|^#.*?$", "", page, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n\||(?<=\S) \| ", prose):
        text = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", " ", block, flags=re.DOTALL).strip(" |\n-*")
        if len(text.split()) >= SENTENCE:
            yield Text(file, text)


def figures(texts: Iterable[Text]) -> dict[str, float]:
    """Returns the figures of `BAND` for these texts."""
    texts = list(texts)
    words = re.findall(r"[a-z']+", " ".join(text.text for text in texts).lower())
    out = {
        name: 1000 * sum(word in group.split() for word in words) / max(1, len(words)) for name, group in RATES.items()
    }
    openings = [_opening(text.text) for text in texts]
    for name, group in (("preposition", PREPOSITIONS), ("pronoun", PRONOUNS)):
        out[f"opens with a {name}"] = 100 * sum(word in group.split() for word in openings) / max(1, len(texts))
    return out


def outside(texts: Iterable[Text], band: dict[str, float] | None = None) -> dict[str, float]:
    """Returns the figures outside the band."""
    limits = band or BAND
    return {name: round(value, 1) for name, value in figures(texts).items() if value > limits[name]}


def of_files(folder: Path, reader: str) -> list[Text]:
    """Returns the texts of a tree: `docstrings` or `messages` of Python files, `paragraphs` of pages."""
    read = {"docstrings": docstrings, "messages": messages, "paragraphs": paragraphs}[reader]
    files = sorted(folder.rglob("*.md" if reader == "paragraphs" else "*.py"))
    return [text for file in files for text in read(file.read_text(), str(file.relative_to(ROOT)))]


def _string(node: ast.AST) -> str:
    constant = node.value if isinstance(node, ast.Expr) else None
    return constant.value if isinstance(constant, ast.Constant) and isinstance(constant.value, str) else ""


def _opening(text: str) -> str:
    match = re.match(r"[\W_]*([A-Za-z']+)", text)
    return match[1].lower() if match else ""


def _table() -> Iterator[str]:
    kinds = [(PACKAGE, "docstrings"), (PACKAGE, "messages"), ("tests", "docstrings"), ("benchmarks", "docstrings")]
    yield f"{'':28}" + "".join(f"{name.removeprefix('opens with a '):>22}" for name in BAND)
    yield f"{'at most':28}" + "".join(f"{value:22.1f}" for value in BAND.values())
    for folder, reader in [*kinds, ("docs", "paragraphs")]:
        yield f"{f'{folder} {reader}':28}" + "".join(
            f"{value:22.1f}" for value in figures(of_files(ROOT / folder, reader)).values()
        )


if __name__ == "__main__":
    for line in _table():
        sys.stdout.write(f"{line}\n")
