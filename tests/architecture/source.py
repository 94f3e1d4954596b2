"""The input of the architecture tests: the package's modules as text, and the imports of each module."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "skyrl_mega"


def modules(root: Path = ROOT) -> dict[str, str]:
    """Returns the text of every module by dotted name, without `skyrl_mega.`; "" is the package itself."""
    out = {}
    for file in sorted((root / PACKAGE).rglob("*.py")):
        name = ".".join(file.relative_to(root / PACKAGE).with_suffix("").parts)
        out[name.removesuffix("__init__").rstrip(".")] = file.read_text()
    return out


def imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Returns the modules imported by each module, anywhere in its text, by the names of `modules`."""
    return {name: set(imported_modules(name, text, sources)) for name, text in sources.items()}


def imported_modules(name: str, text: str, sources: Mapping[str, str]) -> Iterator[str]:
    """Yields the modules of the package imported by the text of module `name`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (base := _base(name, node, sources)) is not None:
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                yield full if full in sources else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(f"{PACKAGE}."):
                    yield alias.name.removeprefix(f"{PACKAGE}.")


def _base(name: str, node: ast.ImportFrom, sources: Mapping[str, str]) -> str | None:
    """Returns the module that a `from` statement names, by the names of `modules`; None outside the package."""
    if node.level:
        is_package = any(other.startswith(f"{name}.") for other in sources)
        folder = name.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
        return ".".join([*folder, *filter(None, [node.module])])
    top, _, rest = (node.module or "").partition(".")
    return rest if top == PACKAGE else None
