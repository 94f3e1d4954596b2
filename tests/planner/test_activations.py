"""The formula of a layer's activations against the tensors saved by autograd in a real megatron-core layer.

Attention and norm save the tensors of a GPU's fused kernels (query, key, value, output and normaliser; input and
scale); the rest is megatron-core's own. The tests therefore prove the sum, not these kernels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.megatron import layer_spec, packed_attention
from skyrl_mega.megatron.model import unwrap_gpt
from skyrl_mega.megatron.packing import PackedRow, pack
from skyrl_mega.models.blocks.base import Work
from skyrl_mega.models.registry import ARCHITECTURES, architecture
from skyrl_mega.models.tiny import build, hf_config
from skyrl_mega.planner.activations import HOST_PAGE, LongestRow, activations, kept_layer
from skyrl_mega.trajectories.sequences import Sequences
from tests.megatron import layouts
from tests.support.ranks import run_ranks

TOKENS = 1024
SIZES: dict[str, Any] = dict(layers=2, hidden=256, heads=8, kv_heads=2, head_dim=32, ffn=384, max_length=2048)
MODELS = {
    "dense": BuildConfig(architecture="qwen3", **SIZES),
    "dense with bias": BuildConfig(architecture="qwen2", **SIZES),
    "experts": BuildConfig(experts=16, experts_per_token=4, expert_ffn=64, **SIZES),
}


class Fused(torch.autograd.Function):
    """A function that saves the tensors of flash attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, torch.zeros(q.shape[:2]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError


class FusedNorm(torch.autograd.Function):
    """A function that saves the tensors of a fused RMSNorm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.zeros(x.shape[:-1]))
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError


def saved(rank: int, address: str, path: Path, recompute: str, fused: bool) -> int:
    """Returns the bytes kept by the second layer for its backward pass, each storage once, without parameters."""
    layouts.join_ranks(0, address, layouts.layout(1))
    return saved_by_model(path, recompute, fused)[1]


def saved_by_each(rank: int, address: str, folder: Path) -> dict[str, list[int]]:
    """Returns the bytes kept by both layers of every model in a folder, by the model's name."""
    layouts.join_ranks(0, address, layouts.layout(1))
    return {path.name: saved_by_model(path, "none", False) for path in sorted(folder.iterdir())}


def fused_attention(
    _: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, packed_seq_params: PackedRow, **__: Any
) -> Tensor:
    """Stands for a kernel that keeps rotated queries and keys, values and its output."""
    if (rotation := packed_seq_params.rotation) is not None:
        q, k = rotation(q), rotation(k)
    return Fused.apply(q, k, v).flatten(1)


def saved_by_model(path: Path, recompute: str, fused: bool) -> list[int]:
    """Returns the bytes kept by each of a model's two layers, on a joined rank."""
    packed_attention.PackedAttention.forward = fused_attention  # type: ignore
    layer_spec.RMSNorm.forward = lambda self, x: FusedNorm.apply(x, self.weight)  # type: ignore
    options = {"bias_activation_fusion": True} if fused else {}
    policy = layouts.policy_config(recompute=recompute, options=options)
    torch._dynamo.config.disable = True  # a fused function would be compiled
    opened = layouts.load_model(path, layouts.layout(1), policy, torch.bfloat16)
    rng = np.random.default_rng(0)
    batch = Sequences.of([rng.integers(0, 90, 256).tolist() for _ in range(TOKENS // 256)])
    micro = pack(batch, context=1, context_rank=0, tensor=1)
    parameters = {p.untyped_storage().data_ptr() for p in opened.params.values()}
    storages: list[dict[int, int]] = []
    alive: list[Tensor] = []  # keeps addresses unique

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storages and storage.data_ptr() not in parameters:
            storages[-1][storage.data_ptr()] = storage.nbytes()
        alive.append(t)
        return t

    model = opened.chunks[0].train()
    for part in (*unwrap_gpt(model).decoder.layers, unwrap_gpt(model).decoder.final_layernorm):
        part.register_forward_pre_hook(lambda *_: storages.append({}))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(micro.tokens, micro.positions, None, packed_seq_params=micro.row)
    assert micro.row.rotation is None, "a row must not keep the rotation of a pass"
    return [sum(kept.values()) for kept in storages[:2]]


@pytest.mark.parametrize(
    ("model", "recompute", "fused"),
    [*((model, "none", False) for model in MODELS), ("experts", "moe", False), ("dense", "none", True)],
)
def test_a_layer_saves_what_the_formula_says(model: str, recompute: str, fused: bool, tmp_path: Path) -> None:
    """Compares a layer, also with megatron-core's fused activation function if set in `policy.options`."""
    build(MODELS[model], tmp_path / "model")
    hf = hf_config(MODELS[model])
    d = architecture(hf).describe(hf)
    kernels = frozenset({"swiglu"} if fused else ())
    formula = kept_layer(d, layouts.layout(1), 0, TOKENS, 2, recompute=recompute, spec="local", fused=kernels)
    actual = run_ranks(1, saved, tmp_path / "model", recompute, fused)[0]
    assert formula == pytest.approx(actual, rel=0.05)


FAMILIES = {
    name: BuildConfig(architecture=name, experts=16, experts_per_token=4, expert_ffn=64, **SIZES)
    for name in ARCHITECTURES
    if ARCHITECTURES[name].small
}
"""A model of every family with experts; the second layer has experts, the first is another in some families."""


def test_a_layer_of_every_family_saves_what_the_formula_says(tmp_path: Path) -> None:
    for name, config in FAMILIES.items():
        build(config, tmp_path / "models" / name)
    actual = run_ranks(1, saved_by_each, tmp_path / "models")[0]
    formulas = {}
    for name, config in FAMILIES.items():
        d = architecture(hf_config(config)).describe(hf_config(config))
        work = Work(layouts.layout(1), TOKENS, 2, imbalance=1.0)
        formulas[name] = [sum(block.saved_bytes(work) for block in d.layer(index)) for index in range(2)]
    assert actual.keys() == formulas.keys()
    for name, layers in formulas.items():
        assert layers == pytest.approx(actual[name], rel=0.05), name


@pytest.mark.parametrize("model", MODELS)
def test_what_is_recomputed_needs_less_the_more_it_is(model: str) -> None:
    """Compares the recompute settings: Transformer Engine's dense layer has no cheap part, so selective equals none."""
    hf = hf_config(MODELS[model])
    d = architecture(hf).describe(hf)
    none, selective, moe, full = (
        activations(d, layouts.layout(1), 0, LongestRow(TOKENS, 1), 2, recompute=kind, logit_chunk=64).train
        for kind in ("none", "selective", "moe", "full")
    )
    assert none >= selective > moe > 0 and none > full > 0
    assert (none > selective) == (model == "experts")


@pytest.mark.parametrize(("away", "there"), [(0, 6), (2, 5), (3, 4), (6, 2), (9, 2)])
def test_what_layers_keep_in_host_memory_is_not_on_the_device(away: int, there: int) -> None:
    """Compares with the layers counted by `tests/megatron/test_activation_offload.py`."""
    model = replace(MODELS["experts"], layers=6)
    hf = hf_config(model)
    d = architecture(hf).describe(hf)
    plain, moved = (
        activations(
            d, layouts.layout(1), 0, LongestRow(TOKENS, 1), 2, recompute="none", offload_layers=n, logit_chunk=64
        )
        for n in (0, away)
    )
    kept = kept_layer(d, layouts.layout(1), 0, TOKENS, 2, recompute="none", spec="local", fused=frozenset())
    assert plain.train - moved.train == (6 - there) * kept
    assert moved.host == min(away, 6) * (kept + HOST_PAGE) and moved.forward == plain.forward


def test_each_micro_batch_of_a_pipeline_leaves_its_layers_that_stay_on_the_device() -> None:
    model = replace(MODELS["experts"], layers=8)
    hf = hf_config(model)
    d, parallel = architecture(hf).describe(hf), layouts.layout(2, pipeline=2)
    plain, moved = (
        activations(d, parallel, 0, LongestRow(TOKENS, 4), 2, recompute="none", offload_layers=n, logit_chunk=64)
        for n in (0, 3)
    )
    kept = kept_layer(d, layouts.layout(1), 0, TOKENS, 2, recompute="none", spec="local", fused=frozenset())
    assert plain.train - moved.train == (2 * 4 - (2 * 1 + 1)) * kept  # two micro-batches are under way
    assert moved.host == 2 * 3 * (kept + HOST_PAGE)
