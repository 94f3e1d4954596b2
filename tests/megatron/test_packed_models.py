"""Whole models over packed rows: a token's hidden state and gradients are those of its sequence alone.

The families are those whose layers see more of a row than full attention does: states and convolutions of gated delta
nets, sliding windows with sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skyrl_mega.config.schema import BuildConfig, PolicyConfig
from skyrl_mega.megatron.model import build_model
from skyrl_mega.megatron.packing import MicroBatch, pack
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Sequences
from tests.megatron.layouts import CPU, join_ranks
from tests.support.ranks import run_ranks

SIZES: dict[str, Any] = dict(layers=2, hidden=16, heads=4, kv_heads=2, head_dim=8, experts=4, expert_ffn=8)
WINDOW = 8
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": hf_config(BuildConfig(architecture="qwen3_next", **SIZES))
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
    },
    "gpt_oss": hf_config(BuildConfig(architecture="gpt_oss", **SIZES)) | {"sliding_window": WINDOW},
}
LENGTHS = (1, 1, 2, 3, 5, 7, 8, 9, 16, 17, 30, 63, 65)
"""Lengths of the sequences: around the convolution's and attention's windows, and around a chunk's size."""
JOINED = ([3, 30], [8, 9], [16, 65])
"""Lengths of sequences that a wrong description takes for a single one."""
SEED = 1
"""Seed of weights and packings. With seed 0 a sequence amplifies float32's rounding to 1.2e-5."""
PACKINGS = 200
TOLERANCE = 1e-5
"""Largest difference from a sequence alone, relative to the largest value alone."""


@dataclass
class Passes:
    """Results of a row."""

    hidden: Tensor
    """Last hidden states [T, H]."""
    inputs: Tensor
    """Gradients of the embeddings' outputs [T, H]."""
    weights: Tensor
    """Gradients of all parameters, one after another."""


def examine(rank: int, address: str) -> dict[str, tuple[list[float], list[float]]]:
    """Returns for each model the largest differences of random packings, and of packings whose description joins two
    sequences."""
    join_ranks(rank, address, ParallelDims(1))
    return {name: _examine(hf) for name, hf in MODELS.items()}


def _examine(hf: dict[str, Any]) -> tuple[list[float], list[float]]:
    (chunk,) = build_model(hf, PolicyConfig(), ParallelDims(1), torch.float32, CPU)
    rng, generator = np.random.default_rng(SEED), torch.Generator().manual_seed(SEED)
    for name, parameter in chunk.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        # Slow decay: a state that leaks into the next sequence would show on every token.
        parameter.data = 0.2 * noise - 5 if name.endswith("A_log") else 0.3 * noise
    tokens = [rng.integers(0, hf["vocab_size"], n) for n in LENGTHS]
    upstream = [torch.randn(n, hf["hidden_size"], generator=generator) for n in LENGTHS]
    alone = [passes(chunk, row_of([ids]), [out]) for ids, out in zip(tokens, upstream, strict=True)]
    right, joined = [], []
    for _ in range(PACKINGS):
        chosen = rng.permutation(len(LENGTHS))[: rng.integers(1, 8)].tolist()
        row = row_of([tokens[i] for i in chosen])
        right.append(worst(passes(chunk, row, [upstream[i] for i in chosen]), [alone[i] for i in chosen]))
    for lengths in JOINED:
        chosen = [LENGTHS.index(n) for n in lengths]
        row = row_of([np.concatenate([tokens[i] for i in chosen])])
        joined.append(worst(passes(chunk, row, [upstream[i] for i in chosen]), [alone[i] for i in chosen]))
    return right, joined


def row_of(sequences: list[np.ndarray]) -> MicroBatch:
    return pack(Sequences.of(sequences), context=1, context_rank=0, tensor=1)


def passes(chunk: Any, micro: MicroBatch, upstream: list[Tensor]) -> Passes:
    """Returns the results of a row, with the gradient of each sequence's last hidden states."""
    embedded: list[Tensor] = []

    def keep(_: Any, __: Any, out: Tensor) -> None:
        out.retain_grad()
        embedded.append(out)

    chunk.zero_grad()
    hook = chunk.embedding.register_forward_hook(keep)
    hidden = chunk(micro.tokens, micro.positions, None, packed_seq_params=micro.row, padding_mask=micro.padding)
    hook.remove()
    (hidden[:, 0] * torch.cat(upstream)).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in chunk.parameters()]
    (out,) = embedded
    assert out.grad is not None and len(out) == sum(map(len, upstream)), "the row has no padding"
    return Passes(hidden[:, 0].detach(), out.grad[:, 0], torch.cat([g.flatten() for g in gradients]))


def worst(packed: Passes, alone: list[Passes]) -> float:
    """Returns the largest difference of a packed row from its sequences alone."""
    pairs = (
        (packed.hidden, torch.cat([each.hidden for each in alone])),
        (packed.inputs, torch.cat([each.inputs for each in alone])),
        (packed.weights, torch.stack([each.weights for each in alone]).sum(0)),
    )
    return max(float((actual - wanted).abs().max() / wanted.abs().max()) for actual, wanted in pairs)


@pytest.fixture(scope="module")
def packings() -> dict[str, tuple[list[float], list[float]]]:
    """Returns the answers of `examine`."""
    (answers,) = run_ranks(1, examine)
    result: dict[str, tuple[list[float], list[float]]] = answers
    return result


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_token_has_the_hidden_state_and_gradient_of_its_sequence_alone(
    packings: dict[str, tuple[list[float], list[float]]], name: str
) -> None:
    right, _ = packings[name]
    assert len(right) == PACKINGS and max(right) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_a_leak_from_one_sequence_to_the_next_is_found(
    packings: dict[str, tuple[list[float], list[float]]], name: str
) -> None:
    _, joined = packings[name]
    assert len(joined) == len(JOINED) and min(joined) > 1e-2
