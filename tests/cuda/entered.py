"""Recorder of the CUDA branches entered in all processes of a run of tests/cuda.

Every process of the run first imports `recording/sitecustomize.py`. After that, imports of `skyrl_mega` wrap each
branch in a call (`branches.Scan`). If the branch takes CUDA's side, the call writes the branch and the running test
file. The pytest plugin at the end of this module stores the name of the running test file.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tests.cuda.branches import ROOT, Branch, Scan, name_of

FOLDER = "SKYRL_MEGA_ENTERED"
"""Environment variable: folder of the records of a run."""
CURRENT, WANTED = "current", "wanted"
ENOUGH = 100
"""Records per branch, process and test file after which a hot loop stops reading the test file's name."""
_hits: Counter[tuple[str, str, int]] = Counter()


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.get_filename(fullname))
        name, tree = name_of(path), ast.parse(path.read_text())
        if name is not None:
            tree = ast.fix_missing_locations(Scan(name, wrap=True).visit(tree))
        code: CodeType = compile(tree, str(path), "exec", dont_inherit=True)
        return code


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the import spec of a project module with the wrapping loader; None for other modules."""
        if name.split(".")[0] != "skyrl_mega":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install(folder: Path) -> None:
    """Starts recording in this process and its forks."""
    written: set[tuple[str, str, int, str]] = set()

    def saw(where: str, text: str, occurrence: int, cuda: bool | None, value: Any) -> Any:
        key = (where, text, occurrence)
        if _hits[key] < ENOUGH and (cuda is None or bool(value) is cuda):
            _hits[key] += 1
            test = (folder / CURRENT).read_text()
            if (*key, test) not in written:
                written.add((*key, test))
                with (folder / f"{os.getpid()}.tsv").open("a") as file:
                    file.write(_line(Branch(where, text), occurrence, test) + "\n")
        return value

    builtins.__cuda__ = saw  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


def run_tests(
    more: Sequence[str] = (),
    wanted: Mapping[str, Sequence[tuple[Branch, int]]] | None = None,
    timeout: float = 900,
) -> dict[tuple[Branch, int], set[str]]:
    """Runs tests/cuda without test_branches.py, and further tests. Returns the test files by entered occurrence of a
    branch.

    Args:
        more: Test files.
        wanted: Branches to enter, by test file. Tests of a file with all branches entered are skipped, and so are all
            files without an entry. None runs all tests.
        timeout: Seconds.

    Raises:
        RuntimeError: A test failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, tests_folder = Path(name), Path(__file__).parent
        (folder / CURRENT).write_text("")
        if wanted is not None:
            lines = {test: [_line(branch, i, test) for branch, i in every] for test, every in wanted.items()}
            (folder / WANTED).write_text(json.dumps(lines))
        environment = os.environ | {FOLDER: name, "PYTHONPATH": f"{tests_folder / 'recording'}:{ROOT}"}
        options = ["-q", "-m", "not slow", "-p", __name__, "-p", "no:cacheprovider"]
        options += ["--ignore", str(tests_folder / "test_branches.py")]
        options += ["-k", "not what_is_suggested"]  # that test has a limit of CPU time, and the recorder takes CPU time
        command = [sys.executable, "-m", "pytest", str(tests_folder), *more, *options]
        run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
        if run.returncode:
            raise RuntimeError(f"tests fail under the recorder:\n{run.stdout[-4000:]}\n{run.stderr[-2000:]}")
        seen: dict[tuple[Branch, int], set[str]] = defaultdict(set)
        for line in _recorded(folder):
            where, text, occurrence, test = line.split("\t")
            seen[Branch(where, text), int(occurrence)].add(test)
    return dict(seen)


def pytest_runtest_setup(item: Any) -> None:
    """Stores the running test file (pytest hook), and skips the test if the file has entered all wanted branches."""
    folder, test = Path(os.environ[FOLDER]), item.path.relative_to(ROOT / "tests").as_posix()
    if (folder / CURRENT).read_text() != test:
        _hits.clear()
    (folder / CURRENT).write_text(test)
    if (folder / WANTED).exists() and _recorded(folder).issuperset(
        json.loads((folder / WANTED).read_text()).get(test, ())
    ):
        import pytest  # not at the top: every process of the run imports this module

        pytest.skip("all is entered")


def _recorded(folder: Path) -> set[str]:
    return {line for file in folder.glob("*.tsv") for line in file.read_text().splitlines()}


def _line(branch: Branch, occurrence: int, test: str) -> str:
    return "\t".join((branch.where, branch.text, str(occurrence), test))
