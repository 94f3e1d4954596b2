"""The trajectories of a generator's branches: checked, numbered, and with a decision about common tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.rollout.generators.base import TrajectoryGenerator
from skyrl_mega.rollout.generators.branch import Branch
from skyrl_mega.rollout.generators.group_state import GeneratorFault
from skyrl_mega.rollout.generators.service import GeneratorService
from skyrl_mega.trajectories.trajectory import TOKEN_REWARDS, Kind, Trajectory, TrajectoryStep

SAMPLED = "sampled_tokens"
"""Metric of a trajectory: tokens sampled for the group, also those of no trajectory, per trajectory of the group."""


def trajectories(returned: Any, service: GeneratorService, generator: TrajectoryGenerator) -> list[Trajectory]:
    """Returns the trajectories of the branches that a generator returned, in order, numbered as samples from 0 and with
    the metric `SAMPLED`. With `shared` = `once`, tokens that an earlier trajectory trains on become context. The
    branches stay unchanged.

    Raises:
        GeneratorFault: The generator returned something else than the wanted number of judged branches.
    """
    branches = check_returned(returned, service)
    origins: dict[int, int] = {}
    finished = []
    for sample, branch in enumerate(branches):
        opened = branch.opened.copied()
        t = opened.trajectory
        t.sample = sample
        opened.routes.keep(t)
        opened.token_rewards.keep(t)
        if generator.shared == "once":
            _read_only(t, _common(branch, origins))
        metrics = t.metadata.get("metrics")
        t.metadata["metrics"] = {
            SAMPLED: service.sampled / len(branches),
            **(metrics if isinstance(metrics, dict) else {}),
        }
        finished.append(t)
    return finished


def check_returned(returned: Any, service: GeneratorService) -> list[Branch]:
    """Returns the value of `generate` as a list of branches.

    Raises:
        GeneratorFault: The value has another type or number, or a branch is of another group, comes twice, or has a
            turn that no environment judged.
    """
    wanted = service.group.samples
    if not isinstance(returned, list | tuple) or not all(isinstance(branch, Branch) for branch in returned):
        raise GeneratorFault(f"generate returned {shown(returned)}; allowed is a list of {wanted} branches")
    if len(returned) != wanted:
        raise GeneratorFault(
            f"generate returned {len(returned)} branches; allowed is group.samples = {wanted} (data.samples_per_prompt)"
        )
    for i, branch in enumerate(returned):
        if branch.service is not service:
            raise GeneratorFault(f"generate returned a branch of another group as number {i}; keep no branches")
        if any(branch is other for other in returned[:i]):
            raise GeneratorFault(f"generate returned the same branch twice, the second time as number {i}")
        if not branch.judged:
            raise GeneratorFault(
                f"generate returned branch {i} with a turn that no environment judged; return `await branch.step()`"
            )
    return [*returned]


def _common(branch: Branch, origins: dict[int, int]) -> int:
    """Returns the position up to which earlier trajectories train on the branch's sampled tokens, 0 for none, and notes
    the branch's own tokens.

    Args:
        branch: The branch.
        origins: Number of an engine's answer → its tokens that a trajectory trains on; changed in place.
    """
    end = 0
    for piece in branch.pieces:
        if known := min(piece.count, origins.get(piece.origin, 0)):
            end = piece.start + known
        origins[piece.origin] = max(piece.count, origins.get(piece.origin, 0))
    return end


def _read_only(t: Trajectory, end: int) -> None:
    """Makes all tokens before the position `end` context: nothing of it is trained on. The steps before become part of
    the prompt before them; their rewards stay in the trajectory's sum."""
    if not end:
        return
    for position in range(end):
        t.mask[position], t.logprobs[position] = 0, 0.0
    steps: list[TrajectoryStep] = []
    for step in t.steps:
        if step.start >= end or step.kind is Kind.PROMPT:
            steps.append(step)
            continue
        steps[-1].end = min(step.end, end)
        if step.end <= end:
            steps[-1].messages += step.messages
        else:
            steps.append(replace(step, start=end))
    t.steps = steps
    t.prompt_length = steps[0].end
    t.turns = sum(step.kind is Kind.RESPONSE for step in steps)
    starts = [first for _, first in t.versions[1:]] + [len(t.tokens)]
    t.versions = [(v, max(first, end)) for (v, first), after in zip(t.versions, starts, strict=True) if after > end]
    if (rewards := t.columns.get(TOKEN_REWARDS)) is not None:
        rewards.values[:end] = 0
