"""Tests of a block and a model family defined only in this file: layouts, sizes and costs come from the block alone.

The block is a feed-forward part without a gate, down(relu²(up(x))), followed by a norm of the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch

from skyrl_mega.common.errors import UserError
from skyrl_mega.models import huggingface
from skyrl_mega.models.blocks.base import (
    Block,
    Cut,
    EngineCut,
    MegatronPlace,
    MegatronSettings,
    Messages,
    Tensors,
    TokenFlops,
    Work,
)
from skyrl_mega.models.blocks.gqa import GroupedQueryAttention
from skyrl_mega.models.config_json import Hf, integer
from skyrl_mega.models.decoder import Decoder, read_decoder
from skyrl_mega.models.registry import ARCHITECTURES, Architecture, architecture
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.activations import LongestRow, activations
from skyrl_mega.planner.engine_weights import engine_elements, kv_bytes_per_token
from skyrl_mega.planner.flops import flops
from skyrl_mega.planner.layout_text import policy_rows
from skyrl_mega.planner.parameters import stage
from skyrl_mega.planner.times import elements
from tests.weights.grids import MODELS, cut, global_tensors

HF: dict[str, Any] = {**MODELS["llama"], "model_type": "plain", "intermediate_size": 96}
HIDDEN, WIDTH, LAYERS = HF["hidden_size"], 96, HF["num_hidden_layers"]


@dataclass(frozen=True)
class PlainMlp(Block):
    hidden: int
    width: int

    def hf_tensors(self, source: str) -> Tensors:
        up, down = (self.width, self.hidden), (self.hidden, self.width)
        return {
            f"{source}.mlp.up.weight": up,
            f"{source}.mlp.down.weight": down,
            f"{source}.mlp.norm.weight": (self.hidden,),
        }

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        return MegatronSettings({"ffn_hidden_size": self.width, "gated_linear_unit": False})

    def megatron_cuts(self) -> Sequence[Cut]:
        return (Cut("tensor", "columns of a plain layer", self.width, "plain"),)

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        part = self.width // place.parallel.tensor
        start = place.coords.tp * part
        b.rows(b.param(f"{target}.mlp.fc1.weight", part, self.hidden), 0, f"{source}.mlp.up.weight", start, part)
        b.columns(b.param(f"{target}.mlp.fc2.weight", self.hidden, part), f"{source}.mlp.down.weight", start, part)
        b.whole(f"{target}.mlp.norm.weight", f"{source}.mlp.norm.weight")

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        part = self.width // cut.tensor
        start = worker % cut.tensor * part
        b.rows(b.param(f"{source}.mlp.up.weight", part, self.hidden), 0, f"{source}.mlp.up.weight", start, part)
        b.columns(b.param(f"{source}.mlp.down.weight", self.hidden, part), f"{source}.mlp.down.weight", start, part)
        b.whole(f"{source}.mlp.norm.weight", f"{source}.mlp.norm.weight")

    def engine_cuts(self, cut: EngineCut) -> Sequence[tuple[str, int]]:
        return (("columns of a plain layer", self.width),)

    def flops(self) -> TokenFlops:
        return TokenFlops(2 * 2 * self.hidden * self.width)

    def saved_bytes(self, work: Work) -> float:
        return work.tokens * work.itemsize * 1000

    def messages(self, parallel: ParallelDims) -> Messages:
        return Messages(tensor=self.hidden)


def describe(hf: Hf) -> Decoder:
    attention = GroupedQueryAttention.read(hf, qk_norm="none", qkv_bias=False)
    mlp = PlainMlp(integer(hf, "hidden_size"), integer(hf, "intermediate_size"))
    return read_decoder(hf, [(attention, mlp)] * integer(hf, "num_hidden_layers"))


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "plain", Architecture("plain", describe, "PlainForCausalLM"))


def test_its_tensors_and_counts() -> None:
    decoder = architecture(HF).describe(HF)
    tensors = architecture(HF).tensors(HF)
    mlp = {name: shape for name, shape in tensors.items() if ".mlp." in name}
    assert len(mlp) == 3 * LAYERS and tensors["model.layers.3.mlp.down.weight"] == (HIDDEN, WIDTH)
    assert elements(decoder) == sum(map(prod, huggingface.tensors(decoder).values()))
    llama = architecture(MODELS["llama"]).describe(MODELS["llama"])
    theirs = 2 * 3 * HIDDEN * MODELS["llama"]["intermediate_size"]
    assert flops(decoder).layers - flops(llama).layers == LAYERS * (4 * HIDDEN * WIDTH - theirs)
    assert kv_bytes_per_token(decoder, 2, 2) == kv_bytes_per_token(llama, 2, 2) > 0
    assert architecture(HF).megatron_settings(HF).transformer["gated_linear_unit"] is False


@pytest.mark.parametrize("tensor", [1, 2])
def test_its_pieces_fill_every_parameter(tensor: int) -> None:
    parallel = ParallelDims(2 * tensor, tensor=tensor, pipeline=2, expert_tensor=tensor)
    policy = architecture(HF).megatron_layout(HF, parallel, "local")
    engines = architecture(HF).engine_layout(HF, tensor)
    whole = global_tensors(policy.tensors)
    up, down, norm = (whole[f"model.layers.3.mlp.{name}.weight"] for name in ("up", "down", "norm"))
    for tp in range(tensor):
        last = cut(policy.shards[tensor + tp], whole)
        worker = cut(engines.shards[tp], whole)
        for shard, name in ((last, "0.decoder.layers.1.mlp.{}"), (worker, "model.layers.3.mlp.{}")):
            first, second = ("fc1", "fc2") if shard is last else ("up", "down")
            assert torch.equal(shard[name.format(f"{first}.weight")], up.chunk(tensor)[tp])
            assert torch.equal(shard[name.format(f"{second}.weight")], down.chunk(tensor, dim=1)[tp])
            assert torch.equal(shard[name.format("norm.weight")], norm)


def test_its_memory() -> None:
    decoder, parallel = architecture(HF).describe(HF), ParallelDims(4, tensor=2, pipeline=2, expert_tensor=2)
    shard = architecture(HF).megatron_shard(HF, parallel, 2, "local")
    (chunk,) = stage(decoder, parallel, 1)
    assert chunk.numel.tolist() == [prod(shape) for shape in shard.params.values()]
    copies = dict(zip(shard.params, chunk.copies.tolist(), strict=True))
    assert copies["0.decoder.layers.0.mlp.norm.weight"] == 2 and copies["0.decoder.layers.0.mlp.fc1.weight"] == 1
    worker = architecture(HF).engine_shard(HF, 2, 1)
    assert engine_elements(decoder, EngineCut(2), 1).all == sum(map(prod, worker.params.values()))
    row = LongestRow(tokens=128, count=1)
    saved = activations(decoder, ParallelDims(), 0, row, 2, recompute="none", logit_chunk=64).train
    more = activations(decoder, ParallelDims(), 0, LongestRow(256, 1), 2, recompute="none", logit_chunk=64).train
    assert more - saved > LAYERS * 128 * 2 * 1000


def test_its_refusals_and_its_column() -> None:
    hf = HF | {"intermediate_size": 90}
    with pytest.raises(UserError, match=r"policy\.layout\.tensor: 4 does not divide the model's 90 columns of a plain"):
        architecture(hf).check_layout(hf, ParallelDims(4, tensor=4, expert_tensor=4))
    with pytest.raises(UserError, match=r"rollout\.tensor: 4 does not divide the model's 90 columns of a plain"):
        architecture(hf).check_engine(hf, 4)
    rows = policy_rows(ParallelDims(2, tensor=2, expert_tensor=2), architecture(HF).describe(HF))
    assert [row["plain"] for row in rows] == ["0-47", "48-95"]


def test_layers_that_megatron_cannot_have_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(hf: Hf) -> Decoder:
        attention = GroupedQueryAttention.read(hf, qk_norm="none", qkv_bias=False)
        return read_decoder(hf, [(attention, PlainMlp(64, 96)), (attention, PlainMlp(64, 128))])

    monkeypatch.setitem(ARCHITECTURES, "mixed", Architecture("mixed", mixed, "MixedForCausalLM"))
    hf = HF | {"model_type": "mixed"}
    with pytest.raises(UserError, match="layers differ in what megatron-core calls ffn_hidden_size: 96 and 128"):
        architecture(hf).megatron_settings(hf)
