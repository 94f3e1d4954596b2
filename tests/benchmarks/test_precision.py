"""The benchmark of FP8 recipes without runs: the settings, and the report on the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import precision
from benchmarks.learning_results import Results
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.precision import RECIPES


@pytest.mark.parametrize("recipe", ["model", *RECIPES])
@pytest.mark.parametrize("name", [*precision.RUNS])
def test_settings_are_ones_that_a_run_takes(name: str, recipe: str) -> None:
    config = compose(precision.ROOT / "configs" / f"{name}.yaml", precision.settings(name, recipe, 3))
    check(config)
    assert (config.policy.precision.recipe, config.run.seed) == (recipe, 3)
    start = compose(precision.ROOT / "configs" / f"{name}.yaml", precision.warmed_up(name, 3))
    check(start)
    assert config.model.path == f"{start.run.directory}/{start.run.name}/model" and start.warmup.steps


@pytest.mark.parametrize(("after", "held"), [(0.88, True), (0.86, False)])
def test_a_recipe_is_held_against_the_same_seeds(tmp_path: Path, after: float, held: bool) -> None:
    results = Results(tmp_path / "precision.json", [])
    for seed, score in ((0, 0.9), (1, 0.1)):
        results.keep("quickstart model", seed, {"before": 0.5, "after": score, "mismatch": 1e-6, "seconds": 10})
    results.keep("quickstart mxfp8", 0, {"before": 0.5, "after": after, "mismatch": 2e-3, "seconds": 20})
    lines, all_held = precision.table(results, ["quickstart"], ["model", "fp8_current", "mxfp8"])
    assert all_held is held
    assert len(lines) == 3 and f"{after - 0.9:+.3f}" in lines[2] and "2.0e-03" in lines[2]
