"""Shared prefixes: hidden states, log-probs and gradients are those of every sequence alone."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skyrl_mega.config.schema import BuildConfig, MoeConfig, PolicyConfig
from skyrl_mega.megatron import objectives
from skyrl_mega.megatron.micro_batches import split_apart, split_micro_batches
from skyrl_mega.megatron.model import build_model
from skyrl_mega.megatron.packing import MicroBatch, pack
from skyrl_mega.megatron.shared_prefixes import common_with_previous, shared_prefixes
from skyrl_mega.models.routes import COLUMN
from skyrl_mega.models.tiny import build, hf_config
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import TRAJECTORY, Column, Sequences
from tests.megatron import layouts
from tests.megatron.layouts import CPU, join_ranks
from tests.support.ranks import run_ranks

SIZES: dict[str, Any] = dict(layers=2, hidden=16, heads=4, kv_heads=2, head_dim=8, experts=4, expert_ffn=8)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": hf_config(BuildConfig(**SIZES)),
    "gpt_oss": hf_config(BuildConfig(architecture="gpt_oss", **SIZES)) | {"sliding_window": 8},
}
"""Full attention, and sliding windows with sinks."""
BATCHES = 100
TOLERANCE = 1e-5
"""Largest difference from the sequences alone, relative to the largest value alone."""


def batch_of(sequences: list[list[int]], counted: list[set[int]]) -> Sequences:
    """Returns a micro-batch; a sequence's tokens at the indices `counted` have the weight 1."""
    batch = Sequences.of(sequences)
    weights = [[float(i in of_tokens) for i in range(len(s))] for s, of_tokens in zip(sequences, counted, strict=True)]
    batch["weights"] = torch.tensor([w for of_tokens in weights for w in of_tokens])
    return batch


def random_batch(rng: np.random.Generator) -> Sequences:
    """Returns groups of samples of a prompt, trees of turns, and equal sequences, in random order."""
    sequences: list[list[int]] = []
    counted: list[set[int]] = []
    system = rng.integers(0, 4, rng.integers(0, 6)).tolist()
    for _ in range(rng.integers(1, 4)):
        context = [*system, *rng.integers(0, 4, rng.integers(1, 12)).tolist()]
        for _ in range(rng.integers(1, 4)):
            answer = rng.integers(0, 4, rng.integers(0, 12)).tolist()
            sequences.append([*context, *answer])
            counted.append({i for i in range(len(context), len(sequences[-1])) if rng.random() < 0.8})
            if rng.random() < 0.3:  # the next sample goes on from this one
                context = [*sequences[-1], *rng.integers(0, 4, rng.integers(0, 4)).tolist()]
    order = rng.permutation(len(sequences))
    return batch_of([sequences[i] for i in order], [counted[i] for i in order])


def passes(chunk: Any, micro: MicroBatch, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the hidden states before each predicted token of the batch, [T, H], and all gradients of the weights."""
    chunk.zero_grad()
    hidden = chunk(micro.tokens, micro.positions, None, packed_seq_params=micro.row, padding_mask=micro.padding)[:, 0]
    predicts = micro.source >= 0
    placed = hidden.new_zeros(len(upstream), hidden.shape[1])
    placed = placed.index_copy(0, micro.source[predicts], hidden[predicts])
    (placed * upstream).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in chunk.parameters()]
    return placed.detach(), torch.cat([g.flatten() for g in gradients])


def examine(rank: int, address: str) -> dict[str, list[tuple[float, float]]]:
    """Returns for each model and random batch the largest differences of hidden states and of gradients."""
    join_ranks(rank, address, ParallelDims(1))
    answers = {}
    for name, hf in MODELS.items():
        (chunk,) = build_model(hf, PolicyConfig(), ParallelDims(1), torch.float32, CPU)
        generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
        for parameter in chunk.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        answers[name] = [differences(chunk, random_batch(rng), hf["hidden_size"], generator) for _ in range(BATCHES)]
    return answers


def differences(chunk: Any, batch: Sequences, width: int, generator: torch.Generator) -> tuple[float, float]:
    """Returns the largest difference of hidden states before counted tokens, and of gradients, from those of every
    sequence alone."""
    counted = batch["weights"] != 0
    upstream = torch.randn(len(counted), width, generator=generator) * counted[:, None]
    ends = batch.lengths.cumsum(0).tolist()
    alone = [
        passes(chunk, row_of(batch.part(i, i + 1), share=False), upstream[end - length : end])
        for i, (length, end) in enumerate(zip(batch.lengths.tolist(), ends, strict=True))
    ]
    hidden, weights = passes(chunk, row_of(batch, share=True), upstream)
    wanted = torch.cat([each for each, _ in alone]), torch.stack([each for _, each in alone]).sum(0)
    off = (hidden - wanted[0])[counted].abs(), (weights - wanted[1]).abs()
    scale = wanted[0].abs().max(), wanted[1].abs().max().clamp(min=1e-30)
    return float(off[0].max() / scale[0]) if len(off[0]) else 0.0, float(off[1].max() / scale[1])


def row_of(batch: Sequences, *, share: bool) -> MicroBatch:
    return pack(batch, context=1, context_rank=0, tensor=1, share=share)


@pytest.fixture(scope="module")
def answers() -> dict[str, list[tuple[float, float]]]:
    """Returns the answers of `examine`."""
    (result,) = run_ranks(1, examine)
    found: dict[str, list[tuple[float, float]]] = result
    return found


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_gradients_are_those_of_the_sequences_alone(
    answers: dict[str, list[tuple[float, float]]], name: str
) -> None:
    assert len(answers[name]) == BATCHES and max(map(max, answers[name])) < TOLERANCE


def possible(batch: Sequences, i: int, j: int) -> int:
    """Returns the number of first tokens that sequence j may leave out beside sequence i, found token by token."""
    tokens = [part.tolist() for part in batch.tokens.split(batch.lengths.tolist())]
    weights = batch["weights"].split(batch.lengths.tolist())[j].tolist()
    count = 0
    while count < min(len(tokens[i]), len(tokens[j]) - 1) and tokens[i][count] == tokens[j][count]:
        if weights[count + 1]:  # token `count` predicts a counted token
            break
        count += 1
    return count


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_leaves_out_the_most_that_a_former_one_allows(seed: int) -> None:
    batch = random_batch(np.random.default_rng(seed))
    done: list[int] = []
    found = {prefix.sequence: prefix for prefix in shared_prefixes(batch)}
    order = sorted(range(len(batch)), key=lambda i: (i in found, [*found].index(i) if i in found else i))
    for j in order:
        if j in found:
            _, source, tokens = found[j]
            assert source in done and tokens == possible(batch, source, j)
            assert tokens == max(possible(batch, i, j) for i in done)
        done.append(j)
    common = common_with_previous(batch).tolist()
    assert common == [0, *(possible(batch, i - 1, i) for i in range(1, len(batch)))]


def test_nothing_is_shared_without_weights_or_common_tokens() -> None:
    plain, apart = Sequences.of([[1, 2, 3], [1, 2, 4]]), batch_of([[1, 2], [2, 2]], [set(), set()])
    assert shared_prefixes(plain) == shared_prefixes(apart) == []
    assert common_with_previous(plain).tolist() == [0, 0]
    assert row_of(plain, share=True).row.keys is None and row_of(Sequences.of([]), share=True).row.keys is None


def test_a_row_has_every_common_token_once() -> None:
    batch = batch_of([[5, 6, 7, 1, 2], [5, 6, 7, 3], [5, 6, 7, 1, 4]], [{3, 4}, {3}, {4}])
    micro = row_of(batch, share=True)
    # The third sequence counts no token before its fifth, so it leaves out the first's answer too.
    assert micro.read.tolist() == [0, 1, 2, 3, 4, 7, 8, 12, 13]
    assert micro.positions[0].tolist() == [0, 1, 2, 3, 4, 2, 3, 3, 4]
    assert micro.targets.tolist() == [6, 7, 1, 2, 0, 3, 0, 4, 0]
    keys = micro.row.keys
    assert keys is not None and keys.bounds_q.tolist() == [0, 5, 7, 9] and keys.bounds_k.tolist() == [0, 5, 9, 14]
    assert keys.index_K.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 0, 1, 2, 7, 8]
    on_meta = micro.to(torch.device("meta")).row
    assert on_meta.keys is not None and on_meta.keys.index_K.is_meta


def test_a_sequence_without_routes_computes_no_other_ones_prompt() -> None:
    batch = batch_of([[5, 6, 7], [5, 6, 7, 1], [5, 6, 7, 2]], [set(), {3}, {3}])
    routes = torch.ones(len(batch.tokens), 1, 2, dtype=torch.uint8)
    routes[:3] = 0
    batch.add(COLUMN, Column(routes, "input"))
    assert [tuple(prefix) for prefix in shared_prefixes(batch)] == [(2, 1, 2)]


def groups_batch(seed: int = 3) -> Sequences:
    """Returns eight groups of four samples with a prompt each, with weights that sum to 1 and routes."""
    rng = np.random.default_rng(seed)
    sequences, counted = [], []
    for _ in range(8):
        prompt = rng.integers(0, 100, rng.integers(4, 24)).tolist()
        for _ in range(4):
            sequences.append([*prompt, *rng.integers(0, 100, rng.integers(1, 20)).tolist()])
            counted.append(set(range(len(prompt), len(sequences[-1]))))
    batch = batch_of(sequences, counted)
    batch["weights"] /= batch["weights"].sum()
    routes = rng.random((len(batch.tokens), 4, 8)).argsort(-1)[..., :2] + 1
    for sequence in range(len(batch)):  # an engine with a prefix cache gives the prompt's routes to all samples
        first, start = (int(batch.starts[i]) for i in (sequence // 4 * 4, sequence))
        common = possible(batch, sequence // 4 * 4, sequence) + 1
        routes[start : start + common] = routes[first : first + common]
    batch.add(COLUMN, Column(torch.from_numpy(routes.astype(np.uint8)), "input"))
    return batch


LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "one process, recomputed, replay": (1, {}, {"recompute": "full", "moe": MoeConfig(replay="rollout")}),
    "TP2 EP2": (2, {"tensor": 2, "expert": 2}, {}),
    "PP2 VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}, {"offload_layers": 1}),
    "DP2": (2, {}, {}),
}


def train(rank: int, address: str, path: Path, parallel: ParallelDims, policy: PolicyConfig) -> Any:
    """Returns for micro-batches without and with shared prefixes: rows and log-probs of this rank's sequences, the
    metrics of two optimizer steps, and the tokens of its micro-batches."""
    opened, whole, answers = layouts.open_rank(rank, address, path, parallel, policy), groups_batch(), []
    for share in (False, True):
        opened.policy.share_prefixes = share
        rows = split_micro_batches(whole, parallel, policy.micro_tokens, share=share)[parallel.coordinates(rank).dp]
        micros = [whole.take(m) for m in rows]
        opened.load(path)
        opened.reset_optimizer(policy.optimizer)
        values = opened.logprobs(micros)
        logprobs = [] if values is None else [(m.tolist(), v[0].numpy()) for m, v in zip(rows, values, strict=True)]
        metrics = [opened.train(micros, objectives.supervised) for _ in range(2)]
        answers.append((logprobs, metrics, sum(opened._pack(m).tokens.shape[1] for m in micros)))
    return answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "model"
    build(BuildConfig(layers=4), path, seed=1)
    return path


@pytest.mark.parametrize("name", LAYOUTS)
def test_training_computes_the_same_with_fewer_tokens(model: Path, name: str) -> None:
    ranks, sizes, changes = LAYOUTS[name]
    answers = run_ranks(ranks, train, model, layouts.layout(ranks, **sizes), layouts.policy_config(**changes))
    batch = groups_batch()
    flat: list[np.ndarray] = []
    for share in (0, 1):
        values = np.full(len(batch.tokens), np.nan, np.float32)
        for rows, logprobs in chain.from_iterable(answer[share][0] for answer in answers):
            values[batch.index(rows).numpy()] = logprobs
        flat.append(values)
    np.testing.assert_allclose(flat[1], flat[0], rtol=0, atol=2e-5)
    assert (flat[0] != 0).sum() == int((batch["weights"] != 0).sum())
    for (_, plain, tokens), (_, shared, fewer) in answers:
        assert fewer < 0.85 * tokens
        for before, after in zip(plain, shared, strict=True):
            assert before["grad_norm"] == pytest.approx(after["grad_norm"], rel=1e-3) and after["grad_norm"] > 0
            assert before.get("loss", 0.0) == pytest.approx(after.get("loss", 0.0), rel=1e-5)


def test_small_pieces_fill_micro_batches() -> None:
    """Splits 32 groups of four with short prompts: two whole groups do not fit into a micro-batch, but seven samples
    do."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 100, 100) for _ in range(32)]
    batch = Sequences.of([np.concatenate([p, rng.integers(0, 100, 1000)]) for p in prompts for _ in range(4)])
    batch["weights"] = torch.tensor([0.0] * 100 + [1.0] * 1000).repeat(len(batch))
    shared, plain = (split_apart(batch, None, ParallelDims(), 8100, share=share) for share in (True, False))
    assert len(shared.rows[0]) <= len(plain.rows[0]) + 1 and int(shared.left_out.sum()) > 32 * 99


@pytest.mark.parametrize(("ranks", "sizes"), [(1, {}), (3, {}), (4, {"pipeline": 2, "virtual_pipeline": 2})], ids=str)
@pytest.mark.parametrize("tokens", [64, 256, 4096])
def test_micro_batches_keep_groups_together_and_the_budget(ranks: int, sizes: dict[str, int], tokens: int) -> None:
    batch, parallel = groups_batch(), layouts.layout(ranks, **sizes)
    split = split_apart(batch, None, parallel, tokens, share=True)
    assert sorted(torch.cat([*chain.from_iterable(split.rows)]).tolist()) == list(range(len(batch)))
    assert len({len(micros) for micros in split.rows}) == 1
    rows = [row_of(batch.take(m), share=True).read.numel() for m in chain.from_iterable(split.rows)]
    assert max(rows) <= tokens
    assert sum(rows) <= int((batch.lengths - split.left_out).sum()), "ranks find at least what the driver counted"
    plain = split_apart(batch, None, parallel, tokens)
    slowest = [
        sum(max(int((batch.lengths - s.left_out)[m].sum()) for m in of_ranks) for of_ranks in zip(*s.rows, strict=True))
        for s in (split, plain)
    ]
    assert slowest[0] <= slowest[1] and int(split.left_out.sum()) > 0 and int(plain.left_out.sum()) == 0


def test_samples_of_a_trajectory_stay_together() -> None:
    batch = groups_batch()
    batch[TRAJECTORY] = batch.per_token(torch.arange(len(batch), dtype=torch.int32) // 2)
    silent = torch.arange(len(batch)) % 3 == 0
    split = split_apart(batch, silent, ParallelDims(2), 128, share=True)
    for micro in chain.from_iterable(split.rows):
        numbers = (micro // 2).unique(return_counts=True)[1]
        assert (numbers == 2).all()
        assert row_of(batch.take(micro), share=True).read.numel() <= 128
