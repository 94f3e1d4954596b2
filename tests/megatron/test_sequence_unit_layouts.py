"""Tests of losses of whole trajectories (`algorithm.sequence_unit`) in every layout and split: loss, gradient norm and
weights must equal a single process's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_mega.algorithms.losses import Figures
from skyrl_mega.batch.mini_batch_stats import mean_importance_weight, token_selections
from skyrl_mega.config.schema import MoeConfig, PolicyConfig
from skyrl_mega.megatron import objectives
from skyrl_mega.megatron.micro_batches import split_micro_batches
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import TRAJECTORY, Sequences
from tests.megatron import layouts
from tests.megatron.test_loss_layouts import LAYOUTS, NAMES, SMOOTH, algorithm, model, turns
from tests.support.ranks import run_ranks

__all__ = ["model"]

LOSSES = {"gspo": "sequences", "gmpo": "tokens", "sapo": "tokens", "dppo_tv": "prompts", "dppo_kl": "constant"} | {
    "kl_cov": "sequences",
    "dro": "tokens",
}
"""Losses with a ratio of a sequence, or with a sequence-level correction, each with a mean."""
Found = dict[str, list[dict[str, float]]]


def samples(mean: str, unit: str) -> Sequences:
    """Returns thirteen samples of several answers each; trajectories of 3, 1, 3, 1, … samples follow each other."""
    batch = turns(mean)
    if unit == "trajectory":
        numbers = torch.tensor([2 * (row // 4) + (row % 4 == 3) for row in range(len(batch))], dtype=torch.int32)
        batch[TRAJECTORY] = batch.per_token(numbers)
    return batch


def train(
    rank: int, address: str, path: Path, parallel: ParallelDims, policy: PolicyConfig, tokens: int, unit: str
) -> Found:
    """Takes a step with each loss from the same weights, and returns its metrics and those of the next step."""
    opened = layouts.open_rank(rank, address, path, parallel, policy)
    data = parallel.coordinates(torch.distributed.get_rank()).dp
    metrics = {}
    for loss, mean in LOSSES.items():
        opened.load(path)
        opened.reset_optimizer(policy.optimizer)
        batch, settings = samples(mean, unit), replace(algorithm(loss), sequence_unit=unit)
        for name, parts in token_selections([batch], settings, [7]).items():
            batch[name] = parts[0]
        micros = [batch.take(rows) for rows in split_micro_batches(batch, parallel, tokens * parallel.context)[data]]
        figures = Figures(importance_mean=mean_importance_weight(batch, settings))
        objective = objectives.objective(loss, settings, figures)
        metrics[loss] = [opened.train(micros, objective), opened.measure(micros, objective)]
    return metrics


def steps(path: Path, ranks: int, sizes: dict[str, int], tokens: int, unit: str = "trajectory") -> Found:
    policy = layouts.policy_config(moe=MoeConfig(aux_loss=0.05), optimizer=SMOOTH)
    answers = run_ranks(ranks, train, path, layouts.layout(ranks, **sizes), policy, tokens, unit)
    return max(answers, key=lambda answer: len(next(iter(answer.values()))[0]))


@pytest.fixture(scope="module")
def single(model: Path) -> Found:
    """Returns the results of a single process with a single micro-batch."""
    return steps(model, 1, {}, 10_000)


def compare(actual: Found, expected: Found) -> None:
    for loss, both in expected.items():
        for step, (a, b) in enumerate(zip(actual[loss], both, strict=True)):
            for name in b.keys() & NAMES:
                assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-7), f"{loss}, step {step}, {name}"


def test_a_trajectory_is_not_its_answers(model: Path, single: Found) -> None:
    answers = steps(model, 1, {}, 10_000, unit="answer")
    for loss, (first, _) in single.items():
        assert first["grad_norm"] != pytest.approx(answers[loss][0]["grad_norm"], rel=1e-3), loss


def test_micro_batches_give_the_single_ones_step(model: Path, single: Found) -> None:
    compare(steps(model, 1, {}, 60), single)


@pytest.mark.parametrize("name", ["DP2", "CP2"])
def test_a_layout_gives_the_single_processs_step(model: Path, single: Found, name: str) -> None:
    compare(steps(model, *LAYOUTS[name], 60), single)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("DP2", "CP2")])
def test_every_layout_gives_the_single_processs_step(model: Path, single: Found, name: str) -> None:
    compare(steps(model, *LAYOUTS[name], 90), single)
