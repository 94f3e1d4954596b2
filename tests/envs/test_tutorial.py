"""`docs/tutorial.md` as followed by a newcomer: two files pasted into an empty folder, commands typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from skyrl_mega.telemetry.metrics import read
from tests.trainer.quickstart import ROOT, left_over, user_python

PAGE = ROOT / "docs" / "tutorial.md"
FILES = ("sort_env.py", "sort.yaml")
FEW = [
    *("run.steps=2", "warmup.steps=20", "evaluation.limit=16", "data.prompts_per_step=8", "rollout.concurrency=64"),
    *("checkpoint.every=0", "telemetry.trackers=[]"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns an empty folder with the page's files."""
    text = PAGE.read_text(encoding="utf-8")
    for name, block in zip(FILES, re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.DOTALL), strict=True):
        assert block.startswith(f"# {name}\n")
        (tmp_path / name).write_text(block, encoding="utf-8")
    return tmp_path


def commands() -> list[list[str]]:
    """Returns the page's command lines, without the interpreter."""
    lines = re.findall(r"^    python (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [line.split() for line in lines]


def test_its_rows_and_its_dry_run(folder: Path) -> None:
    rows, dry_run, *_ = commands()
    user_python(folder, *rows)
    shown = pq.read_table(folder / "shown.parquet").to_pylist()
    right = [row["extra_info"]["demonstration"] == row["reward_spec"]["ground_truth"] for row in shown]
    assert 0.38 < sum(right) / len(right) < 0.42, "the page says four in ten"
    questions = [
        {row["prompt"][0]["content"] for row in pq.read_table(folder / f"{name}.parquet").to_pylist()}
        for name in ("train", "test")
    ]
    assert len(questions[1] - questions[0]) > 190
    plan = json.loads(user_python(folder, *dry_run, "--json"))
    assert plan["config"]["run"]["name"] == "sort" and not (folder / "runs").exists()


@pytest.mark.slow
def test_its_run(folder: Path) -> None:
    """Runs a few steps of the tutorial."""
    rows, _, run, *reports = commands()
    user_python(folder, *rows)
    user_python(folder, *run, *FEW)
    assert left_over(folder) == []
    before, *steps = read(folder / "runs" / "sort" / "metrics.jsonl")
    assert any(name.startswith("eval/") for name in before)
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["rollout/failed_fraction"] == 0 and row["mismatch/logprob_abs_mean"] < 1e-3
    for report in reports:
        assert report[:3] == ["-m", "skyrl_mega.report", "trajectories"]
        report[report.index("--step") + 1] = "2"
        assert user_python(folder, *report).count('{"answer": ') == 4, "what the class made of each answer"
