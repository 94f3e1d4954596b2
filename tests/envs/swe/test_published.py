"""Tasks from rows in the published forms, written by hand after the data sets' schemas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.data.prepare import prepare
from skyrl_mega.envs.containers.registry import RUNTIMES
from skyrl_mega.envs.swe import published
from skyrl_mega.envs.swe.published import FORGET_FUTURE, changed_paths
from skyrl_mega.envs.swe.task import read_task
from tests.envs.swe.folder_runtime import PATH
from tests.envs.swe.toys import RIGHT, TOYS, code, write_toys
from tests.support.containers import IMAGE

PATCH = "diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b\n"


def row_of(repo: str, number: int = 1, **changes: Any) -> dict[str, Any]:
    name = repo.replace("/", "__")
    return {
        "repo": repo,
        "instance_id": f"{name}-{number}",
        "base_commit": "abc",
        "patch": PATCH.format(path="src/a.py"),
        "test_patch": PATCH.format(path="tests/test_a.py"),
        "problem_statement": "It is wrong.",
        "version": "1.0",
        "FAIL_TO_PASS": '["tests/test_a.py::test_one"]',
        "PASS_TO_PASS": '["tests/test_a.py::test_two", "tests/test_b.py::test_three"]',
        **changes,
    }


def written(folder: Path, rows: list[dict[str, Any]], more: str = "") -> Path:
    """Runs the command on rows and returns the folder of the tasks."""
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    prepare(f"swe --output {folder / 'out'} --source {folder / 'rows.parquet'} {more}")
    return folder / "out" / "tasks"


def test_rows_of_swe_bench(tmp_path: Path) -> None:
    django = row_of(
        "django/django",
        test_patch=PATCH.format(path="tests/a/test_b.py") + PATCH.format(path="tests/a/data.json"),
        patch=PATCH.format(path="django/test/runner.py"),
        FAIL_TO_PASS='["test_one (a.test_b.T)"]',
        PASS_TO_PASS="[]",
    )
    sympy = row_of("sympy/sympy", FAIL_TO_PASS='["test_one"]', PASS_TO_PASS="[]")
    tasks = written(tmp_path, [row_of("psf/requests", 7), django, sympy])
    task = read_task(tasks / "psf__requests-7")
    assert task.image == "docker.io/swebench/sweb.eval.x86_64.psf_1776_requests-7:latest"
    assert task.test.endswith("python -m pytest -rA --color=no -p no:cacheprovider tests/test_a.py tests/test_b.py")
    assert (task.report, task.folder, task.split, task.in_image) == ("pytest", "/testbed", "test", True)
    assert task.prelude == ". /opt/miniconda3/bin/activate testbed" and task.work_files == ("src/a.py",)
    assert "It is wrong." in task.instruction and "/testbed" in task.instruction
    assert (tasks / "psf__requests-7" / "test.patch").read_text() == row_of("psf/requests")["test_patch"]
    task = read_task(tasks / "django__django-1")
    assert task.report == "django" and task.test.endswith("--settings=test_sqlite --parallel 1 a.test_b")
    # `protected` matches both; the solution changes the first, and the others are production code
    assert task.work_files == ("django/test/runner.py", "django/test/*")
    assert read_task(tasks / "sympy__sympy-1").test == "bin/test -C --verbose tests/test_a.py"
    [row] = [
        r for r in pq.read_table(tmp_path / "out" / "test.parquet").to_pylist() if "psf" in r["extra_info"]["task"]
    ]
    assert row["data_source"] == "swe-bench" and len(row["extra_info"]["PASS_TO_PASS"]) == 2
    assert "<submit/>" in row["prompt"][0]["content"] and row["reward_spec"]["ground_truth"].endswith("test_b.py")


@pytest.mark.parametrize(
    ("files", "splits"),
    [(["data/train-00000-of-00001.parquet", "dev.parquet", "README.md"], "its splits: dev, train;"), ([], "none;")],
)
def test_a_split_that_is_not_on_the_hub(files: list[str], splits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda self, name, repo_type: files)
    with pytest.raises(UserError, match=f"^--hub-split test: a/b has no parquet file of this split; .*{splits}"):
        published._from_hub("a/b", "test")


def test_rows_of_the_other_sets(tmp_path: Path) -> None:
    names = ["tests/test_a.py::test_one"]
    gym = row_of("getmoto/moto", FAIL_TO_PASS=names, PASS_TO_PASS=[])
    rebench = row_of(
        "a/b",
        docker_image="swerebench/x:1",
        install_config={"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest"},
    )
    r2e = {
        "repo_name": "orange3",
        "docker_image": "namanjain12/orange3_final:abc",
        "commit_hash": "0123456789abcdef",
        "problem_statement": "It is wrong.",
        "expected_output_json": '{"\\u001b[1mT.test_a\\u001b[0m": "PASSED", "T.test_b": "FAILED"}',
    }
    for number, (row, name, image, command) in enumerate(
        [
            (gym, "getmoto__moto-1", "docker.io/xingyaoww/sweb.eval.x86_64.getmoto_s_moto-1:latest", "tests/test_a.py"),
            (rebench, "a__b-1", "docker.io/swerebench/x:1", "pytest -rA tests/test_a.py tests/test_b.py"),
            (r2e, "orange3-0123456789ab", "docker.io/namanjain12/orange3_final:abc", "bash run_tests.sh"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        task = read_task(written(folder, [row], "--env harness") / name)
        assert task.image == image and task.test.endswith(command) and task.split == "train"
        [made] = pq.read_table(folder / "out" / "train.parquet").to_pylist()
        assert made["env_class"] == "harness" and [m["role"] for m in made["prompt"]] == ["user"]
    assert task.tests == {"FAIL_TO_PASS": ["T.test_a"], "PASS_TO_PASS": []}
    assert task.hidden_paths == ("r2e_tests", "run_tests.sh") and task.report == "r2e"


def test_rows_of_skyrl_keep_the_published_row_in_a_column(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "-"}], "data_source": "swe-gym", "instance": row_of("getmoto/moto")}
    task = read_task(written(tmp_path, [row]) / "getmoto__moto-1")
    assert task.image == "docker.io/xingyaoww/sweb.eval.x86_64.getmoto_s_moto-1:latest"


def test_rows_that_cannot_be_judged_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row_of("psf/requests", 1),
        row_of("psf/requests", 2, problem_statement=" "),
        row_of("psf/requests", 3, FAIL_TO_PASS="[]"),
        row_of("psf/requests", 4, FAIL_TO_PASS="no list"),
        row_of("psf/requests", 5, patch=""),
        row_of("psf/requests", 6, instance_id="../x"),
        row_of("nobody/knows", 7),
        row_of("psf/requests", 8, problem_statement="a\0b"),
        row_of("psf/requests", 9, instance_id="a" * 300),
        row_of("psf/requests", 10, patch=PATCH.format(path="./a.py")),
        row_of("psf/requests", 1, problem_statement="Another."),
    ]
    tasks = written(tmp_path, rows, "--form swe-bench --image-format my:5000/{id_1776}")
    assert [folder.name for folder in tasks.iterdir()] == ["psf__requests-1"]
    assert read_task(tasks / "psf__requests-1").image == "my:5000/psf_1776_requests-1"
    said = capsys.readouterr().err
    for reason in ("no problem_statement", "no test needs to pass", "no list of names", "no patch", "the same name"):
        assert "1 of 11 rows left out: " in said and reason in said, said
    assert "no test command is known for the repository" in said and "1 tasks, 1 images" in said


@pytest.mark.parametrize(
    "changes",
    [{"repo_name": None}, {"commit_hash": None}, {"docker_image": None}, {"docker_image": "dir:/a/b"}],
)
def test_a_row_of_r2e_that_lacks_something_is_left_out(tmp_path: Path, changes: dict[str, None]) -> None:
    row = {
        "repo_name": "numpy",
        "docker_image": "a/b:c",
        "commit_hash": "0" * 40,
        "problem_statement": "It is wrong.",
        "expected_output_json": '{"T.test_a": "PASSED"}',
    }
    tasks = written(tmp_path, [row, {**row, "commit_hash": "1" * 40, **changes}])
    assert [folder.name for folder in tasks.iterdir()] == ["numpy-000000000000"]


def test_a_row_of_swe_rebench_without_repository_is_left_out(tmp_path: Path) -> None:
    row = row_of("a/b", docker_image="x/y:1", install_config={"test_cmd": "pytest -rA"})
    tasks = written(tmp_path, [row, {**row, "repo": None, "instance_id": "other"}])
    assert [folder.name for folder in tasks.iterdir()] == ["a__b-1"]


@pytest.mark.parametrize(
    ("rows", "more", "refusal"),
    [
        ([{"a": 1}], "", "--form: the form is not clear from the columns"),
        ([row_of("nobody/knows")], "", "--form: the form is not clear from the columns"),
        ([row_of("nobody/knows")], "--form swe-bench", "no row can be judged"),
        ([row_of("psf/requests")], "--image-format {nothing}", "--image-format {nothing}: 'nothing'; allowed"),
        ([row_of("psf/requests")], f"--swebench-python {sys.executable}", "gives no test commands"),
        ([row_of("psf/requests")], "--validate nowhere", "nowhere"),
        ([row_of("psf/requests")], "--validate local", "needs a container"),
    ],
)
def test_what_is_refused(tmp_path: Path, rows: list[dict[str, Any]], more: str, refusal: str) -> None:
    with pytest.raises(UserError) as error:
        written(tmp_path, rows, more)
    assert refusal in str(error.value)


def test_commands_of_the_package_swebench(tmp_path: Path) -> None:
    python = tmp_path / "python"
    spec = [["./tests/runtests.py --parallel 1", ["export A=1"]], None]
    python.write_text(f"#!/bin/sh\ncat >/dev/null\necho noise\necho '{json.dumps(spec)}'\n")
    python.chmod(0o755)
    rows = [row_of("django/django", test_patch=PATCH.format(path="tests/a/test_b.py")), row_of("psf/requests")]
    tasks = written(tmp_path, rows, f"--swebench-python {python}")
    assert read_task(tasks / "django__django-1").test == "export A=1; ./tests/runtests.py --parallel 1 a.test_b"
    assert not (tasks / "psf__requests-1").exists()


def test_paths_changed_by_a_patch() -> None:
    patch = PATCH.format(path="a b.py") + "--- a/gone.py\n+++ /dev/null\n" + "+++ b/../x\n" + PATCH.format(path="n.py")
    assert changed_paths(patch) == ["a b.py", "n.py"]


def test_tasks_are_validated_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RUNTIMES, "folders", PATH)
    toys = write_toys(tmp_path, ["spread", "last", "count", "smallest", "squares"])
    repos = tmp_path / "images" / IMAGE / "repos"
    for name, body in (("spread", RIGHT["spread"]), ("last", "0"), ("count", None)):
        new = code(name, body) if body else "never the same\n"
        old = code(name, TOYS[name][2]) if body else "what is not there\n"
        lines = [*(f"-{line}" for line in old.splitlines()), *(f"+{line}" for line in new.splitlines())]
        count = len(old.splitlines()), len(new.splitlines())
        text = f"--- a/tools.py\n+++ b/tools.py\n@@ -1,{count[0]} +1,{count[1]} @@\n" + "\n".join(lines) + "\n"
        (toys[name].tasks / name / "solution.patch").write_text(text)
    (repos / "smallest" / "tools.py").write_text(code("smallest", RIGHT["smallest"]))
    options = json.dumps({"root": str(tmp_path / "images")})
    prepare(
        f"swe --output {tmp_path / 'out'} --source {tmp_path / 'tasks'} --validate folders --jobs 2 "
        f"--session-options '{options}'"
    )
    said = capsys.readouterr().err
    assert "smallest: left out: the tests pass without any work" in said and "spread: valid" in said
    assert "last: left out: solution.patch fails: failed" in said and "the patch does not apply" in said
    assert "squares: fails without work; no solution.patch to try" in said
    assert "1 of 5 tasks are valid; 1 fail without work, have no solution.patch to try, and are kept" in said
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["extra_info"]["task"] for row in rows] == ["spread", "squares"]


def git(folder: Path, *words: str) -> str:
    """Runs git in a folder and returns what it prints."""
    own = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "protocol.file.allow=always"]
    return subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def repository_with_a_future(folder: Path) -> Path:
    """Returns a clone at an early commit: later ones have branches, tags, notes, a submodule, a reflog, or no name."""
    for name in ("sub", "origin"):
        (folder / name).mkdir(parents=True)
        git(folder / name, "init", "-q", "-b", "main")
        for text in ("early", f"late-{name}"):
            (folder / name / "file").write_text(text)
            if name == "origin" and text == "early":
                git(folder / name, "submodule", "--quiet", "add", str(folder / "sub"), "sub")
            git(folder / name, "add", "-A")
            git(folder / name, "commit", "-q", "-m", text)
    git(folder / "origin", "tag", "-a", "v2", "-m", "v2")
    git(folder / "origin", "notes", "add", "-m", "a note")
    git(folder, "clone", "-q", "--recurse-submodules", "origin", "testbed")
    repo = folder / "testbed"
    git(repo, "fetch", "-q", "origin", "refs/notes/*:refs/notes/*")
    git(repo, "checkout", "-q", "HEAD~")
    git(repo / "sub", "checkout", "-q", "HEAD~")
    (repo / "file").write_text("kept in the stash")
    git(repo, "stash", "-q")
    (repo / "file").write_text("work")
    return repo


def forget(repo: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", FORGET_FUTURE], cwd=repo, capture_output=True, text=True, check=False)


def commits_of(repo: Path) -> list[str]:
    """Returns the subjects of all stored commits, with or without a name."""
    objects = git(repo, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype) %(objectname)").splitlines()
    return [git(repo, "log", "-1", "--format=%s", o.split()[1]) for o in objects if not o.startswith(("blob", "tree"))]


def test_no_later_commit_stays_in_the_repository(tmp_path: Path) -> None:
    repo = repository_with_a_future(tmp_path)
    assert "late-origin" in commits_of(repo) and "late-sub" in commits_of(repo / "sub")
    ran = forget(repo)
    assert ran.returncode == 0, ran.stderr
    assert commits_of(repo) == ["early"] and commits_of(repo / "sub") == ["early"]
    assert git(repo, "for-each-ref") == git(repo, "remote") == ""
    assert git(repo, "diff", "--name-only") == "file\nsub" and (repo / "file").read_text() == "work"


def test_a_commit_that_stays_fails_the_start(tmp_path: Path) -> None:
    repo = repository_with_a_future(tmp_path)
    git(repo, "repack", "-a", "-d", "-q")
    [pack] = (repo / ".git" / "objects" / "pack").glob("*.pack")
    pack.with_suffix(".promisor").touch()  # git never drops objects of such a pack
    ran = forget(repo)
    assert ran.returncode != 0 and "still has later commits" in ran.stderr
