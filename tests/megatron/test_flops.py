"""Tests of FLOPs computed from the model's shapes, against torch's count while a rank computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.megatron import objectives
from skyrl_mega.models.registry import architecture as blocks_of
from skyrl_mega.models.tiny import build
from skyrl_mega.planner.flops import BACKWARD, PassWork, flops
from skyrl_mega.trajectories.sequences import Sequences
from tests.megatron import layouts
from tests.support.ranks import run_ranks
from tests.weights.grids import MODELS


def counts(rank: int, address: str, path: Path, batch: Sequences) -> Any:
    """Returns the FLOPs by operator, of log-probs and of an optimizer step."""
    opened = layouts.open_rank(rank, address, path, layouts.layout(1), layouts.policy_config(micro_tokens=4096))
    _, micros = layouts.deal(batch, opened)
    totals = []
    for compute in (lambda: opened.logprobs(micros), lambda: opened.train(micros, objectives.supervised)):
        with FlopCounterMode(display=False) as counter:
            compute()
        totals.append({str(op): n for op, n in counter.get_flop_counts()["Global"].items()})
    return totals


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_products_are_those_that_torch_counts(tmp_path: Path, architecture: str) -> None:
    """Compares forward FLOPs exactly. A backward pass adds twice as many, and the head's logits once more: the second
    computation saves memory (`megatron.vocab_parallel`) and does not count as the model's work."""
    build(BuildConfig(architecture=architecture), tmp_path / "m", seed=1)
    hf = json.loads((tmp_path / "m" / "config.json").read_text())
    model = flops(blocks_of(hf).describe(hf))
    batch = layouts.some_batch(100, longest=60)
    weights = batch["weights"].clone()
    weights[::3] = 0.0  # positions without a request for log-probs
    batch["weights"] = weights
    [(forward, step)] = run_ranks(1, counts, tmp_path / "m", batch)
    load = PassWork.of(batch.lengths.tolist(), float((weights != 0).sum()))
    products = model.forward(replace(load, pairs=0.0))
    assert forward == {"aten.mm": products}
    assert step == {"aten.mm": BACKWARD * products + model.head * load.logprob_tokens}
    assert 0 < load.logprob_tokens < load.tokens - len(batch), "first tokens are never asked for"


def test_attention_is_every_pair_of_a_token_and_one_not_after_it() -> None:
    hf = MODELS["qwen3"]
    decoder = blocks_of(hf).describe(hf)
    lengths = [1, 5, 12]
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            q, k, v = torch.randn(3, decoder.heads, length, decoder.head_dim)
            for i in range(length):
                shares = torch.bmm(q[:, i : i + 1], k[:, : i + 1].transpose(1, 2)).softmax(-1)
                torch.bmm(shares, v[:, : i + 1])
    assert counter.get_total_flops() * decoder.layers == flops(decoder).attention * PassWork.of(lengths, 0).pairs
