"""A layer of gpt-oss's experts against the layer of transformers: results and gradients in float64."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from skyrl_mega.megatron.layer_spec import use_biased_experts
from skyrl_mega.models.blocks.base import MegatronPlace
from skyrl_mega.models.blocks.fused_experts import FusedExperts
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.box import Shard
from skyrl_mega.weights.exchange.exchange import local_view
from tests.megatron.layouts import join_ranks, layout
from tests.support.ranks import run_ranks

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
SOURCE, TARGET = "model.layers.0", "0.decoder.layers.0"
Tensors = dict[str, Tensor]


def test_results_and_gradients_are_those_of_transformers() -> None:
    (errors, clamped), *_ = run_ranks(1, _compare)
    assert clamped > 0.01  # a share of gates and ups reaches the limit
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}
    assert len(errors) == 7  # the result, and weight and bias of the router and of both layers


def _compare(rank: int, address: str) -> tuple[dict[str, float], float]:
    """Returns the largest relative errors of the result and the gradients, and the share of clamped activations.
    megatron-core computes probabilities in float32."""
    join_ranks(rank, address, layout(1))
    torch.manual_seed(0)
    theirs = GptOssMLP(GptOssConfig(**SIZES)).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter))
    block = FusedExperts.of({"model_type": "gpt_oss", **SIZES})
    shard = _shard(block)
    ours = _layer(block)
    own = {f"{TARGET}.mlp.{name}": parameter for name, parameter in ours.named_parameters()}
    assert list(own) == [name for name in shard.params if not name.endswith("layernorm.weight")]
    _fill(block, shard, own, {name: parameter.data for name, parameter in theirs.named_parameters()})

    x = torch.randn(10, 1, SIZES["hidden_size"], dtype=torch.float64)
    answer, _ = ours(x)
    expected, _ = theirs(x)
    weights = torch.randn_like(expected)
    (answer * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: torch.zeros_like(value) for name, value in own.items()}
    named = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    _fill(block, shard, gradients, {name: value for name, value in named.items() if value is not None})
    errors = {"result": float(((answer - expected).abs().max() / expected.abs().max()).detach())}
    for name, value in own.items():
        assert value.grad is not None
        kind, error = ".".join(name.split(".")[-2:]), (value.grad - gradients[name]).abs().max()
        errors[kind] = max(errors.get(kind, 0.0), float(error / gradients[name].abs().max()))
    rows = x.flatten(0, 1) @ theirs.experts.gate_up_proj.data[0] + theirs.experts.gate_up_proj_bias.data[0]
    return errors, float((rows > 7).double().mean())


def _shard(block: FusedExperts) -> Shard:
    place, builder = MegatronPlace(layout(1), layout(1).coordinates(0), 0, "local"), ShardBuilder(_tensors(block))
    block.megatron_pieces(builder, place, TARGET, SOURCE)
    return builder.shard()


def _tensors(block: FusedExperts) -> dict[str, tuple[int, ...]]:
    return block.hf_tensors(SOURCE)


def _layer(block: FusedExperts) -> Any:
    config = TransformerConfig(
        **block.megatron_args([True]).transformer,
        num_layers=1,
        hidden_size=block.hidden,
        num_attention_heads=2,
        params_dtype=torch.float64,
        moe_router_dtype="fp64",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False,
    )
    mlp = get_gpt_decoder_block_spec(config, use_transformer_engine=False).layer_specs[0].submodules.mlp
    use_biased_experts(mlp)
    layer = build_module(mlp, config=config)
    layer.set_layer_number(1)
    return layer


def _fill(block: FusedExperts, shard: Shard, params: Tensors, values: Tensors) -> None:
    """Copies values, named as in transformers below the feed-forward part, into parameters."""
    forms = block.disk_forms(SOURCE)
    with torch.no_grad():
        for piece in shard.pieces:
            name = piece.tensor.removeprefix(f"{SOURCE}.mlp.")
            if name not in values:
                continue
            value = values[name]
            if piece.tensor in forms:
                value = forms[piece.tensor].from_disk(value, _tensors(block)[piece.tensor])
            local = shard.shaped(piece.param, params[piece.param])
            local_view(local, piece.offset, piece.box).copy_(value[piece.box.slices()])
