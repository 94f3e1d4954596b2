"""Every file of `configs/` composes, passes every check and is planned, even without model and data."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.cli.train import main
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from tests.support.machine import within
from tests.support.recipes import GPU_RECIPES, RECIPES

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 2**30
LONG = ("swe_8b", "swe_14b", "swe_30b", "swe_30b_pivot")
"""Recipes with sequences of 32k tokens and more; few are of the maximum length."""
SECONDS = 20.0
"""Limit of this process's CPU seconds for a dry run."""


def own_gpus(file: Path) -> list[str]:
    """Returns the settings for policy and engines on separate GPUs: twice the nodes."""
    cluster = compose(file).cluster
    if not cluster.shared:
        return []
    ranks = cluster.nodes * cluster.gpus_per_node
    return ["cluster.shared=false", f"cluster.nodes={2 * cluster.nodes}", f"policy.ranks={ranks}"]


def own_code(file: Path) -> list[str]:
    """Returns the setting for the code beside a recipe, which the recipe names relative to the repository."""
    code = file.with_suffix(".py")
    return [f"environment.classes.agent={code}:CalculatorAgent"] if code.exists() else []


def dry_run(file: Path, settings: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Returns the output of `--dry-run --json`."""
    start = time.process_time()
    code = main(["--config", str(file), *own_code(file), *settings, "--dry-run", "--json"])
    assert within(time.process_time() - start, SECONDS)
    out, err = capsys.readouterr()
    assert (code, err) == (0, ""), err
    return dict(json.loads(out))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_dry_run_needs_no_model_no_data_and_no_gpu(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = own_gpus(file)
    check(compose(file, settings))
    planned = dry_run(file, settings, capsys)
    assert planned["config"]["run"]["name"].startswith(file.stem)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", GPU_RECIPES, ids=lambda file: file.stem)
def test_shared_gpus_are_planned(file: Path) -> None:
    check(compose(file), planned=True)


def test_what_a_comment_says_is_left_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Compares the figures in GiB of a setting's comment, with and without the setting, over all files."""
    comments = [line for file in RECIPES for line in file.read_text().splitlines() if "GiB" in line.partition("#")[2]]
    [(_, _, comment)] = [line.partition("#") for line in comments]
    with_it, without = map(float, re.findall(r"\d+\.\d", comment))
    for given, figure in (([], with_it), (["policy.recompute=none"], without)):
        planned = dry_run(CONFIGS / "searchr1_30b.yaml", given, capsys)
        assert f"{planned['shared']['margin'] / GIB:.1f}" == f"{figure:.1f}"


@pytest.mark.parametrize("eager", ["true", "false"])
@pytest.mark.parametrize("file", GPU_RECIPES, ids=lambda file: file.stem)
def test_every_recipe_leaves_memory(
    file: Path, eager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks for at least a GiB of free memory by the estimates, on GPUs of an H100's size, with and without graphs."""
    monkeypatch.chdir(tmp_path)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    v = dry_run(file, [f"rollout.eager={eager}", "algorithm.kl.coefficient=0.001"], capsys)
    assert v["gpu_memory"] == int(79.1 * GIB)
    left = v["gpu_memory"] - max(rank["memory"]["peak"] for rank in v["policy"])
    assert (v["shared"]["margin"] if v["shared"] else left) >= GIB
    assert [note for note in v["notes"] if note.startswith("tight")] == []
    assert v["engines"]["at_once"] >= (8 if file.stem in LONG else 30), "sequences of the longest, in the cache at once"


def test_there_are_recipes_for_gpus() -> None:
    assert len(GPU_RECIPES) >= 9
    assert [file for file in RECIPES if compose(file).cluster.device != "cpu"] == GPU_RECIPES


def test_a_dry_run_says_what_it_has_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = CONFIGS / "skyrl_sql_7b.yaml"
    assert main(["--config", str(file), *own_gpus(file), "--dry-run"]) == 0
    output = capsys.readouterr().out
    for path in (
        "models/Qwen2.5-Coder-7B-Instruct",
        "data/skyrl_sql/train.parquet",
        "data/skyrl_sql/validation.parquet",
    ):
        assert f"{path} is not here" in output


@pytest.mark.parametrize(
    "name, line",
    [
        (
            "dapo",
            "model.path: models/Qwen3-30B-A3B-Base is not there; "
            "`hf download Qwen/Qwen3-30B-A3B-Base --local-dir models/Qwen3-30B-A3B-Base` fetches it",
        ),
        (
            "sql_cpu",
            "model.path: runs/models/smollm2-135m is not there; "
            "`python -m skyrl_mega.models.smollm2 --output runs/models/smollm2-135m` makes it",
        ),
    ],
)
def test_a_run_says_how_to_get_the_model(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = CONFIGS / f"{name}.yaml"
    assert main(["--config", str(file), *own_gpus(file)]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_dense_model_of_32b_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["model=qwen3_32b", "policy.layout.tensor=8", "policy.layout.expert=1"]
    assert main(["--config", str(CONFIGS / "dapo.yaml"), *settings, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("it fits 2 nodes") and "32.76 · 10⁹ parameters, 64 layers" in output


def test_groups_are_exchanged_on_the_command_line() -> None:
    config = compose(CONFIGS / "dapo.yaml", ["model=qwen3_4b_base", "cluster=h100_1x8", "algorithm=grpo"])
    assert config.model.path == "models/Qwen3-4B-Base"
    assert (config.cluster.nodes, config.algorithm.dual_clip, config.algorithm.clip_high) == (1, None, 0.2)
    with pytest.raises(
        UserError, match=r"task/chess is not in .*; allowed is dapo_math, .*, skyrl_sql, swe, swe_pivot$"
    ):
        compose(CONFIGS / "dapo.yaml", ["task=chess"])
