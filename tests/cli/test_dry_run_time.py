"""Time in a dry run: columns, the run's line, rates, and the options shared with `--simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.cli import dry_run_text, workload
from skyrl_mega.cli.train import main
from skyrl_mega.trajectories import parquet
from tests.simulation.test_workload import recorded

SMALL = ["data.prompts_per_step=16", "data.samples_per_prompt=4", "data.mini_batch_prompts=null"]
FILE = "configs/gsm8k.yaml"


def values(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["--config", FILE, *SMALL, "--dry-run", "--json", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_run_has_days_and_gpu_hours(capsys: pytest.CaptureFixture[str]) -> None:
    v = values(capsys, "run.steps=40", "checkpoint.every=20", "evaluation.limit=32", "evaluation.every=8")
    run, column = v["time"]["run"], v["time"]["columns"]["mean"]
    assert run["steps"] == 40 and run["steps_known"] and run["gpus"] == 4
    assert run["evaluations"] == (6 if v["config"]["evaluation"]["before"] else 5) and run["checkpoints"] == 2
    total = 40 * v["seconds"]["step"] + run["evaluations"] * run["evaluation_s"] + 2 * run["checkpoint_s"]
    assert run["seconds"]["estimate"] == pytest.approx(total) == pytest.approx(40 * column["whole"])
    assert run["checkpoint_s"] == pytest.approx(v["disk"]["largest_share"]["node"] / 2e9)
    assert run["gpu_hours"]["high"] == pytest.approx(4 * run["seconds"]["high"] / 3600)
    assert run["days"]["low"] < run["days"]["estimate"] < run["days"]["high"]
    steps = [v["time"]["columns"][name]["step"] for name in ("short", "mean", "limit")]
    assert steps == sorted(steps)
    text = dry_run_text.text(v)
    assert "\n40 steps take about " in text and " GPU-hours (" in text and " of 4 GPUs\n" in text
    top = text.partition("\n\n")[0].splitlines()
    assert top[2].startswith("  not counted: start-up and restarts, the environments' own time")
    assert "assumed: no level of confidence is measured" in top[3]
    assert "lengths are assumed (cluster.rates.length_share; give --tokens" in text
    assert "rates.tflops_share" in text and "not counted: the environments' own time" in text
    assert max(map(len, text[text.index("seconds of an RL step") :].partition("\nnote: ")[0].splitlines())) <= 120


def test_a_stand_in_for_the_number_of_steps_is_named_at_the_top(capsys: pytest.CaptureFixture[str]) -> None:
    v = values(capsys, "evaluation.limit=null", "run.steps=null", "data.train=[absent.parquet]")
    assert not v["time"]["run"]["steps_known"]
    duration, unknown, missing = dry_run_text.text(v).splitlines()[1:4]
    assert duration.startswith("100 steps (assumed) take about ")
    assert unknown.startswith("  100 steps are assumed: run.steps is null")
    assert missing.startswith("  not counted: ") and missing.endswith("the environments' own time, evaluations")


def test_options_are_those_of_the_simulation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = values(capsys)
    v = values(capsys, "--tokens", "400", "--environment", "2", "--turns", "3", "rollout.max_turns=3")
    described, column = v["time"]["trajectories"], v["time"]["columns"]["mean"]
    assert (described["lengths"], described["environment"], described["turns"]) == ("--tokens", "--environment", 3)
    assert column["written"] == 400 and described["environment_s"] == 6.0
    assert column["tools"] == pytest.approx(6.0), "three turns of two seconds, all trajectories at once"
    causes = {cause["name"] for cause in v["time"]["causes"]}
    assert "lengths of the trajectories" not in causes
    assert "lengths of the trajectories" in {cause["name"] for cause in plain["time"]["causes"]}
    assert not any("environments" in part for part in v["time"]["not_counted"])
    assert "lengths are given by --tokens, 6.0 s of the environment" in dry_run_text.text(v)
    like = values(capsys, "--like", str(recorded(tmp_path)))["time"]
    assert like["trajectories"]["lengths"] == "--like" and like["trajectories"]["environment_s"] == 2.0
    assert (like["columns"]["mean"]["read"], like["columns"]["mean"]["written"]) == (6, 4)
    assert parquet.read_steps(tmp_path / "trajectories" / "step_000001.parquet")


def test_shared_prompts_are_noted_and_their_length_may_be_a_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def shared(*words: str) -> tuple[float, str]:
        v = values(capsys, "policy.share_prefixes=true", *words)
        return v["seconds"]["train"], next(note for note in v["notes"] if note.startswith("policy.share_prefixes: "))

    assert not any("share_prefixes" in note for note in values(capsys)["notes"])
    _, note = shared("policy.micro_tokens=1")
    assert "sharing saves nothing here" in note and note.endswith("or share_prefixes=false")
    longer, shorter = (shared(f"rollout.max_prompt_tokens={n}", "policy.micro_tokens=32768") for n in (400, 100))
    assert longer[0] != shorter[0] and "assumed from rollout.max_prompt_tokens" in longer[1]
    run = str(recorded(tmp_path))
    like = [shared("--like", run, f"rollout.max_prompt_tokens={n}", "policy.micro_tokens=32768") for n in (400, 100)]
    assert like[0] == like[1] and "for prompts of 3 tokens (as recorded)" in like[0][1]


def test_seconds_of_environments_leave_assumed_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    plain, v = values(capsys), values(capsys, "--environment", "5")
    assert v["time"]["trajectories"]["lengths"] == "assumed"
    assert v["seconds"]["generate"] == pytest.approx(plain["seconds"]["generate"]) and v["seconds"]["tools"] > 0
    assert plain["seconds"]["tools"] == 0


TIMES = ["environment.times.start_s=4", "environment.times.turn_s=1", "environment.times.end_s=20"]


def test_assumed_seconds_of_environments_count(capsys: pytest.CaptureFixture[str]) -> None:
    turns = ["rollout.max_turns=6", "rollout.env_timeout_s=1000"]
    plain, v = values(capsys, *turns), values(capsys, *turns, *TIMES)
    described = v["time"]["trajectories"]
    assert (described["environment"], described["turns"]) == ("environment.times", 3), "half of the turns"
    assert described["environment_s"] == pytest.approx(4 + 3 * 1 + 20, rel=0.01)
    assert plain["seconds"]["tools"] == 0 < v["seconds"]["tools"]
    assert v["seconds"]["generate"] == pytest.approx(plain["seconds"]["generate"])
    causes = {cause["name"]: cause for cause in v["time"]["causes"]}
    assert causes["seconds of environments"]["low"] < 1 < causes["seconds of environments"]["high"]
    assert not any("environments" in part for part in v["time"]["not_counted"])
    text = dry_run_text.text(v)
    assert " s of the environment by environment.times, 3 turns" in text
    given = values(capsys, *turns, *TIMES, "--environment", "10", "--turns", "2")["time"]
    assert given["trajectories"]["environment_s"] == pytest.approx(4 + 2 * 10 + 20, rel=0.01)
    assert "seconds of environments" not in {cause["name"] for cause in given["causes"]}


def test_trajectories_take_turns_in_slots(capsys: pytest.CaptureFixture[str]) -> None:
    """Compares with the bound by hand: 64 trajectories of at least 100 s in 8 slots."""
    end = ["environment.times.end_s=100", "rollout.env_timeout_s=100000", "environment.slots=8"]
    seconds = values(capsys, *end)["seconds"]
    assert seconds["generate"] + seconds["tools"] >= 64 * 100 / 8


def test_a_share_of_groups_with_a_signal_is_taken_from_a_run(tmp_path: Path) -> None:
    differ = {"rollout/groups_differ": 0.25}
    assert workload.signal_share([{}, differ, {"rollout/groups_differ": 0.75}], 8) == pytest.approx(0.5)
    filtered = {"rollout/groups_differ": 1.0, "rollout/groups_left_out": 24.0, "rollout/groups_missing": 0.0}
    assert workload.signal_share([filtered], 8) == pytest.approx(0.25)
    assert workload.signal_share([{"rollout/groups_differ": 0.0}], 8) == workload.LEAST_SIGNAL
    assert workload.signal_share([{"rollout/groups_differ": 1.5}], 8) == 1.0
    assert workload.signal_share([{}], 8) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout/groups_differ": 0.25}\n')
    (tmp_path / "config.yaml").write_text(
        "data: {prompts_per_step: 8, of_another_version: 1}\nmodel: {path: '${oc.env:ABSENT_HERE}'}\n"
        "environment: {options: {search: {api_key: '***'}}}\n"
    )
    assert workload._signal_of(tmp_path) == 0.25


def test_a_cpu_with_measured_rates_has_seconds(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cpu.json"
    rates = {"rates.tflops": 0.05, "rates.tflops_share": 0.5, "rates.memory_gb_s": 10.0, "rates.engine_step_us": 3000.0}
    file.write_text(json.dumps({"device": {"name": "two cores"}, "rates": rates}))
    given = ["--config", str(inputs / "config.yaml"), "--dry-run", "--json"]
    assert main([*given, f"cluster.rates_file={file}"]) == 0
    v = json.loads(capsys.readouterr().out)
    assert v["sync"] is None and v["seconds"]["step"] > 0 and v["time"]["run"]["gpus"] == 0
    assert "GPU-hours" not in dry_run_text.text(v) and "measured: two cores, cpu.json" in dry_run_text.text(v)
    assert main([*given, "--tokens", "5"]) == 2
    assert "--tokens: no rates of a CPU are known" in capsys.readouterr().err
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["time"] is None
