"""Layouts of published models that need many nodes: each passes every check of a plan, and fits by the estimates."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner.engine_weights import engine_bytes
from skyrl_mega.planner.fit import parallel_of, problem
from skyrl_mega.planner.times import elements

RECIPE = Path(__file__).parents[2] / "configs" / "dapo.yaml"
GLM = "policy.layout={tensor: 8, pipeline: 4, expert: 32}"
H200 = "cluster.gpu_memory_gib=139.8"
CASES = {
    "GLM-4.5, H100, 8 × TP16": ("GLM-4.5", f"cluster.nodes=16 {GLM} rollout.engines=8 rollout.tensor=16"),
    "GLM-4.5, H200, 16 × TP8": ("GLM-4.5", f"cluster.nodes=16 {GLM} rollout.engines=16 rollout.tensor=8 {H200}"),
}


def overrides(model: str, arguments: str) -> list[str]:
    """Returns command-line settings: a space divides settings, except within braces."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character == "{") - (character == "}")
        if character == " " and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [f"model.path=models/{model}", "run.name=large", *parts]


def settings(model: str, arguments: str) -> Config:
    return compose(RECIPE, [*overrides(model, arguments), "policy.micro_tokens=16384"])


@pytest.mark.parametrize(("model", "arguments"), CASES.values(), ids=CASES)
def test_a_large_model_has_a_layout_that_fits(model: str, arguments: str) -> None:
    config, hf = settings(model, arguments), known(model)
    check(config, planned=True)
    decoder, (parallel, _) = architecture(hf).describe(hf), parallel_of(config)
    architecture(hf).check_layout(hf, parallel)
    assert problem(config, decoder) is None
    engines = config.rollout.engines
    held = engine_bytes(config, decoder) * parallel.ranks / engines / (2 * elements(decoder))
    assert 1 <= held < 1.25, "an engine's workers hold the model, and small parts of it several times"


def test_an_engine_of_several_nodes_is_planned_and_refused_by_a_run() -> None:
    config = settings(*CASES["GLM-4.5, H100, 8 × TP16"])
    with pytest.raises(UserError, match=r"^rollout.tensor = 16: allowed is at most cluster.gpus_per_node = 8$"):
        check(config)
    config.rollout.tensor = 12
    with pytest.raises(UserError, match=r"^rollout.tensor = 12: .* = 8, and in --dry-run a multiple of 8$"):
        check(config, planned=True)
