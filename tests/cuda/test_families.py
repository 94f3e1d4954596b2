"""Every family's Transformer Engine layers compute as the local ones do, forward and backward, in two ranks.

Python of Transformer Engine and megatron-core is real; kernels are plain torch (`te_kernels`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from skyrl_mega.config.schema import PolicyConfig
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from tests.cuda import te
from tests.cuda.programs import run
from tests.cuda.te_families import Pass
from tests.cuda.test_te_specs import FAMILIES, contents
from tests.cuda.test_waits import off
from tests.families.page import accepts
from tests.support.engines import build_model_of

pytestmark = [
    pytest.mark.skipif(bool(te.absent()), reason=te.absent()),
    pytest.mark.nightly,
]

EXPERTS = 8
MODELS = {
    name: hf | {"num_experts_per_tok": EXPERTS} | ({"topk_group": hf["n_group"]} if "n_group" in hf else {})
    for name, hf in FAMILIES.items()
}
"""Models in which every token takes all experts: with a choice, bfloat16's noise would change some tokens' experts."""
LAYOUTS = {
    "tensor": ParallelDims(2, tensor=2, expert=2),
    "ring": ParallelDims(2, context=2, expert=2),
    "all_to_all": ParallelDims(2, context=2, expert=2, context_exchange="all_to_all"),
}
POLICIES = {spec: PolicyConfig(spec=spec) for spec in ("te", "local")}
HIDDEN, GRADIENT, FEWER_TOKENS = 0.03, 0.06, 0.09
"""Largest distance of hidden states, and of a parameter's gradient, relative to the local spec's: bfloat16's noise. A
context rank's gradient is a sum over half of the tokens, with more noise."""


@pytest.fixture(scope="module", params=LAYOUTS)
def parallel(request: pytest.FixtureRequest) -> ParallelDims:
    return LAYOUTS[request.param]


def taken(parallel: ParallelDims) -> list[str]:
    """Returns the models that do not refuse the layout."""
    return [name for name, hf in MODELS.items() if accepts(partial(architecture(hf).check_layout, hf, parallel))]


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory, parallel: ParallelDims) -> dict[str, list[dict[str, Pass]]]:
    """Returns spec → rank → family → results, for the families that take the layout."""
    folder = tmp_path_factory.mktemp("families")
    for name in taken(parallel):
        hf = MODELS[name]
        (folder / "model" / name).mkdir(parents=True)
        build_model_of(folder / "model" / name, hf, seed=4)
    return run("te_families", folder, parallel, POLICIES)


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_transformer_engine_compute_what_local_ones_do(
    passes: dict[str, list[dict[str, Pass]]], parallel: ParallelDims, name: str
) -> None:
    if name not in taken(parallel):
        pytest.skip("the family refuses the layout")
    hf, plain = MODELS[name], "kv_lora_rank" not in MODELS[name] and name != "gpt_oss"  # both have YaRN's factor
    for rank in range(parallel.ranks):
        engine, local = (passes[spec][rank][name] for spec in ("te", "local"))
        assert engine.fused == (True, plain) and local.fused == (False, False)
        assert off(engine.hidden, local.hidden) < HIDDEN
        by_content = [
            gradients_by_content(hf, parallel, rank, spec, of) for spec, of in (("te", engine), ("local", local))
        ]
        wrong = {
            content: error
            for content, gradient in by_content[1].items()
            if not (error := off(by_content[0][content], gradient))
            < (GRADIENT if parallel.context == 1 else FEWER_TOKENS)
        }
        assert not wrong


def gradients_by_content(
    hf: dict[str, Any], parallel: ParallelDims, rank: int, spec: str, of: Pass
) -> dict[tuple[Any, ...], Any]:
    """Returns gradients by a parameter's Hugging Face tensors, without those that no token has."""
    return {
        holds: gradient
        for name, holds in contents(hf, parallel, rank, spec)
        if (gradient := of.gradients.get(name.removeprefix("0."))) is not None and np.abs(gradient).max() > 0
    }
