"""Names of packages."""

from __future__ import annotations

import ast
from pathlib import Path

import skyrl_mega

ROOT = Path(skyrl_mega.__file__).parent


def test_no_package_gives_a_function_the_name_of_a_module_of_its_own() -> None:
    """Finds functions named like a module in their package: importing the module would replace the function."""
    clashes = []
    for package in ROOT.rglob("__init__.py"):
        modules = {path.stem for path in package.parent.glob("*.py")}
        modules |= {path.parent.name for path in package.parent.glob("*/__init__.py")}
        tree = ast.parse(package.read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        clashes += [f"{package.parent.relative_to(ROOT)}: {name}" for name in names & modules]
    assert clashes == []
