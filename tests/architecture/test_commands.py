"""Commands and paths in README and docs: each must exist."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SELF_MADE = re.compile(r"[*…<>{}$]|^runs/|^data/|\bmy_|\bmine\b|NAME|^/")
"""Paths filled in or created by the reader."""


def commands(text: str) -> dict[str, set[str]]:
    """Returns the modules, make targets and files named by a text's commands."""
    return {
        "module": set(re.findall(r"python3? -m ((?:skyrl_mega|benchmarks|tests)[\w.]*\w)", text)),
        "make": set(re.findall(r"(?:^|`| )make ([a-z0-9-]+)\b(?=[`\s\[(:,;.])", text, re.MULTILINE))
        - {"it", "a", "the", "no"},
        "file": {
            path
            for path in re.findall(r"(?<![\w/.-])((?:configs|slurm|launch|docker|docs)/[\w./-]+\.\w+)", text)
            if not SELF_MADE.search(path)
        },
        "link": set(re.findall(r"\]\((?!https?:)([^)#\s]+)", text)),
    }


def targets() -> set[str]:
    """Returns the targets of the Makefile."""
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def dead(text: str, folder: Path) -> list[str]:
    """Returns the missing names of a page at `folder`."""
    named = commands(text)
    wrong = [f"python -m {m}" for m in sorted(named["module"]) if not runs(m)]
    wrong += [f"make {t}" for t in sorted(named["make"] - targets())]
    wrong += [path for path in sorted(named["file"]) if not (ROOT / path).exists()]
    return wrong + [f"link to {link}" for link in sorted(named["link"]) if not (folder / link).exists()]


def runs(module: str) -> bool:
    """Returns True if `python -m` finds the module."""
    try:
        spec = find_spec(module)
        return spec is not None and (not spec.submodule_search_locations or find_spec(f"{module}.__main__") is not None)
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    assert dead(page.read_text(), page.parent) == []


def test_planted_dead_ends_are_found() -> None:
    text = "python -m skyrl_mega.rollout.show\n`make nothing`\nconfigs/no.yaml and [x](no.md)"
    assert dead(text, ROOT / "docs") == [
        "python -m skyrl_mega.rollout.show",
        "make nothing",
        "configs/no.yaml",
        "link to no.md",
    ]
