"""`python -m skyrl_mega.weights plan`: a table, JSON, or a one-line error message."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from skyrl_mega.cli.weights import main
from tests.weights.grids import REAL

CONFIGS = Path(__file__).parents[2] / "configs"
THREE = ["policy.ranks=8", "policy.layout.tensor=2", "rollout.engines=4", "rollout.tensor=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("3B")
    (folder / "config.json").write_text(json.dumps(REAL["3B"]))
    return folder


def test_a_table_that_lines_up(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(model), *THREE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("bfloat16: 8 policy ranks (TP2) → 4 × TP2, on GPUs of their own")
    nodes = lines[2:5]
    assert len({len(line) for line in nodes}) == 1
    assert nodes[0].split()[:3] == ["node", "policy", "engines"]
    assert nodes[1].split()[:3] == ["0", "0-7", "·"] and nodes[2].split()[:3] == ["1", "·", "0-7"]
    # A copy of 3.086 · 10⁹ parameters enters the engines' node over 8 NICs of 50 GB/s.
    assert nodes[2].split()[6] == "6.172"
    assert lines[-2].endswith("lower bound 0.0154 s")
    assert re.fullmatch(
        r"host time in addition: 2\.\d+ s in the first sync, 0\.0\d+ s later, 0\.0\d+ s with checksums", lines[-1]
    )


def test_json_says_every_rank_and_nic(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(model / "config.json")
    assert main(["plan", "--json", "--model", file, *THREE, "cluster.topology.nics_per_node=2"]) == 0
    result = json.loads(capsys.readouterr().out)
    size = result["bytes"]["network"]
    assert result["bytes"]["nic_in"][:2] == [0, 0] and sum(result["bytes"]["nic_in"]) == size
    assert len(result["bytes"]["engine_rank_in"]) == 8
    assert result["predicted_seconds"] == pytest.approx(size / 2 / 50e9, rel=0.01)
    assert result["bound_seconds"] == pytest.approx(size / 2 / 50e9, rel=1e-6)


def test_shared_gpus_use_no_nic(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--model", str(model), *THREE, "cluster.shared=true"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"]["network"] == result["bytes"]["fabric"] == 0
    assert result["bytes"]["local"] == sum(result["bytes"]["engine_rank_in"])
    assert result["devices"]["policy"] == result["devices"]["engines"]


def test_a_recipe_is_planned_before_its_model_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(CONFIGS / "quickstart.yaml"), "model.path=nowhere"]
    assert main(["plan", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy_ranks"] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "model.path is not set"),
        (["--model", "nowhere"], "nowhere is not there"),
        (["policy.rank=3"], "did you mean policy.ranks?"),
        (["policy.ranks=0"], "policy.ranks = 0: allowed is"),
        (["cluster.topology.nics_per_node=16"], "cluster.topology.nics_per_node = 16: allowed is at most"),
        (["--model", "{model}", "policy.ranks=8", "policy.layout.pipeline=5"], "policy.layout: tensor 1 × pipeline 5"),
        (["--model", "{model}", "policy.ranks=10", "policy.layout.pipeline=5"], "or give policy.layout.first_stage"),
        (["--model", "{model}", "rollout.tensor=3"], "rollout.tensor: 3"),
        (["--what"], "unrecognized arguments: --what"),
    ],
)
def test_what_is_wrong_is_one_line(
    model: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *(argument.format(model=model) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_unknown_commands_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plans"]) == 2
    assert "invalid choice: 'plans'" in capsys.readouterr().err
