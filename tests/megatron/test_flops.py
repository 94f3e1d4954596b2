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
from skyrl_mega.models.decoder import Decoder
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
    products = replace(model, attention=0.0).forward(load)
    assert forward == {"aten.mm": products}
    assert step == {"aten.mm": BACKWARD * products + model.head * load.logprob_tokens}
    assert 0 < load.logprob_tokens < load.tokens - len(batch), "first tokens are never asked for"


@pytest.mark.parametrize("window", [None, 1, 5, 7, 500])
def test_attention_is_every_pair_of_a_token_and_one_not_after_it(window: int | None) -> None:
    """Counts the products with the keys of each token; the last layer alone has a window."""
    hf = MODELS["qwen3"]
    decoder = blocks_of(hf).describe(hf)
    (attention, mlp), *_ = decoder.kinds
    windowed = (replace(attention, window=window), mlp)  # type: ignore[type-var]
    decoder = replace(decoder, kinds=((attention, mlp), windowed), order=(0,) * (decoder.layers - 1) + (1,))
    lengths = [1, 5, 12]
    operations = decoding = 0
    for size, layers in ((None, decoder.layers - 1), (window, 1)):
        for length in lengths:
            counts = [one_token(decoder, at, size) for at in range(length)]
            operations += layers * sum(counts)
            decoding += layers * counts[-1]
    figures = flops(decoder)
    assert operations == sum(map(figures.attending, lengths))
    assert operations == replace(figures, layers=0.0, head=0.0).forward(PassWork.of(lengths, 0))
    assert decoding == sum(map(figures.decoding_at, lengths))


def one_token(decoder: Decoder, at: int, window: int | None) -> int:
    """Returns the operations counted by torch for the token at position `at` in a layer with this window."""
    first = 0 if window is None else max(0, at - window + 1)
    q, k, v = torch.randn(3, decoder.facts["heads"], at + 1, decoder.facts["head_dim"])
    with FlopCounterMode(display=False) as counter:
        shares = torch.bmm(q[:, at:], k[:, first:].transpose(1, 2)).softmax(-1)
        torch.bmm(shares, v[:, first:])
    return int(counter.get_total_flops())
