"""Tests of samples without a gradient: micro-batches of their own take no backward pass, and no bit of the training
changes."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.algorithms.losses import LossInputs, find
from skyrl_mega.batch.samples import Samples
from skyrl_mega.config.schema import AlgorithmConfig, BuildConfig, MoeConfig, PolicyConfig, RejectionConfig
from skyrl_mega.config.schema.losses import LOSSES
from skyrl_mega.megatron import objectives
from skyrl_mega.megatron.micro_batches import split_apart, split_micro_batches
from skyrl_mega.models.routes import COLUMN
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import TRAJECTORY, Column, Sequences
from tests.megatron import layouts
from tests.support.batches import samples_of_tokens
from tests.support.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "one process, recomputed, replay": (1, {}, {"recompute": "full", "moe": MoeConfig(replay="rollout")}),
    "EP2": (2, {"expert": 2}, {}),
    "CP2": (2, {"context": 2}, {}),
    "PP2 VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}, {"offload_layers": 1}),
    "TP2 PP2 EP2 DP2": (8, {"tensor": 2, "pipeline": 2, "expert": 2}, {}),
}
NIGHTLY = ("CP2", "TP2 PP2 EP2 DP2")
ALGORITHM = AlgorithmConfig(
    loss="gspo", importance_cap=2.0, rejection=RejectionConfig("sequence", 0.5, 2.0), sequence_unit="trajectory"
)
SILENT = [True, False, False, True, True, False, True, True, False, True, True, True, False]
"""Thirteen samples, two of three without an advantage."""


def batch() -> Sequences:
    """Returns samples with advantages, of which `SILENT` ones are 0, log-probs and routes."""
    sequences, rng = layouts.some_batch(100), np.random.default_rng(5)
    count = len(sequences.tokens)
    advantages = torch.from_numpy(rng.standard_normal(len(sequences)).astype(np.float32))
    sequences["advantages"] = sequences.per_token(advantages.masked_fill(torch.tensor(SILENT), 0.0))
    sequences["old_logprobs"] = torch.from_numpy((-4.6 + 0.1 * rng.standard_normal(count)).astype(np.float32))
    sequences["rollout_logprobs"] = sequences["old_logprobs"] + 0.1
    routes = rng.random((count, 4, 8)).argsort(-1)[..., :2] + 1
    sequences.add(COLUMN, Column(torch.from_numpy(routes.astype(np.uint8)), "input"))
    return sequences


def train(rank: int, address: str, path: Path, parallel: ParallelDims, policy: PolicyConfig) -> Any:
    """Takes two steps with a backward pass over all micro-batches, then from the same weights two steps without
    those of silent samples. Returns metrics, weights and the micro-batches with a gradient of both."""
    opened, whole = layouts.open_rank(rank, address, path, parallel, policy), batch()
    split = split_apart(whole, torch.tensor(SILENT), parallel, policy.micro_tokens * parallel.context)
    micros = [whole.take(rows) for rows in split.rows[parallel.coordinates(rank).dp]]
    results = []
    for forward_only in (0, split.forward_only):
        opened.load(path)
        opened.reset_optimizer(policy.optimizer)
        learning = list[bool]()

        def objective(inputs: LossInputs, learning: list[bool] = learning) -> Any:
            learning.append(inputs.logprobs_L.requires_grad)
            return objectives.objective("gspo", ALGORITHM)(inputs)

        metrics = [without_counts(opened.train(micros, objective, forward_only=forward_only)) for _ in range(2)]
        results.append((metrics, {name: values.clone() for name, values in opened.params.items()}, sum(learning)))
    return *results, len(micros), split.forward_only


def without_counts(metrics: dict[str, float]) -> dict[str, float]:
    """Leaves out counts of replayed routes, which are higher for layers computed again by a backward pass."""
    return {name: value for name, value in metrics.items() if not name.startswith("replay_")}


def without_routes(rank: int, address: str, path: Path, policy: PolicyConfig) -> Any:
    """Trains on silent samples without routes; returns the counts of replayed routes with all backward passes and
    without those of silent samples, then the error of a silent sample's NaN and whether a weight moved."""
    parallel, whole = ParallelDims(), batch()
    opened = layouts.open_rank(rank, address, path, parallel, policy)
    split = split_apart(whole, torch.tensor(SILENT), parallel, policy.micro_tokens)
    micros = [whole.take(rows) for rows in split.rows[0]]
    for micro in micros[-split.forward_only :]:
        del micro.columns[COLUMN]
    objective, counts = objectives.objective("gspo", ALGORITHM), []
    for forward_only in (0, split.forward_only):
        opened.load(path)
        opened.reset_optimizer(policy.optimizer)
        metrics = opened.train(micros, objective, forward_only=forward_only)
        counts.append({name: value for name, value in metrics.items() if name.startswith("replay_")})
    before = {name: values.clone() for name, values in opened.params.items()}
    micros[-1]["rollout_logprobs"][-1] = torch.nan
    try:
        opened.train(micros, objective, forward_only=split.forward_only)
        error = ""
    except FloatingPointError as raised:
        error = str(raised)
    return counts, error, all(torch.equal(values, opened.params[name]) for name, values in before.items())


def test_silent_samples_count_as_tokens_without_routes_and_their_nan_stops_the_step(model: Path) -> None:
    policy = layouts.policy_config(moe=MoeConfig(replay="rollout"))
    ((everything, forward_only), error, unmoved) = run_ranks(1, without_routes, model, policy)[0]
    assert everything == forward_only and any(value > 0 for name, value in forward_only.items() if "_replayed_" in name)
    assert "loss is not finite" in error and unmoved


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("silent") / "model"
    build(BuildConfig(layers=4), path, seed=1)
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in LAYOUTS]
)
def test_no_bit_of_the_training_depends_on_backward_passes_of_silent_samples(model: Path, name: str) -> None:
    ranks, sizes, changes = LAYOUTS[name]
    parallel = layouts.layout(ranks, **sizes)
    results = run_ranks(ranks, train, model, parallel, layouts.policy_config(**changes))
    for (all_metrics, all_weights, all_passes), (metrics, weights, passes), micros, forward_only in results:
        assert 0 < forward_only < micros
        assert (all_passes, passes) in ((2 * micros, 2 * (micros - forward_only)), (0, 0))  # (0, 0): not the last stage
        assert metrics == all_metrics
        assert all(torch.equal(weights[name], values) for name, values in all_weights.items())
    metrics, _, passes = max((result[1] for result in results), key=lambda of: len(of[0][0]))
    assert passes and metrics[0]["grad_norm"] > 0 and metrics[0]["ratio"] != metrics[1]["ratio"]


def lengths_and_silence(count: int, share: float, seed: int) -> tuple[Samples, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return (
        samples_of_tokens([[1] * int(n) for n in rng.integers(5, 100, count)]),
        torch.from_numpy(rng.random(count) < share),
    )


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, {}), (3, {}), (4, {"pipeline": 2, "virtual_pipeline": 2}), (4, {"pipeline": 4})], ids=str
)
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_all_ranks_leave_out_the_same_passes(ranks: int, sizes: dict[str, int], share: float) -> None:
    parallel = layouts.layout(ranks, **sizes)
    mini, silent = lengths_and_silence(64, share, ranks)
    split = split_apart(mini, silent, parallel, 256)
    assert sorted(int(i) for i in torch.cat(list(chain(*split.rows)))) == list(range(64))
    assert split.forward_only and sorted(split.forward_only_sequences.tolist()) == silent.nonzero()[:, 0].tolist()
    assert len({len(micros) for micros in split.rows}) == 1
    trained = len(split.rows[0]) - split.forward_only
    multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1
    assert trained % multiple == split.forward_only % multiple == 0
    assert all(not silent[rows].any() for micros in split.rows for rows in micros[:trained])


def test_samples_of_a_trajectory_stay_together() -> None:
    mini, _ = lengths_and_silence(40, 0.0, 7)
    mini.columns[TRAJECTORY] = torch.arange(20, dtype=torch.int32).repeat_interleave(2)
    silent = torch.tensor([True, False] * 5 + [True, True] * 15)
    split = split_apart(mini, silent, ParallelDims(), 256)
    assert sorted(split.forward_only_sequences.tolist()) == list(range(10, 40))


@pytest.mark.parametrize("share", [0.0, 1.0, None])
def test_a_mini_batch_with_one_kind_of_sample_is_cut_as_ever(share: float | None) -> None:
    mini, silent = lengths_and_silence(40, share or 0.0, 3)
    split = split_apart(mini, None if share is None else silent, ParallelDims(), 256)
    plain = split_micro_batches(mini, ParallelDims(), 256)
    assert not split.forward_only and len(split.forward_only_sequences) == 0
    assert [m.tolist() for micros in split.rows for m in micros] == [m.tolist() for micros in plain for m in micros]


def test_a_single_silent_sample_is_not_worth_a_micro_batch() -> None:
    """Splits twenty full micro-batches for eight pipeline stages: a further ramp takes longer than a backward pass."""
    mini = samples_of_tokens([[1] * 64] * 80)
    silent = torch.arange(80) == 5
    assert split_apart(mini, silent, layouts.layout(8, pipeline=8), 256).forward_only == 0


def test_the_trait_of_a_loss_says_if_a_token_without_an_advantage_has_a_gradient() -> None:
    """Checks `learns_without_advantage` of every loss by the gradient of tokens away from the old policy."""
    draw = torch.Generator().manual_seed(0)
    for name, traits in LOSSES.items():
        logprobs = (-torch.rand(40, generator=draw) - 0.5).requires_grad_()
        inputs = LossInputs(
            logprobs_L=logprobs,
            weights_L=torch.full((40,), 1 / 40),
            old_L=-torch.rand(40, generator=draw) - 0.5,
            advantages_L=torch.zeros(40),
            high_covariance_L=torch.arange(40) % 2 == 0,
            sequence_L=torch.arange(40) // 10,
            sequences=4,
        )
        loss, _ = find(name)(inputs, AlgorithmConfig(loss=name))
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert bool(gradient.any()) == traits.learns_without_advantage, name
