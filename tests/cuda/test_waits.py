"""Tests of a Transformer Engine layer: same results as the local layer, fused or not, at most one host wait, and the
planner's bytes for the backward pass.

All Python of Transformer Engine and megatron-core is real; kernels are plain torch (`te_kernels`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from skyrl_mega.config.derived import FUSIONS, fused
from skyrl_mega.config.schema import BuildConfig, MoeConfig, PolicyConfig
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import build, hf_config
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.activations import kept_layer
from tests.cuda import te
from tests.cuda.programs import run
from tests.cuda.te_layers import Answer
from tests.support.selected import selected, some_nightly

pytestmark = pytest.mark.skipif(bool(te.absent()), reason=te.absent())

POLICIES = {
    "fused": PolicyConfig(spec="te"),
    "nothing fused": PolicyConfig(spec="te", fusions=[]),
    **{fusion: PolicyConfig(spec="te", fusions=[fusion]) for fusion in FUSIONS},
    "selective": PolicyConfig(spec="te", recompute="selective"),
    "moe": PolicyConfig(spec="te", recompute="moe"),
    "balanced": PolicyConfig(spec="te", moe=MoeConfig(aux_loss=0.1)),
    "local": PolicyConfig(spec="local"),
    "deepep": PolicyConfig(spec="te", moe=MoeConfig(dispatcher="deepep")),
}
RARELY = set(FUSIONS) - {"swiglu"}
"""Policies computed nightly only."""
DISPATCH = ("synchronize", "megatron/core/transformer/moe/token_dispatcher.py:_maybe_dtoh_and_synchronize")
"""The wait for the numbers of tokens for each rank and expert: calls to NCCL and cuBLAS need these numbers on the
host."""
LAYERS = 2
MODEL = BuildConfig(layers=LAYERS, hidden=128, heads=8, head_dim=32, experts=16, experts_per_token=4, expert_ffn=64)
PARALLEL = ParallelDims(2, tensor=2, expert=2)
CONTEXT = {name: ParallelDims(2, context=2, expert=2, context_exchange=name) for name in ("ring", "all_to_all")}
"""Exchange of context ranks → layout."""


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """Returns the results of two ranks with each selected policy."""
    asked = {*selected(request, "name"), *POLICIES.keys() - RARELY}
    folder = tmp_path_factory.mktemp("waits")
    build(MODEL, folder / "model", seed=1)
    return run("te_layers", folder, PARALLEL, {name: of for name, of in POLICIES.items() if name in asked})


@pytest.fixture(scope="module", params=CONTEXT)
def in_context(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ParallelDims, dict[str, list[Answer]]]:
    """Returns the layout and the results of two context-parallel ranks, for each exchange."""
    folder, parallel = tmp_path_factory.mktemp("context"), CONTEXT[request.param]
    build(MODEL, folder / "model", seed=1)
    policies = {name: POLICIES[name] for name in ("fused", "moe", "local")}
    return parallel, run("te_layers", folder, parallel, policies)


def test_what_the_settings_ask_for_is_in_the_model(answers: dict[str, list[Answer]]) -> None:
    names = ("apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion", "bias_activation_fusion")
    fused = {policy: tuple(ranks[0].fields[name] for name in names) for policy, ranks in answers.items()}
    assert fused["fused"] == fused["deepep"] == (True,) * 4
    assert fused["balanced"] == (True, True, False, True)
    assert fused["nothing fused"] == fused["local"] == (False,) * 4


@pytest.mark.parametrize(("name", "passes"), [("fused", 1), ("balanced", 1), ("selective", 1), ("moe", 2)])
def test_the_host_waits_for_nothing_but_the_dispatchers_counts(
    answers: dict[str, list[Answer]], name: str, passes: int
) -> None:
    """Counts a wait for a layer's forward pass, another for a repeated pass, and none for a backward pass."""
    for answer in answers[name]:
        assert dict(answer.waits) == {DISPATCH: passes * LAYERS}


def test_with_deepep_no_call_of_a_layer_waits(answers: dict[str, list[Answer]]) -> None:
    """Counts no wait in the layers; only DeepEP's dispatch waits for the numbers of tokens."""
    for answer in answers["deepep"]:
        assert dict(answer.waits) == {}


def test_unfused_layers_wait_where_the_desk_check_said(answers: dict[str, list[Answer]]) -> None:
    """Checks the counter itself: two waits for queries, two for keys, and two for the sort of tokens."""
    rope = "megatron/core/models/common/embeddings/rope_utils.py:_apply_rotary_pos_emb_thd"
    sort = "megatron/core/transformer/moe/moe_utils.py:permute"
    for answer in answers["nothing fused"]:
        assert dict(answer.waits) == {
            ("tolist", rope): 2 * LAYERS,
            ("bool", rope): 2 * LAYERS,
            ("masked_select", sort): 2 * LAYERS,
            DISPATCH: LAYERS,
        }


@pytest.mark.parametrize("name", some_nightly([name for name in POLICIES if name != "local"], RARELY))
def test_fused_layers_compute_what_local_ones_do(answers: dict[str, list[Answer]], name: str) -> None:
    """Compares results in bfloat16, within the noise of the format."""
    for engine, local in zip(answers[name], answers["local"], strict=True):
        assert off(engine.hidden, local.hidden) < 0.02
        assert set(engine.gradients) and all(np.isfinite(g).all() for g in engine.gradients.values())
        assert off(engine.gradients[EMBEDDING], local.gradients[EMBEDDING]) < 0.05


@pytest.mark.parametrize("name", ["fused", "moe"])
def test_parts_of_sequences_are_attended_to_without_a_wait(
    in_context: tuple[ParallelDims, dict[str, list[Answer]]], name: str
) -> None:
    """Compares context parallelism with the local spec's. In a ring, the local spec's method is another."""
    passes = 2 if name == "moe" else 1
    parallel, results = in_context
    for engine, local in zip(results[name], results["local"], strict=True):
        assert engine.fields.get("cp_comm_type") == ("a2a" if parallel.by_heads else None)
        assert dict(engine.waits) == {DISPATCH: passes * LAYERS}
        assert off(engine.hidden, local.hidden) < 0.02
        assert off(engine.gradients[EMBEDDING], local.gradients[EMBEDDING]) < 0.05
        assert planned(engine, POLICIES[name], parallel=parallel) == pytest.approx(engine.kept, rel=0.06)


@pytest.mark.parametrize("name", some_nightly([n for n in POLICIES if n not in ("local", "deepep")], RARELY))
def test_a_layer_keeps_what_the_planner_says(answers: dict[str, list[Answer]], name: str) -> None:
    for answer in answers[name]:
        assert planned(answer, POLICIES[name]) == pytest.approx(answer.kept, rel=0.06)


def test_a_fused_activation_function_keeps_three_widths_less(answers: dict[str, list[Answer]]) -> None:
    """Compares the kept bytes: unfused layers keep silu, up and the product before the router's probability, for every
    row."""
    for alone, without in zip(answers["swiglu"], answers["nothing fused"], strict=True):
        assert without.kept - alone.kept == 3 * without.routed * MODEL.expert_ffn * BYTES
        policies = POLICIES["nothing fused"], POLICIES["swiglu"]
        assert planned(without, policies[0]) - planned(without, policies[1]) == without.kept - alone.kept


def planned(
    answer: Answer, policy: PolicyConfig, model: BuildConfig = MODEL, parallel: ParallelDims = PARALLEL
) -> float:
    """Returns the bytes of the planner's formula for the actual rows of the experts."""
    hf = hf_config(model)
    even = answer.tokens / parallel.tensor * model.experts_per_token * parallel.expert_tensor
    how: dict[str, Any] = dict(recompute=policy.recompute, spec="te", fused=fused(policy, "te", True))
    decoder = architecture(hf).describe(hf)
    return kept_layer(decoder, parallel, 0, answer.tokens, BYTES, imbalance=answer.routed / even, **how)


BYTES = 2
"""Bytes of a bfloat16 element."""
EMBEDDING = "embedding.word_embeddings.weight"
"""A parameter with a gradient that depends on every layer."""


@pytest.mark.parametrize("name", ["selective", "moe"])
def test_what_is_recomputed_changes_no_gradient(answers: dict[str, list[Answer]], name: str) -> None:
    for recomputed, plain in zip(answers[name], answers["fused"], strict=True):
        assert set(recomputed.gradients) == set(plain.gradients)
        for parameter, gradient in recomputed.gradients.items():
            np.testing.assert_allclose(gradient, plain.gradients[parameter], rtol=1e-5, atol=1e-7, err_msg=parameter)


def off(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Returns the distance relative to the expected length."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
