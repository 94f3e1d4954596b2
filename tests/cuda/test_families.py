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
from tests.cuda.te_families import BOTH_TYPES, Pass
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
Passes = dict[str, list[dict[tuple[str, str], Pass]]]
"""Spec → rank → family and type of the weights → results."""
POLICIES = {spec: PolicyConfig(spec=spec) for spec in ("te", "local")}
HIDDEN, GRADIENT, MORE_NOISE = 0.03, 0.06, 0.09
"""Largest distance of hidden states, and of a parameter's gradient, relative to the local spec's: bfloat16's noise. A
context rank's gradient is a sum over half of the tokens, with more noise; qwen2_moe's shared gate, a single row, has
more noise too (0.076 on a CPU without AVX-512)."""
EXACT = 1e-4
"""Largest distance in float32, of hidden states and of a parameter's gradient."""
NOISE = 2.0
"""Largest ratio of Transformer Engine's error in bfloat16 to the local spec's, for a model with biases. Errors are
distances from float32, relative to it. Gradients of biases are sums with much cancellation: either spec's error is up
to 0.2, in other parameters than the other spec's. The gradient of a layer's sinks, a few numbers, may cancel completely
(errors of 2.7 and 0.9): sinks are compared in float32 alone."""


@pytest.fixture(scope="module", params=LAYOUTS)
def parallel(request: pytest.FixtureRequest) -> ParallelDims:
    return LAYOUTS[request.param]


def taken(parallel: ParallelDims) -> list[str]:
    """Returns the models that do not refuse the layout."""
    return [name for name, hf in MODELS.items() if accepts(partial(architecture(hf).check_layout, hf, parallel))]


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory, parallel: ParallelDims) -> Passes:
    """Returns the results for the families that take the layout."""
    folder = tmp_path_factory.mktemp("families")
    for name in taken(parallel):
        hf = MODELS[name]
        (folder / "model" / name).mkdir(parents=True)
        build_model_of(folder / "model" / name, hf, seed=4)
    return run("te_families", folder, parallel, POLICIES)


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_transformer_engine_compute_what_local_ones_do(
    passes: Passes, parallel: ParallelDims, name: str
) -> None:
    if name not in taken(parallel):
        pytest.skip("the family refuses the layout")
    plain = "kv_lora_rank" not in MODELS[name] and name not in BOTH_TYPES  # the others have YaRN's factor
    for rank in range(parallel.ranks):
        engine, local = (passes[spec][rank][name, "bfloat16"] for spec in ("te", "local"))
        assert engine.fused == (True, plain) and local.fused == (False, False)
        if name in BOTH_TYPES:
            continue
        errors = errors_of(passes, parallel, rank, (name, "te", "bfloat16"), (name, "local", "bfloat16"))
        assert errors.pop("hidden") < HIDDEN
        for content, error in errors.items():
            noisy = parallel.context > 1 or "shared_expert_gate" in str(content)
            assert error < (MORE_NOISE if noisy else GRADIENT), content


@pytest.mark.parametrize("name", BOTH_TYPES)
def test_both_specs_are_equal_in_float32_and_about_as_far_from_it_in_bfloat16(
    passes: Passes, parallel: ParallelDims, name: str
) -> None:
    for rank in range(parallel.ranks):
        exact = name, "local", "float32"
        errors = errors_of(passes, parallel, rank, (name, "te", "float32"), exact)
        assert not {content: error for content, error in errors.items() if not error < EXACT}
        engine, local = (errors_of(passes, parallel, rank, (name, spec, "bfloat16"), exact) for spec in POLICIES)
        assert engine.pop("hidden") < NOISE * local.pop("hidden")
        for errors in (engine, local):
            for content in [content for content in errors if "sinks" in str(content)]:
                del errors[content]
        assert max(engine.values()) < NOISE * max(local.values())


def errors_of(
    passes: Passes, parallel: ParallelDims, rank: int, actual: tuple[str, str, str], expected: tuple[str, str, str]
) -> dict[Any, float]:
    """Returns the distances of gradients by content, and of hidden states as "hidden", between two passes of a rank;
    each pass by family, spec and type of the weights."""
    gradients, hidden = [], []
    for name, spec, dtype in (actual, expected):
        result = passes[spec][rank][name, dtype]
        gradients.append(gradients_by_content(MODELS[name], parallel, rank, spec, result))
        hidden.append(result.hidden)
    errors: dict[Any, float] = {content: off(gradients[0][content], value) for content, value in gradients[1].items()}
    return errors | {"hidden": off(hidden[0], hidden[1])}


def gradients_by_content(
    hf: dict[str, Any], parallel: ParallelDims, rank: int, spec: str, of: Pass
) -> dict[tuple[Any, ...], Any]:
    """Returns gradients by a parameter's Hugging Face tensors, without absent ones and those that are all zero."""
    return {
        holds: gradient
        for name, holds in contents(hf, parallel, rank, spec)
        if (gradient := of.gradients.get(name.removeprefix("0."))) is not None and np.abs(gradient).max() > 0
    }
