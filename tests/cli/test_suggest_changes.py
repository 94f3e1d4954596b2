"""Comparison of the given settings with the first choice of `--suggest`: each change alone, and seconds by phase."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skyrl_mega.cli import dry_run, suggest_changes, suggest_changes_text, suggest_rows, suggest_simulated, suggest_text
from skyrl_mega.cli.suggest_rows import Rows
from skyrl_mega.cli.train import main
from skyrl_mega.config.compose import compose
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import rates, search

FILE = "configs/searchr1_30b.yaml"
GIVEN, RATES = rates.with_measured(compose(FILE, []))


def planned(*choice: str) -> tuple[Rows, dict[str, Any]]:
    """Returns rows with the recipe as it is and a choice by these settings, and the model's config.json."""
    made = []
    for settings in ((), choice):
        config = compose(FILE, list(settings))
        hf, _ = dry_run.checked(config)
        config, _ = rates.with_measured(config)
        decoder = architecture(hf).describe(hf)
        made.append(suggest_rows.row(suggest_rows.as_suggestion(config, hf, decoder), decoder))
    return Rows(made[0], None, made[1:], None), dict(hf)


def dry_run_values(capsys: pytest.CaptureFixture[str], *settings: str) -> dict[str, Any]:
    assert main(["--config", FILE, "--dry-run", "--json", *settings]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def test_each_change_alone_takes_the_seconds_of_its_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    engines = ("rollout.engines=8", "rollout.tensor=4", "rollout.memory_fraction=0.65")
    kept = "residency.keep=[optimizer,parameters]"
    rows, hf = planned("policy.micro_tokens=32768", *engines, kept, "policy.ranks=32")
    changes = suggest_changes.changes(GIVEN, rows, hf)
    assert {tuple(dict(each.change)) for each in changes} == {
        ("policy.micro_tokens",),
        ("rollout.engines", "rollout.tensor", "rollout.memory_fraction"),
        ("residency.keep",),
    }, "32 ranks are those of policy.ranks=null"
    planned_rows = [each.row for each in changes if each.row]
    assert [row.seconds for row in planned_rows] == sorted(row.seconds for row in planned_rows) and len(
        planned_rows
    ) == 3
    for each, row in zip(changes, planned_rows, strict=True):
        alone = {"policy": ("policy.micro_tokens=32768",), "rollout": engines, "residency": (kept,)}
        plan = dry_run_values(capsys, *alone[each.change[0][0].partition(".")[0]])
        assert row.seconds == pytest.approx(plan["seconds"]["step"], abs=plan["seconds"]["sync"] + 0.1)
        assert row.free == plan["shared"]["margin"]
        assert row.host == max(node["host_memory_total"] for node in plan["nodes"])


def test_a_change_that_cannot_run_alone_has_the_error_and_comes_last() -> None:
    rows, hf = planned("residency.keep=null", "rollout.memory_fraction=0.3", "policy.micro_tokens=16384")
    *others, last = suggest_changes.changes(GIVEN, rows, hf)
    assert others and all(each.row and each.error is None for each in others)
    assert last.change == (("residency.keep", None),) and last.row is None
    assert str(last.error).startswith("rollout.memory_fraction = 0.6: on shared GPUs")
    choice = rows.choices[0].suggestion
    found = search.SearchResult(32, 1, (choice,), True)
    comparison = suggest_changes.ChoiceComparison([last])
    report = suggest_text.Report(found, rows, choice.config, architecture(hf).describe(hf), comparison=comparison)
    line = suggest_text.text(report).partition("each change alone:\n")[2].splitlines()[0]
    assert line == f"  residency.keep=null cannot run alone: {last.error}"


def test_a_change_faster_than_the_first_choice_is_told() -> None:
    """The search does not try every engine: the settings as they are may have better ones."""
    rows, hf = planned("policy.micro_tokens=65536", "rollout.memory_fraction=0.4")
    changes = suggest_changes.changes(GIVEN, rows, hf)
    lines = suggest_changes_text.change_lines(rows, changes)
    assert [line for line in lines if "faster than row 1" in line] == [
        "  policy.micro_tokens=65536 alone is faster than row 1; the search did not try it with row 0's other settings"
    ]


def test_nothing_is_compared_with_one_difference_or_other_gpus() -> None:
    rows, hf = planned("policy.micro_tokens=16384")
    assert suggest_changes.changes(GIVEN, rows, hf) == []
    rows, hf = planned("policy.micro_tokens=16384", "cluster.nodes=8", "rollout.engines=8")
    assert suggest_changes.changes(GIVEN, rows, hf) == []
    assert suggest_changes.changes(GIVEN, Rows(None, "why", rows.choices, None), hf) == []


def test_what_both_rows_share_does_not_make_the_gain_uncertain() -> None:
    """Rates that both rows need in the same way drop out; the formulas stay."""
    rows, hf = planned("policy.ranks=32")
    bar = suggest_changes.ratio_bar(rows, hf, RATES)
    assert bar is not None and [cause.name for cause in bar.causes] == ["formulas"]
    rows, hf = planned("policy.micro_tokens=65536")
    bar = suggest_changes.ratio_bar(rows, hf, RATES)
    assert bar is not None and bar.low < 1 / 1.2 and bar.high > 1.2
    largest = max(bar.causes[:-1], key=lambda cause: cause.high / cause.low)
    assert largest.name in ("cluster.rates.layer_us", "lengths of the trajectories")
    assert suggest_changes.ratio_bar(Rows(None, "why", rows.choices, None), hf, RATES) is None
    fewer = suggest_changes.compare(GIVEN, rows, hf, RATES, gpus=16)
    assert fewer.changes == [] and fewer.ratio is None, "the search was for another number of GPUs"


def test_seconds_by_phase_are_those_of_the_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SECONDS", 1)
    monkeypatch.setattr(suggest_simulated, "SECONDS", 0)
    assert main(["--config", FILE, "run.steps=50", "--suggest", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {"0": result["given"], "1": result["rows"][0]}
    for number, row in rows.items():
        phases = result["phases"][number]
        assert sum(phases.values()) - 2 * phases["ahead"] == pytest.approx(row["seconds"])
    assert main(["--config", FILE, "run.steps=50", "--suggest"]) == 0
    out = capsys.readouterr().out
    assert "\nseconds by phase, and 50 steps without evaluations and checkpoints:\n" in out
    hours = rows["0"]["gpu_hours"] * 50
    line = next(line for line in out.partition("seconds by phase")[2].splitlines() if line.split()[:1] == ["0"])
    assert float(line.split()[-1]) == pytest.approx(hours, abs=0.5)
