"""The functions of test files that are certainly required tests, by the names in a report."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from skyrl_mega.envs.swe.canaries import AnyFunction, Function, TestSource


def required_functions(sources: Iterable[TestSource], names: Collection[str], report: str) -> set[Function]:
    """Returns the functions named by the required tests; an empty set if no name is clear.

    A name of several functions is left out: only one of them is required, and a failure of another would go unnoticed.

    Args:
        sources: The test files.
        names: Names of the required tests.
        report: Format of the names, a key of `reports.REPORTS` other than `exit`.
    """
    full, ends, docs = (defaultdict[Sequence[str], set[Function]](set) for _ in range(3))
    for source in sources:
        path = source.path.removesuffix(".py").split("/")
        for place, function in _places(source):
            words = (*path, *place)
            full[words].add(function)
            for start in range(len(words)):
                ends[words[start:]].add(function)
        for function in source.functions:
            if report in ("unittest", "django") and function.node.name.startswith("test"):
                docs[(ast.get_docstring(function.node) or "").partition("\n")[0].strip()].add(function)
    found = set[Function]()
    for name in map(str.strip, names):
        words = _words(name, report)
        functions = full.get(words) or ends.get(words) or docs.get(name) or set()
        found |= functions if len(functions) == 1 else set()
    return found


def _words(name: str, report: str) -> tuple[str, ...]:
    """Returns the words of a test's name: folders, module, classes and function, as far as the name tells them."""
    if report == "pytest":
        path, *place = name.partition("[")[0].split("::")
        return (*(word for word in path.removesuffix(".py").split("/") if word not in ("", ".", "..")), *place)
    if report == "r2e":
        return tuple(name.partition("[")[0].split("."))
    function, bracket, place_text = name.partition(" (")
    if report == "sympy" or not bracket:
        return tuple(function.split("."))
    words = place_text.partition(")")[0].split(".")
    return tuple(words if words[-1] == function else [*words, function])  # Python 3.11 repeats the function


def _places(source: TestSource) -> Iterator[tuple[tuple[str, ...], Function]]:
    """Yields each function with the names of the classes around and the function's own, also for classes that certainly
    inherit the function from a class of the file."""
    for function in source.functions:
        yield (*function.scope, function.node.name), function
    for place, node in source.classes.items():
        own, ancestors = _defined(node), [*_ancestors(source, node, set())]
        known = ancestors[: ancestors.index(None)] if None in ancestors else ancestors
        for function in source.functions:
            name, definers = function.node.name, [a for a in ancestors if a and function.node.name in _defined(a)]
            if name not in own and len(definers) == 1 and definers[0] in known and function.node in definers[0].body:
                yield (*place, name), function


def _ancestors(source: TestSource, node: ast.ClassDef, seen: set[ast.ClassDef]) -> Iterator[ast.ClassDef | None]:
    """Yields the base classes, and their base classes, in order; None for a class of another file."""
    seen.add(node)
    for base in node.bases:
        name = ast.unparse(base)
        found = source.classes.get((name,))
        if found is not None and found not in seen:
            yield found
            yield from _ancestors(source, found, seen)
        elif name != "object":
            yield None


def _defined(node: ast.ClassDef) -> set[str]:
    return {part.name for part in ast.walk(node) if isinstance(part, AnyFunction)}
