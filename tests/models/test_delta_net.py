"""The block of gated delta nets: pieces of every rank and worker, in both layouts of the files, and vLLM's settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.models.blocks.base import DeltaNetSizes, EngineCut, MegatronPlace, Spec, Work
from skyrl_mega.models.blocks.gdn import GatedDeltaNet
from skyrl_mega.models.families import qwen3_5_moe_text
from skyrl_mega.models.families.qwen3_next import FULL, LINEAR, describe
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.box import Shard
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.parameters import stage

SIZES = DeltaNetSizes(key_heads=4, value_heads=8, key_width=3, value_width=5, window=4)
KEYS = {
    "hidden_size": 6,
    "linear_num_key_heads": SIZES.key_heads,
    "linear_num_value_heads": SIZES.value_heads,
    "linear_key_head_dim": SIZES.key_width,
    "linear_value_head_dim": SIZES.value_width,
    "linear_conv_kernel_dim": SIZES.window,
}
FILES = {name: GatedDeltaNet.read(KEYS, separate=name == "separate") for name in ("fused", "separate")}
SOURCE = "model.layers.0"
HF = hf_config(BuildConfig(architecture="qwen3_next", layers=4))


def policy(block: GatedDeltaNet, tensor: int, spec: Spec) -> list[Shard]:
    shards = []
    for rank in range(tensor):
        b, parallel = ShardBuilder(block.hf_tensors(SOURCE)), ParallelDims(tensor, tensor=tensor)
        block.megatron_pieces(b, MegatronPlace(parallel, parallel.coordinates(rank), 0, spec), "0", SOURCE)
        shards.append(b.shard())
    return shards


def engine(block: GatedDeltaNet, tensor: int) -> list[Shard]:
    shards = []
    for worker in range(tensor):
        b = ShardBuilder(block.hf_tensors(SOURCE))
        block.engine_pieces(b, EngineCut(tensor), worker, SOURCE)
        shards.append(b.shard())
    return shards


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("files", FILES)
def test_ranks_and_workers_hold_every_element(files: str, tensor: int) -> None:
    """Numbers all elements of the files, and counts them on the ranks."""
    block, start, numbered = FILES[files], 0, {}
    for name, shape in block.hf_tensors(SOURCE).items():
        numbered[name] = np.arange(start, start + np.prod(shape)).reshape(shape)
        start += int(np.prod(shape))
    for shards in (policy(block, tensor, "local"), policy(block, tensor, "te"), engine(block, tensor)):
        held: Counter[int] = Counter()
        for shard in shards:
            covered = {name: np.zeros(shape, int) for name, shape in shard.params.items()}
            for piece in shard.pieces:
                into = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.box.shape, strict=True))
                covered[piece.param][into] += 1
                held.update(numbered[piece.tensor][piece.box.slices()].flatten().tolist())
            assert all((count == 1).all() for count in covered.values())
        assert set(held) == set(range(start)) and set(held.values()) == {1, tensor}  # norms are whole


def test_both_layouts_of_files_give_the_same_input_projection() -> None:
    """Fills the fused projections with the rows of the separate ones, grouped by key head."""
    rng = np.random.default_rng(0)
    separate = {
        name: rng.random(shape).astype(np.float32) for name, shape in FILES["separate"].hf_tensors(SOURCE).items()
    }
    prefix = f"{SOURCE}.linear_attn"
    qkv, z, b, a = (separate[f"{prefix}.in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a"))
    query, key, value = np.split(qkv, [SIZES.keys, 2 * SIZES.keys])
    fused = dict(separate)
    for name, parts in (("in_proj_qkvz", (query, key, value, z)), ("in_proj_ba", (b, a))):
        by_head = [part.reshape(SIZES.key_heads, -1, part.shape[1]) for part in parts]
        fused[f"{prefix}.{name}.weight"] = np.concatenate(by_head, 1).reshape(-1, qkv.shape[1])
    for rank in range(2):
        shards = [policy(FILES[files], 2, "local")[rank] for files in ("fused", "separate")]
        values = [filled(shard, tensors) for shard, tensors in zip(shards, (fused, separate), strict=True)]
        assert values[0].keys() == values[1].keys()
        assert all((values[0][name] == values[1][name]).all() for name in values[0])


def filled(shard: Shard, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    params = {name: np.full(shape, np.nan, np.float32) for name, shape in shard.params.items()}
    for piece in shard.pieces:
        into = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.box.shape, strict=True))
        params[piece.param][into] = tensors[piece.tensor][piece.box.slices()]
    return params


def test_every_fourth_layer_has_full_attention_by_default() -> None:
    kinds = [type(describe({k: v for k, v in HF.items() if k != "layer_types"}).layer(i)[0]).__name__ for i in range(4)]
    assert kinds == ["GatedDeltaNet"] * 3 + ["GroupedQueryAttention"]
    other = describe(HF | {"layer_types": [FULL, LINEAR, LINEAR, FULL]})
    assert [other.layer(i)[0] == other.layer(0)[0] for i in range(4)] == [True, False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [LINEAR] * 4}, "a list of 4 entries with both linear_attention and full_attention"),
        ({"layer_types": [FULL, LINEAR]}, "a list of 4"),
        ({"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads 2"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"is_causal": False}, "is_causal"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"attn_output_gate": False}, "attn_output_gate"),
    ],
)
def test_what_cannot_be_computed_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        describe(HF | change)
    with pytest.raises(UserError, match=message):
        qwen3_5_moe_text.describe(HF | change)


def test_qwen3_5_needs_weights_of_experts_that_add_up_to_one() -> None:
    """Refuses null, which vLLM takes for False."""
    for value in (None, False):
        with pytest.raises(UserError, match="norm_topk_prob"):
            qwen3_5_moe_text.describe(HF | {"norm_topk_prob": value})


def test_vllm_keeps_states_in_float32() -> None:
    block = FILES["fused"]
    assert block.engine_arguments("cuda") == {"mamba_ssm_cache_dtype": "float32"}
    assert block.engine_arguments("cpu") == {"mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False}


def test_a_plan_trains_decay_rates() -> None:
    """Decay rates are in float32 like correction biases, but have gradients and optimizer state."""
    decoder = describe(HF)
    assert len(decoder.float32_tensors) == 3 and not decoder.frozen_tensors
    (parameters,) = stage(decoder, ParallelDims(), 0)
    assert not parameters.untrained(freeze_router=False).any()


def test_local_layers_keep_more_for_the_backward_pass() -> None:
    work = Work(ParallelDims(2, tensor=2), tokens=100, itemsize=2, imbalance=1.0, spec="te")
    local = FILES["fused"].saved_bytes(replace(work, spec="local"))
    assert local > FILES["fused"].saved_bytes(work) > 100 * 2 * (2 * SIZES.convolved + 4 * SIZES.values) / 2
