"""Files and folders named by docs/architecture.md: each must exist."""

from __future__ import annotations

import ast
import re

from tests.architecture.source import PACKAGE, ROOT
from tests.conftest import FIRST, NIGHTLY


def named(text: str) -> set[str]:
    """Returns the paths in backticks (`folder/file.py`, `folder/`), and paths of Python files, diagrams included."""
    names = set(re.findall(r"`([\w./-]+)`", text)) | set(re.findall(r"[\w-]+(?:/[\w-]+)+\.py\b", text))
    return {n for n in names if "/" in n and (n.endswith("/") or re.search(r"\.(py|md|sh|yaml|sbatch)$", n))}


def absent(text: str) -> list[str]:
    """Returns the paths missing below both the package and the repository."""
    made_by_a_run = {"plans/", "checkpoints/", "trajectories/"}
    return sorted(
        n
        for n in named(text) - made_by_a_run
        if not (ROOT / n).exists() and not (ROOT / PACKAGE / n).exists() and not n.startswith("step_")
    )


def test_every_path_of_the_architecture_page_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(named(text)) > 60
    assert absent(text) == []


def test_a_planted_path_is_found() -> None:
    assert absent("`trainer/loop.py` `policy/rank.py` `sizing/`") == ["policy/rank.py", "sizing/"]
    assert absent("  │ data/row.py   reads a row") == ["data/row.py"]


def without_test(names: tuple[str, ...]) -> list[str]:
    """Returns the names of tests (`folder/file.py::test`, cases in brackets) without a file or a function."""
    absent_names = []
    for name in names:
        file, _, test = name.partition("::")
        path = ROOT / "tests" / file
        found = ast.walk(ast.parse(path.read_text())) if path.is_file() else ()
        functions = {node.name for node in found if isinstance(node, ast.FunctionDef)}
        if not path.exists() or (test and test.split("[")[0] not in functions):
            absent_names.append(name)
    return absent_names


def test_every_test_left_to_the_night_is_there() -> None:
    """Checks the lists in tests/conftest.py: a renamed test would run with every change again."""
    assert without_test(NIGHTLY + FIRST) == []
    planted = ("rollout/test_waves.py::test_a", "architecture/test_paths.py::test_a[1]", "nowhere")
    assert without_test(planted) == [*planted]
