"""docs/new-architecture.md quotes the code as it is, and families out of known blocks are as short as it says."""

from __future__ import annotations

import re

import pytest

from skyrl_mega.models.registry import ARCHITECTURES
from tests.architecture.source import PACKAGE, ROOT

GUIDE = (ROOT / "docs" / "new-architecture.md").read_text()
FAMILY, TINY = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
MOST = 150


def test_the_quoted_family_is_the_file() -> None:
    assert (ROOT / PACKAGE / "models" / "families" / "mixtral.py").read_text() == FAMILY


def test_the_quoted_model_is_in_the_sweeps() -> None:
    assert TINY in (ROOT / "tests" / "families" / "models.py").read_text()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_family_is_short(name: str) -> None:
    assert len((ROOT / PACKAGE / "models" / "families" / f"{name}.py").read_text().splitlines()) <= MOST


def test_every_name_in_backticks_exists() -> None:
    """Searches the names of functions, classes and fields of the questions' table."""
    code = "\n".join(path.read_text() for path in (ROOT / PACKAGE / "models").rglob("*.py"))
    table = "\n".join(line for line in GUIDE.splitlines() if line.startswith("|"))
    for name in re.findall(r"`([A-Za-z_.]+)`", table):
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", code), name
