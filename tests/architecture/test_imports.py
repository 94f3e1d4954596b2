"""Imports between packages: only from packages above in the table of docs/architecture.md, and never in a circle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from tests.architecture.source import ROOT, imported_modules, imports, modules


def package_order() -> list[str]:
    """Returns the table's packages, the lowest layer first."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split("| package |")[1].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)/`", table, re.MULTILINE)


def upward(sources: Mapping[str, str], order: list[str]) -> list[str]:
    """Returns the imports from a package below or outside the table. `__main__`, the entry of a command, is exempt."""
    wrong = []
    for name, imported in imports(sources).items():
        package = name.split(".")[0]
        if not package or name.endswith("__main__"):
            continue
        for other in sorted(imported):
            target = other.split(".")[0]
            if target and target != package and not (target in order and order.index(target) < order.index(package)):
                wrong.append(f"{name} imports {other}")
    return wrong


def circle(sources: Mapping[str, str]) -> list[str]:
    """Returns a circle of files, or an empty list."""
    packages = {name for name in sources if any(other.startswith(f"{name}.") for other in sources)}
    graph = {name: {o for o in others if o not in packages} for name, others in imports(sources).items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def missing(texts: Mapping[str, str], sources: Mapping[str, str]) -> list[str]:
    """Returns the imports of modules outside of `sources` and of `kernels`, the folder beside the package."""
    found = {name: {*imported_modules(name, text, sources)} - {*sources} for name, text in texts.items()}
    pairs = [(name, other) for name, others in found.items() for other in sorted(others)]
    return [f"{name} imports {other}" for name, other in pairs if other.split(".")[0] != "kernels"]


def test_every_package_is_in_the_table_once() -> None:
    order = package_order()
    packages = {name.split(".")[0] for name in modules()} - {""}
    assert len(order) == len(set(order))
    assert packages | {"kernels"} == set(order)


def test_packages_import_only_from_packages_above_them() -> None:
    assert upward(modules(), package_order()) == []


def test_no_files_import_in_a_circle() -> None:
    assert circle(modules()) == []


def test_a_planted_import_from_a_package_below_is_found() -> None:
    sources = modules()
    sources["config.checks"] += "\n\ndef late() -> None:\n    from skyrl_mega.trainer.loop import train\n"
    assert upward(sources, package_order()) == ["config.checks imports trainer.loop"]


def test_a_planted_circle_is_found() -> None:
    sources = modules()
    sources["trainer.step"] += "\nfrom skyrl_mega.trainer.loop import train\n"
    assert {"trainer.step", "trainer.loop"} <= set(circle(sources))


def early_rays(sources: Mapping[str, str]) -> list[str]:
    """Returns the files that import Ray when they are loaded, and so perhaps before `skyrl_mega.cluster`."""
    return [name for name, text in sources.items() if re.search(r"^(import|from) ray\b", text, re.MULTILINE)]


def test_no_file_imports_ray_before_the_settings_of_a_private_cluster() -> None:
    assert early_rays(modules()) == []


def test_a_planted_early_import_of_ray_is_found() -> None:
    sources = modules()
    sources["batch.samples"] = "import ray\n" + sources["batch.samples"]
    assert early_rays(sources) == ["batch.samples"]


ALONE, PROJECT = "envs.math", {"envs.math.env", "envs.math.data"}
"""A folder that is used without the project too (its README.md), and the files that do import the project."""


def outside(sources: Mapping[str, str]) -> list[str]:
    """Returns the imports of `ALONE` from elsewhere in the project."""
    files = {name: of for name, of in imports(sources).items() if name.startswith(f"{ALONE}.") and name not in PROJECT}
    return [
        f"{name} imports {other}"
        for name, imported in files.items()
        for other in sorted(imported)
        if other in PROJECT or not f"{other}.".startswith(f"{ALONE}.")
    ]


def test_the_check_of_mathematics_needs_nothing_of_the_project() -> None:
    assert outside(modules()) == []
    assert "envs.math.reading" in imports(modules())["envs.math.check"], "imports by a relative name are seen"


def test_a_planted_import_of_the_project_is_found() -> None:
    sources = modules()
    sources["envs.math.forms"] += "\nfrom skyrl_mega.common.errors import UserError\nfrom ..tags import first_tag\n"
    assert outside(sources) == ["envs.math.forms imports common.errors", "envs.math.forms imports envs.tags"]


def test_every_imported_module_exists() -> None:
    sources = modules()
    files = [file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    assert missing(sources, sources) + missing({str(file): file.read_text() for file in files}, sources) == []


def test_a_planted_import_of_a_missing_module_is_found() -> None:
    planted = {"trainer.step": "from skyrl_mega.trainer.lop import train\n"}
    assert missing(planted, modules()) == ["trainer.step imports trainer.lop"]
