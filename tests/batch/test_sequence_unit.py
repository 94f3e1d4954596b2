"""Losses of whole trajectories (`algorithm.sequence_unit`), compared with published equations on padded rows in
float64."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from skyrl_mega.algorithms.losses import LossInputs, find
from skyrl_mega.config.schema import AlgorithmConfig, OverlongConfig, RejectionConfig
from skyrl_mega.config.schema.losses import GmpoConfig, GspoConfig
from skyrl_mega.megatron.micro_batches import split_micro_batches
from skyrl_mega.megatron.packing import pack
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trajectories.sequences import Column, Sequences
from skyrl_mega.trajectories.trajectory import Group, Status
from tests.batch.test_step_wise import GROUPS, batch_of, played
from tests.megatron.layouts import layout
from tests.support.batches import mini_batches

LOSSES: dict[str, dict[str, Any]] = {
    "gspo": dict(loss="gspo", gspo=GspoConfig(clip_low=0.004, clip_high=0.006)),
    "gmpo": dict(loss="gmpo", gmpo=GmpoConfig(clip_low=0.02, clip_high=0.03)),
    "sequence importance": dict(importance_cap=1.2, importance_floor=0.5, importance_level="sequence"),
    "product": dict(rejection=RejectionConfig("sequence", 0.7, 1.3)),
    "geometric": dict(rejection=RejectionConfig("geometric", 0.98, 1.02)),
    "veto": dict(rejection=RejectionConfig(outlier_low=0.85)),
}


def settings(name: str, mean: str = "sequences") -> AlgorithmConfig:
    filtered = OverlongConfig(filter=True)
    return AlgorithmConfig(loss_mean=mean, overlong=filtered, sequence_unit="trajectory", **LOSSES[name])


class Policies(NamedTuple):
    """Log-probs of all tokens of a step, float64; the column `place` of a trajectory is the index of each token."""

    now: Tensor
    old: Tensor


def policies(groups: list[Group]) -> Policies:
    """Draws new and old log-probs, sets the engine's near the old ones, and adds the column `place` to the
    trajectories."""
    g = torch.Generator().manual_seed(3)
    trajectories = [t for group in groups for t in group.trajectories]
    count = sum(len(t.tokens) for t in trajectories)
    old = -1 - torch.rand(count, generator=g, dtype=torch.float64)
    now = old + 0.05 * torch.randn(count, generator=g, dtype=torch.float64)
    engine = old + 0.08 * torch.randn(count, generator=g, dtype=torch.float64)
    first = 0
    for t in trajectories:
        place = torch.arange(first, first := first + len(t.tokens))
        t.columns["place"] = Column(place)
        for i, is_policy in enumerate(t.mask):
            t.logprobs[i] = float(engine[place[i]]) if is_policy else 0.0
    return Policies(now.requires_grad_(), old)


def published(groups: list[Group], of: Policies, name: str, mean: str) -> tuple[float, Tensor]:
    """Returns the published loss and the gradient, on verl's padded rows: a row is all policy tokens of a
    trajectory."""
    a = settings(name, mean)
    now, before, engine, advantages = [], [], [], []
    for group in groups:
        judged = torch.tensor([t.reward for t in group.trajectories if not t.status.failed]).double()
        spread = judged.std() + 1e-6 if judged.std() > 0 else 1.0
        for t in group.trajectories:
            if t.status is Status.COMPLETED:
                is_policy = torch.tensor(t.mask) != 0
                place = t.columns["place"].values[is_policy]
                now.append(of.now[place])
                before.append(of.old[place])
                engine.append(torch.tensor(t.logprobs)[is_policy].double())
                advantages.append((t.reward - judged.mean()) / spread)
    padded = [torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (now, before, engine)]
    now_NT, old_NT, engine_NT = padded[0], padded[1], padded[2]
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in now], batch_first=True).double()
    counts, A = mask.sum(1, keepdim=True), torch.stack(advantages)[:, None]
    log_ratio = (now_NT - old_NT) * mask
    if name == "gspo":  # arXiv:2507.18071, equations 5 and 7
        ratio = (log_ratio.sum(1, keepdim=True) / counts).exp().expand_as(mask)
        losses = -torch.minimum(ratio * A, ratio.clamp(1 - a.gspo.clip_low, 1 + a.gspo.clip_high) * A)
    elif name == "gmpo":  # arXiv:2507.20673, equation 4
        bounded = log_ratio.clamp(-a.gmpo.clip_low, a.gmpo.clip_high)
        least = A.sign() * torch.minimum(A.sign() * log_ratio, A.sign() * bounded)
        losses = -A * ((least * mask).sum(1, keepdim=True) / counts).exp().expand_as(mask)
    else:
        ratio = log_ratio.exp()
        losses = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
        gap = (old_NT - engine_NT) * mask
        product, mean_ratio = gap.sum(1, keepdim=True).exp(), (gap.sum(1, keepdim=True) / counts).exp()
        weight = {
            "sequence importance": product.clamp(0.5, 1.2),
            "product": ((product >= 0.7) & (product <= 1.3)).double(),
            "geometric": ((mean_ratio >= 0.98) & (mean_ratio <= 1.02)).double(),
            "veto": (gap.exp().amin(1, keepdim=True) >= 0.85).double(),
        }[name]
        assert len(weight.unique()) > 1, "it bites some trajectories, and not all"
        losses = losses * weight
    per_row = (losses * mask).sum(1)
    loss = per_row.sum() / counts.sum() if mean == "tokens" else (per_row / counts[:, 0]).mean()
    return loss.item(), torch.autograd.grad(loss, of.now)[0]


def by_batch(mini: Sequences, of: Policies, a: AlgorithmConfig, ranks: int, most: int) -> tuple[float, Tensor, int]:
    """Returns the project's loss over micro-batches as distributed to ranks, the gradient, and the number of
    micro-batches."""
    rows = list(chain(*split_micro_batches(mini, layout(ranks), most)))
    assert sorted(row for micro in rows for row in micro.tolist()) == list(range(len(mini)))
    total, gradient = 0.0, torch.zeros_like(of.now)
    for micro in rows:
        packed = pack(mini.take(micro), context=1, context_rank=0, tensor=1)
        columns = {name: packed.columns[name].double() for name in ("advantages", "weights", "rollout_logprobs")}
        inputs = LossInputs(
            logprobs_L=of.now[packed.columns["place"]],
            old_L=of.old[packed.columns["place"]],
            advantages_L=columns["advantages"],
            weights_L=columns["weights"],
            rollout_L=columns["rollout_logprobs"],
            sequence_L=packed.answer,
            sequences=packed.answers,
        )
        loss, _ = find(a.loss)(inputs, a)
        total += loss.item()
        gradient += torch.autograd.grad(loss, of.now)[0]
    return total, gradient, len(rows)


@pytest.mark.parametrize("env, cuts", [("talk", ["off", "turns", "merged"]), ("rewriting", ["turns", "merged"])])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_whole_trajectories_is_the_published_one(
    characters_chat: Renderer, env: str, cuts: list[str], name: str
) -> None:
    """Compares loss and gradient for all cuts of trajectories into samples and micro-batches."""
    groups = played(characters_chat, env).groups
    of = policies(groups)
    for mean in ("tokens", "sequences"):
        algorithm = settings(name, mean)
        expected, gradient = published(groups, of, name, mean)
        assert gradient.norm() > 1e-3
        for cut in cuts:
            (mini,) = mini_batches(batch_of(groups, algorithm, cut), GROUPS, algorithm)
            for ranks, most in ((1, 10_000), (2, 150)):
                loss, its_gradient, micros = by_batch(mini, of, algorithm, ranks, most)
                assert micros == 1 if most == 10_000 else micros > 3
                # Weights and advantages are float32.
                assert loss == pytest.approx(expected, rel=1e-5, abs=1e-8), (cut, ranks)
                assert (its_gradient - gradient).norm() < 1e-5 * gradient.norm(), (cut, ranks)
