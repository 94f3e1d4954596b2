"""Which branches of CUDA a run of tests/cuda really enters, in all of its processes.

Every process of the run finds `recording/sitecustomize.py` first, which lets `skyrl_mega` be imported with a call
around each branch (`branches.Scan`). The call writes, when it sees CUDA's side, the branch and the test file that runs
at that moment; the pytest plugin at the end of this module says which that is.
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
"""Environment variable: where a run of the tests keeps what was entered."""
CURRENT, WANTED = "current", "wanted"
ENOUGH = 100
"""Of one branch in one process and test file: hot loops need not ask for the test file any more."""
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
        """Of the project's own modules."""
        if name.split(".")[0] != "skyrl_mega":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install(folder: Path) -> None:
    """Records, in this process and those that are forked from it."""
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
    """Runs tests/cuda, its own list excepted, and more tests. Branch and occurrence → the test files that entered it.

    Args:
        more: Test files.
        wanted: What each file is to enter; its tests after it has done so are left out, and files that are not named.
            Without it all run.
        timeout: Seconds.

    Raises:
        RuntimeError: A test failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, here = Path(name), Path(__file__).parent
        (folder / CURRENT).write_text("")
        if wanted is not None:
            lines = {test: [_line(branch, i, test) for branch, i in every] for test, every in wanted.items()}
            (folder / WANTED).write_text(json.dumps(lines))
        environment = os.environ | {FOLDER: name, "PYTHONPATH": f"{here / 'recording'}:{ROOT}"}
        options = ["-q", "-m", "not slow", "-p", __name__, "-p", "no:cacheprovider"]
        options += ["--ignore", str(here / "test_branches.py")]
        options += ["-k", "not what_is_suggested"]  # held to processor time, of which the recorder takes some
        command = [sys.executable, "-m", "pytest", str(here), *more, *options]
        run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
        if run.returncode:
            raise RuntimeError(f"tests fail under the recorder:\n{run.stdout[-4000:]}\n{run.stderr[-2000:]}")
        seen: dict[tuple[Branch, int], set[str]] = defaultdict(set)
        for line in _recorded(folder):
            where, text, occurrence, test = line.split("\t")
            seen[Branch(where, text), int(occurrence)].add(test)
    return dict(seen)


def pytest_runtest_setup(item: Any) -> None:
    """Pytest's: which test file runs now; one that has entered all that it is to enter runs no further."""
    folder, test = Path(os.environ[FOLDER]), item.path.relative_to(ROOT / "tests").as_posix()
    if (folder / CURRENT).read_text() != test:
        _hits.clear()
    (folder / CURRENT).write_text(test)
    if (folder / WANTED).exists() and _recorded(folder).issuperset(
        json.loads((folder / WANTED).read_text()).get(test, ())
    ):
        import pytest  # not above: every process of the run imports this module

        pytest.skip("all is entered")


def _recorded(folder: Path) -> set[str]:
    return {line for file in folder.glob("*.tsv") for line in file.read_text().splitlines()}


def _line(branch: Branch, occurrence: int, test: str) -> str:
    return "\t".join((branch.where, branch.text, str(occurrence), test))
