"""Tasks from published data sets: SWE-bench, SWE-Gym, SWE-rebench and R2E-Gym, whose repositories are in images."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.atomic_output import refuse_file
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.records import records
from skyrl_mega.config.command import MOST, integer
from skyrl_mega.envs.swe import test_commands
from skyrl_mega.envs.swe.reports import ANSI
from skyrl_mega.envs.swe.task import IMAGE_FOLDER, NAME, TEST_LISTS, required_tests, task_of

IMAGES = {
    "swe-bench": "docker.io/swebench/sweb.eval.x86_64.{id_1776}:latest",
    "swe-gym": "docker.io/xingyaoww/sweb.eval.x86_64.{id_s}:latest",
    "swe-rebench": "docker.io/swerebench/sweb.eval.x86_64.{id_1776}:latest",
    "r2e": "docker.io/{docker_image}",
}
"""Form of the rows → names of images, as published."""
ACTIVATE = ". /opt/miniconda3/bin/activate testbed"
"""Prelude of images with conda's environment `testbed`."""
FORGET_FUTURE = r"""
set -e
[ -e .git ] || exit 0
HOME=$(mktemp -d); export HOME
git config --global safe.directory '*'
rest() { git cat-file --batch-all-objects --batch-check='%(objecttype)' | grep -c '^commit$'; }
forget() {
  rm -rf "$GIT_DIR"/logs "$GIT_DIR"/worktrees "$GIT_DIR"/*_HEAD "$GIT_DIR"/*.lock "$GIT_DIR"/info/grafts
  git remote | xargs -r -n 1 git remote remove
  git update-ref --no-deref HEAD "$(git rev-parse --verify 'HEAD^{commit}')"
  git for-each-ref --format='option no-deref%0adelete %(refname)' | git update-ref --stdin
  [ "$(rest)" != "$(git rev-list --count HEAD)" ] || return 0
  rm -f "$GIT_DIR"/objects/pack/*.keep
  git repack -a -d -q
  rm -f "$GIT_DIR"/objects/info/alternates
  git prune --expire=now
  [ "$(rest)" = "$(git rev-list --count HEAD)" ] || { echo "$GIT_DIR still has later commits" >&2; exit 1; }
}
top=$(git rev-parse --absolute-git-dir)
export GIT_WORK_TREE=.
for GIT_DIR in "$top" $(find "$top" -path '*/modules/*' -type d -name objects -prune | sed 's,/objects$,,'); do
  export GIT_DIR
  forget
done
rm -rf "$HOME"
"""
"""Command that removes every commit from a repository, and from its submodules, except the ancestors of HEAD; fails if
a commit stays."""
WORK_FILES = {
    "django/django": ("django/test/*",),
    "astropy/astropy": ("astropy/tests/command.py", "astropy/tests/helper.py", "astropy/tests/runner.py"),
    "aiohttp": ("aiohttp/test_utils.py",),
}
"""Repository → production code with names as of tests."""
LONGEST_NAME = 200
"""Maximum length of a task's name."""
R2E_SETUP = "[ ! -d /r2e_tests ] || { rm -rf r2e_tests; mv /r2e_tests r2e_tests; }"
INSTRUCTION = """\
The repository in {folder} has a problem, described below. Change the code so that the problem is solved.

<problem>
{statement}
</problem>

Hidden tests judge your work: they check the described behaviour, and that everything else still works. Changes to \
test files are ignored. The repository is installed; there is no network."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for published rows."""
    parser.add_argument("--form", choices=sorted(IMAGES), help="form of published rows (default: by their columns)")
    parser.add_argument("--hub-split", default="test", help="split of a data set on the hub (default: %(default)s)")
    parser.add_argument(
        "--split", choices=("train", "test"), help="file for the rows: train or test (default: test for SWE-bench)"
    )
    parser.add_argument("--data-source", help="data_source of the rows (default: the data set's name, or its form)")
    parser.add_argument(
        "--image-format",
        help="names of the images, with {id}, {id_1776}, {id_s} and columns (default: as published), such as "
        "registry:5000/sweb.eval.x86_64.{id_1776}",
    )
    parser.add_argument("--swebench-python", help="interpreter with the package swebench, for its test commands")
    parser.add_argument("--limit", type=integer(1, MOST), help="tasks at most")


def write_tasks(args: argparse.Namespace, folder: Path) -> None:
    """Writes a task below `folder` for every row that can be judged; prints the number and reasons of the other rows to
    standard error.

    Raises:
        UserError: The rows cannot be read or have an unknown form, no row can be judged, `--image-format` or
            `--swebench-python` is wrong, or a file was changed since an earlier call.
        OSError: A file cannot be written.
    """
    rows = list(_rows_of(args))
    if not rows:
        raise UserError("there are no rows", key="--source", value=args.source)
    form = args.form or _form_of(rows[0])
    commands = test_commands.commands_of(form, rows, args.swebench_python)
    left_out: Counter[str] = Counter()
    names = set[str]()
    for row, command in zip(rows, commands, strict=True):
        if args.limit is not None and len(names) == args.limit:
            break
        try:
            name, files = _task_files(row, form, command, args)
            _check_files(folder / name, files)
            if name in names:
                raise ValueError("another row has the same name")
        except ValueError as error:
            left_out[str(error)] += 1
            continue
        write_files(folder / name, files)
        names.add(name)
    for reason, count in left_out.most_common():
        print(f"{args.source}: {count} of {len(rows)} rows left out: {reason}", file=sys.stderr)
    if not names:
        raise UserError("no row can be judged", key="--source", value=args.source)


def _check_files(folder: Path, files: Mapping[str, str]) -> None:
    """Raises ValueError for files of a task that cannot be written or read again."""
    try:
        for text in files.values():
            text.encode()
        task_of(folder, json.loads(files["task.json"]))
    except UnicodeEncodeError as error:
        raise ValueError("a text has characters that are no Unicode") from error
    except UserError as error:
        raise ValueError(str(error).replace(f"{folder}/", "")) from error


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes files below a folder, and creates missing folders; a file with other content is refused.

    Args:
        folder: The folder.
        files: Path below the folder → text.

    Files before a refused file stay written; a file with the same content is written again.

    Raises:
        UserError: A file exists with other content.
        OSError: A file cannot be written.
    """
    for path, text in files.items():
        data = text.encode()
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        refuse_file(folder / path, "--output", partial(_holds, data))
        (folder / path).write_bytes(data)


def _rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    files: Iterable[Path] = [args.source]
    if not args.source.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(args.source)):
        files = _from_hub(str(args.source), args.hub_split)
    for file in files:
        for row in records(file):
            if not isinstance(row, dict):
                raise UserError("a row is no object", key=file)
            inner = row.get("instance")  # SkyRL's data sets keep the published row there
            yield inner if isinstance(inner, dict) else row


def _from_hub(name: str, split: str) -> list[Path]:
    from huggingface_hub import HfApi, hf_hub_download

    try:
        names = [n for n in HfApi().list_repo_files(name, repo_type="dataset") if n.endswith(".parquet")]
        chosen = [n for n in names if re.match(rf"(.*/)?{re.escape(split)}[-.]", n)]
        if not chosen:
            splits = sorted({re.split("[-.]", Path(n).name)[0] for n in names})
            raise UserError(
                f"{name} has no parquet file of this split; its splits: {', '.join(splits) or 'none'}",
                key="--hub-split",
                value=split,
                fix="give one of its splits, or download the data set and give a file with --source",
            )
        return [Path(hf_hub_download(name, file, repo_type="dataset")) for file in chosen]
    except UserError:
        raise
    except Exception as error:  # the client raises many types for an unreachable hub
        reason = " ".join(str(error).split()).split(". ")[0]
        raise UserError(
            f"{name} cannot be read from the Hugging Face hub ({type(error).__name__}: {reason})",
            fix="download the data set, and give its parquet file with --source",
        ) from error


def _source_of(source: Path, form: str) -> str:
    """Returns the name of the data set: of a file on disk only if it looks like the name of such a data set."""
    name = source.stem if source.suffix in (".parquet", ".json", ".jsonl") else source.name
    return name if re.search("swe|r2e", name, re.IGNORECASE) else form


def _form_of(row: Mapping[str, Any]) -> str:
    """Returns the form of rows by the columns and the repository of a row."""
    if "expected_output_json" in row:
        return "r2e"
    if "install_config" in row:
        return "swe-rebench"
    if {"instance_id", "repo", "test_patch", *TEST_LISTS} <= row.keys():
        if row["repo"] in test_commands.SWE_BENCH:
            return "swe-bench"
        if row["repo"] in test_commands.SWE_GYM:
            return "swe-gym"
    raise UserError("the form is not clear from the columns", key="--form", fix=f"give one of {', '.join(IMAGES)}")


def _task_files(
    row: Mapping[str, Any], form: str, command: str | None, args: argparse.Namespace
) -> tuple[str, dict[str, str]]:
    """Returns name and files of a task.

    Raises:
        ValueError: The row cannot be judged; the message is the reason.
    """
    if command is None:
        raise ValueError("no test command is known for the repository")
    is_r2e = form == "r2e"
    name = _name(row, is_r2e)
    statement = row.get("problem_statement")
    if not isinstance(statement, str) or not statement.strip():
        raise ValueError("there is no problem_statement")
    tests = _expected_tests(row) if is_r2e else {key: _names(row, key) for key in TEST_LISTS}
    if not any(tests.values()) or not (is_r2e or tests["FAIL_TO_PASS"]):
        raise ValueError("no test needs to pass")
    task: dict[str, Any] = {
        "instruction": INSTRUCTION.format(folder=IMAGE_FOLDER, statement=statement.strip()),
        "test": command,
        "data_source": args.data_source or _source_of(args.source, form),
        "split": args.split or ("test" if form == "swe-bench" else "train"),
        "image": _image(row, name, args.image_format or IMAGES[form]),
        "folder": IMAGE_FOLDER,
        "report": "r2e" if is_r2e else test_commands.report_of(row["repo"]),
        "prepare": FORGET_FUTURE,
        **tests,
    }
    files = {}
    if is_r2e:
        task |= {"setup": R2E_SETUP, "hidden_paths": ["r2e_tests", "run_tests.sh"]}
    else:
        task |= {"prelude": ACTIVATE, "test_patch": "test.patch"}
        for file, column in (("test.patch", "test_patch"), ("solution.patch", "patch")):
            if not isinstance(row.get(column), str) or not row[column].strip():
                raise ValueError(f"there is no {column}")
            files[file] = row[column]
        work = set(changed_paths(row["patch"])) - set(changed_paths(row["test_patch"]))
        task["work_files"] = sorted(work)
    task["work_files"] = [*task.get("work_files", ()), *WORK_FILES.get(row["repo_name" if is_r2e else "repo"], ())]
    return name, {**files, "task.json": json.dumps(task, indent=1, ensure_ascii=False) + "\n"}


def _name(row: Mapping[str, Any], is_r2e: bool) -> str:
    """Returns the name of a row's task.

    Raises:
        ValueError: A column is missing, or the name cannot be a folder's.
    """
    columns = ("repo_name", "commit_hash") if is_r2e else ("repo", "instance_id")
    for column in columns:
        if not isinstance(row.get(column), str):
            raise ValueError(f"there is no {column}")
    name = f"{row['repo_name']}-{row['commit_hash'][:12]}" if is_r2e else str(row["instance_id"])
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise ValueError(f"{columns[1]} cannot name a folder")
    return name


def changed_paths(patch: str) -> list[str]:
    """Returns the paths that a patch in git's format changes or creates, without removed files and paths with `..`."""
    return [path for path in re.findall(r"^\+\+\+ b/(.+?)\t?$", patch, re.MULTILINE) if ".." not in path.split("/")]


def _image(row: Mapping[str, Any], name: str, image_format: str) -> str:
    fields = {key: value for key, value in row.items() if isinstance(value, str)}
    published = row.get("docker_image") or row.get("image_name")
    if isinstance(published, str) and published and image_format in IMAGES.values():
        return published if published.count("/") > 1 else f"docker.io/{published}"
    forms = {"id": name, "id_1776": name.replace("__", "_1776_"), "id_s": name.replace("__", "_s_")}
    try:
        return image_format.format(**fields | {key: form.lower() for key, form in forms.items()})
    except (KeyError, IndexError, ValueError) as error:
        if image_format in IMAGES.values():
            raise ValueError("there is no name of an image") from error
        raise UserError(
            f"{error}; allowed: {{id}}, {{id_1776}}, {{id_s}} and columns of the rows",
            key="--image-format",
            value=image_format,
        ) from error


def _names(row: Mapping[str, Any], key: str) -> list[str]:
    try:
        return required_tests({key: row.get(key)})
    except UserError as error:
        raise ValueError(f"{key} is no list of names") from error


def _expected_tests(row: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the tests that pass with R2E's solution, as `FAIL_TO_PASS`: which of them failed before is not
    published."""
    try:
        expected = json.loads(row["expected_output_json"])
        passing = sorted({ANSI.sub("", name) for name, result in expected.items() if result == "PASSED"} - {""})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError("expected_output_json is no mapping of tests") from error
    return {"FAIL_TO_PASS": passing, "PASS_TO_PASS": []}


def _holds(data: bytes, file: Path) -> bool:
    """Returns True if the file consists of exactly these bytes."""
    return file.read_bytes() == data
