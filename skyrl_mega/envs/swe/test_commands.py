"""Test commands of published tasks: by the repository, or from the package `swebench`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs.swe.task import TEST_LISTS

SWE_BENCH = (
    "astropy/astropy",
    "django/django",
    "matplotlib/matplotlib",
    "mwaskom/seaborn",
    "pallets/flask",
    "psf/requests",
    "pydata/xarray",
    "pylint-dev/pylint",
    "pytest-dev/pytest",
    "scikit-learn/scikit-learn",
    "sphinx-doc/sphinx",
    "sympy/sympy",
)
"""Repositories of SWE-bench's test set."""
SWE_GYM = (
    "Project-MONAI/MONAI",
    "bokeh/bokeh",
    "conan-io/conan",
    "dask/dask",
    "facebookresearch/hydra",
    "getmoto/moto",
    "iterative/dvc",
    "modin-project/modin",
    "pandas-dev/pandas",
    "pydantic/pydantic",
    "python/mypy",
)
"""Repositories of SWE-Gym."""
OWN_REPORTS = {"django/django": "django", "sympy/sympy": "sympy"}
"""Repository → format of the report; all others report as pytest."""
PYTEST = "python -m pytest -rA --color=no -p no:cacheprovider"
LOCALE = "export LANG=C.UTF-8 LC_ALL=C.UTF-8 PYTHONIOENCODING=utf8"
DATA_FILES = (
    ".json",
    ".png",
    ".csv",
    ".txt",
    ".md",
    ".jpg",
    ".jpeg",
    ".pkl",
    ".yml",
    ".yaml",
    ".toml",
    ".html",
    ".xml",
)
"""Endings of files that a test patch changes and no test command names."""
LONGEST_S = 300.0
"""Time limit of the interpreter with `swebench`, in seconds."""
SPECS = """
import json, sys
from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS
specs = [MAP_REPO_VERSION_TO_SPECS.get(repo, {}).get(version) for repo, version in json.load(sys.stdin)]
print(json.dumps([spec and [spec["test_cmd"], spec.get("eval_commands", [])] for spec in specs]))
"""
"""Program that prints test command and preparing commands of pairs of repository and version."""


def report_of(repo: str) -> str:
    """Returns the format of the test output of a repository: `django`, `sympy`, or `pytest` for all others.

    Args:
        repo: Owner and name, such as `django/django`.
    """
    return OWN_REPORTS.get(repo, "pytest")


def commands_of(form: str, rows: Sequence[Mapping[str, Any]], python: str | None) -> list[str | None]:
    """Returns the shell command of the tests for each row; None if none is known.

    Args:
        form: Form of the rows: `swe-bench`, `swe-gym`, `swe-rebench` or `r2e`.
        rows: Published rows.
        python: Interpreter with the package `swebench` 4, called for `swe-bench` and `swe-gym`; None for commands by
            the repository.

    Raises:
        UserError: The interpreter cannot be started, lacks the package, or is late (`LONGEST_S`).
    """
    if form == "r2e":
        return ["bash run_tests.sh"] * len(rows)
    if form == "swe-rebench":
        return [_of_rebench(row) for row in rows]
    if python is not None:
        return _of_swebench(rows, python)
    known = SWE_BENCH if form == "swe-bench" else SWE_GYM
    return [_of_repository(row) if row.get("repo") in known else None for row in rows]


def _of_repository(row: Mapping[str, Any]) -> str | None:
    files = _test_files(row)
    if row["repo"] == "django/django":
        modules = [_django_module(file) for file in files if file.startswith("tests/") and file.endswith(".py")]
        command = "python tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
        return f"{LOCALE}; {shlex.join([*command.split(), *modules])}" if modules else None
    if row["repo"] == "sympy/sympy":
        return shlex.join(["bin/test", "-C", "--verbose", *files]) if files else None
    return _with_files(f"{LOCALE}; {PYTEST}", row)


def _django_module(file: str) -> str:
    """Returns the name by which Django's `runtests.py` knows a test file."""
    return file.removeprefix("tests/").removesuffix(".py").replace("/", ".")


def _of_rebench(row: Mapping[str, Any]) -> str | None:
    config = row.get("install_config")
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            return None
    command = config.get("test_cmd") if isinstance(config, dict) else None
    if isinstance(command, list):
        command = "; ".join(map(str, command))
    if not isinstance(command, str) or "pytest" not in command:
        return None
    return _with_files(command, row)


def _with_files(command: str, row: Mapping[str, Any]) -> str | None:
    """Returns pytest's command for the files of the named tests."""
    names = [name for key in TEST_LISTS for name in _list(row.get(key))]
    files = sorted({name.partition("::")[0] for name in names if "::" in name}) or _test_files(row)
    return f"{command} {shlex.join(files)}" if files else None


def _of_swebench(rows: Sequence[Mapping[str, Any]], python: str) -> list[str | None]:
    pairs = sorted({(str(row.get("repo")), str(row.get("version"))) for row in rows})
    try:
        ran = subprocess.run(
            [python, "-c", SPECS],
            input=json.dumps(pairs),
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=True,
        )
        specs = dict(zip(pairs, json.loads(ran.stdout.splitlines()[-1]), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise UserError(
            f"it gives no test commands ({''.join(last)})",
            key="--swebench-python",
            value=python,
            fix="give an interpreter with swebench 4 (`pip install swebench==4.1.0`), or leave the option out",
        ) from error
    commands: list[str | None] = []
    for row in rows:
        spec = specs[str(row.get("repo")), str(row.get("version"))]
        files = _test_files(row)
        if spec is None or not files:
            commands.append(None)
            continue
        if row["repo"] == "django/django":
            files = [_django_module(file) for file in files]
        command, preparing = spec
        commands.append("; ".join([*preparing, f"{command} {shlex.join(files)}"]))
    return commands


def _test_files(row: Mapping[str, Any]) -> list[str]:
    """Returns the files of a row's test patch that a test command can name."""
    patch = row.get("test_patch")
    paths = re.findall(r"^diff --git a/.* b/(.+)$", patch, re.MULTILINE) if isinstance(patch, str) else []
    return sorted({path for path in paths if not path.endswith(DATA_FILES)})


def _list(value: Any) -> list[str]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return []
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
