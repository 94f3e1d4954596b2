"""A software task: a folder with `task.json`, and the repository as `repo/` or in a container's image."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import read_json
from skyrl_mega.envs.swe.reports import REPORTS

NAME = re.compile(r"[\w-][\w.-]*")
"""A task's name: the name of a folder, never a path."""
STORES = "dir|oci|oci-archive|docker-archive|docker-daemon|containers-storage|ostree|sif|tarball"
"""Words before `:` by which podman reads an image from this machine's files."""
IMAGE = re.compile(rf"(?!(?:{STORES}):|.*:/)\w[\w.:/@+-]{{0,299}}")
"""An image's name in a registry; neither an option of a program nor a place on this machine."""
LARGEST = 2**24
"""Maximum size of a task.json, in bytes."""
TEST_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
"""Lists of tests in a row, under SWE-bench's names."""
SPLITS = ("train", "test")
IMAGE_FOLDER = "/testbed"
"""Default folder of the repository in an image."""


@dataclass(frozen=True)
class Task:
    """A task as described by `task.json`."""

    path: Path
    """Folder of the task."""
    instruction: str = ""
    test: str = ""
    """Shell command of the tests."""
    split: str = "train"
    data_source: str = "swe"
    """Name of the data set, for scores."""
    tests: Mapping[str, list[str]] = field(default_factory=dict)
    """Names of required tests, under the names in `TEST_LISTS`."""
    image: str | None = None
    """Image of the container; None for the image of the session's options, or for a local session."""
    folder: str = IMAGE_FOLDER
    """Folder of the repository in the container."""
    report: str = "exit"
    """Format of the tests' output, see `reports.REPORTS`; `exit` for the exit code alone."""
    prelude: str | None = None
    """Shell commands before every command, such as the activation of an environment."""
    setup: str | None = None
    """Shell command in every new container."""
    prepare: str | None = None
    """Shell command in the policy's container before the policy begins."""
    test_patch: str | None = None
    """Name of a patch beside `task.json`; the files changed by the patch are hidden files."""
    hidden_paths: tuple[str, ...] = ()
    """Hidden files and folders in the image's repository: removed from the policy's container."""
    work_files: tuple[str, ...] = ()
    """Files, or patterns of files, that belong to the work, although a pattern of `protected` matches."""

    @property
    def repo(self) -> Path:
        """Folder of the repository; does not exist for a task with the repository in an image (`in_image`)."""
        return self.path / "repo"

    @property
    def in_image(self) -> bool:
        """True if the repository is in the image."""
        return self.image is not None and not self.repo.is_dir()


def read_task(path: Path) -> Task:
    """Returns the task in the folder `path`; a task without `task.json` has the defaults.

    Raises:
        UserError: `task.json` is malformed, or a value is not allowed.
    """
    try:
        return _read(path, (path / "task.json").stat().st_mtime_ns)
    except FileNotFoundError:
        return Task(path)


@lru_cache(maxsize=1024)
def _read(path: Path, changed: int) -> Task:
    """Returns the task of a folder whose `task.json` was last changed at a time."""
    return task_of(path, read_json(path / "task.json", "give a task's instruction and test", most=LARGEST))


def task_of(path: Path, spec: Mapping[str, Any]) -> Task:
    """Returns the task of a folder as described by the content of `task.json`, which may not be written yet.

    Args:
        path: Folder of the task.
        spec: Content of `task.json`.

    Raises:
        UserError: A value is not allowed.
    """
    file = path / "task.json"
    values: dict[str, Any] = {"split": spec.get("split", "train"), "report": spec.get("report", "exit")}
    for key, allowed in (("split", SPLITS), ("report", REPORTS)):
        if values[key] not in allowed:
            raise UserError(f"{file}, key {key}: {values[key]!r}; allowed: {', '.join(allowed)}")
    for key in ("instruction", "test", "data_source", "image", "folder", "prelude", "setup", "prepare", "test_patch"):
        value = spec.get(key)
        if value is None and key not in ("instruction", "test"):
            continue
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise UserError(f"{file}, key {key}: allowed: a string that is not empty")
        values[key] = value
    for key in ("hidden_paths", "work_files"):
        value = spec.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) and _is_inside(name) for name in value):
            raise UserError(f"{file}, key {key}: {value!r}; allowed: a list of paths in the repository")
        values[key] = tuple(value)
    if "image" in values and not IMAGE.fullmatch(values["image"]):
        raise UserError(f"{file}, key image: {values['image']!r}; allowed: an image's name, such as python:3.11")
    if not re.fullmatch(r"(/[\w.+-]+)+", values.get("folder", IMAGE_FOLDER)):
        raise UserError(f"{file}, key folder: {values['folder']!r}; allowed: an absolute path such as {IMAGE_FOLDER}")
    if values["hidden_paths"] and ("image" not in values or (path / "repo").exists()):
        raise UserError(
            f"{file}, key hidden_paths: allowed for a repository in an image", fix="put the files in hidden/"
        )
    if not _is_plain(values.get("test_patch", "x")):
        raise UserError(f"{file}, key test_patch: {values['test_patch']!r}; allowed: a file name such as test.patch")
    try:
        values["tests"] = {key: required_tests({key: spec.get(key, [])}) for key in TEST_LISTS}
    except UserError as error:
        raise UserError(f"{file}, key {error}") from error
    if values["report"] != "exit" and not any(values["tests"].values()):
        raise UserError(
            f"{file}, key report: {values['report']!r} needs the names of tests",
            fix="give FAIL_TO_PASS, or leave report out",
        )
    return Task(path, **values)


def required_tests(lists: Mapping[str, Any]) -> list[str]:
    """Returns the names of the tests that a row requires to pass, from both lists of `TEST_LISTS`; [] without lists.

    Args:
        lists: List name → list. SWE-bench writes each list as JSON text.

    Raises:
        UserError: A value is not a list of names.
    """
    names = []
    for key in TEST_LISTS:
        value = lists.get(key)
        try:
            value = json.loads(value) if isinstance(value, str) else list(value if value is not None else ())
        except (ValueError, TypeError):
            value = None
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise UserError(f"{lists[key]!r}; allowed: a list of the names of tests", key=key)
        names += value
    return names


def refuse_outside_link(path: Path, tasks: Path) -> None:
    """Refuses a part of a task that is, or lies below, a link to a place outside the folder of tasks.

    Args:
        path: The part, which need not exist.
        tasks: The folder of tasks.

    Raises:
        UserError: The link leads outside.
    """
    if not path.resolve().is_relative_to(tasks.resolve()):
        raise UserError(
            f"it is a link to {path.resolve()}; allowed: files in {tasks}",
            key=path,
            fix="copy the target of the link into the task",
        )


def _is_inside(name: str) -> bool:
    return all(part not in ("", ".", "..") for part in name.split("/")) and "\0" not in name


def _is_plain(name: str) -> bool:
    return NAME.fullmatch(name) is not None
