"""`--simulate`: its tables, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_mega.cli.train import main

SMALL = ["data.prompts_per_step=16", "data.samples_per_prompt=4", "data.mini_batch_prompts=null"]
SEARCH = ["--config", "configs/searchr1_30b.yaml", *SMALL]


def test_modes_and_splits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEARCH, "--simulate", "--json", "--turns", "2", "--environment", "5,1"]) == 0
    found = json.loads(capsys.readouterr().out)
    modes = [(row["mode"], row["max_staleness"], row["shared"]) for row in found["modes"]]
    assert modes[0] == ("off", 0, True) and not any(shared for *_, shared in modes[1:])
    assert [row[:2] for row in modes[1:]] == [("off", 0), ("one_step", 1), ("full", 1), ("full", 2), ("full", 4)]
    apart = found["modes"][1:]
    assert apart[-1]["seconds"] <= apart[0]["seconds"], "more staleness is not slower"
    for row in found["splits"]:
        assert row["policy.ranks"] + 8 * row["rollout.engines"] == 32
    assert {row["policy.ranks"] for row in apart} == {
        min(found["splits"], key=lambda row: row["seconds"])["policy.ranks"]
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*SEARCH, "--tokens", "5,1"], "--tokens: it is for --simulate"),
        ([*SEARCH, "--simulate", "--tokens", "five"], "--tokens five: allowed is MEAN,SIGMA"),
        ([*SEARCH, "--simulate", "--environment", "1,2,3"], "--environment 1,2,3: allowed"),
        ([*SEARCH, "--simulate", "--environment", "-1"], "allowed is MEAN,SIGMA"),
        ([*SEARCH, "--simulate", "--turns", "0"], "--turns 0: allowed"),
        ([*SEARCH, "--simulate", "--like", "nowhere"], "--like nowhere: there are no trajectories"),
        ([*SEARCH, "--simulate", "--like", "nowhere", "--turns", "2"], "--turns: --like takes all of it"),
        (["--config", "configs/quickstart.yaml", "--simulate"], "cluster.device = cpu"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and error.count("\n") == 0
