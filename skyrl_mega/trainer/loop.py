"""The RL loop: generate and score, log-probs and values, advantages, train, sync, evaluate, checkpoint.

Whether trajectories are generated when a step begins or ahead of it is the rollouts' matter (`asynchrony.mode`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from skyrl_mega.algorithms.losses import Figures
from skyrl_mega.algorithms.mismatch import mismatch
from skyrl_mega.algorithms.old_logprobs import columns, pass_needed
from skyrl_mega.algorithms.token_weights import MEANS, averages
from skyrl_mega.cluster.channel import heeding
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.megatron.group import TrainGroup
from skyrl_mega.megatron.sequences import Sequences
from skyrl_mega.planner.flops import BACKWARD
from skyrl_mega.rollout.by_reference import fetch_group_arrays
from skyrl_mega.rollout.trajectory import Group
from skyrl_mega.trainer import critic
from skyrl_mega.trainer.batch import Batch, make_batch, mini_batches, token_advantages
from skyrl_mega.trainer.referred import (
    Mini,
    goes_by_reference,
    importance_mean_of,
    learns,
    load_of,
    outcomes,
    weight_of,
)
from skyrl_mega.trainer.referred import mini_batches as referred
from skyrl_mega.trainer.replay import PREFIX, check_routes, replay_metrics
from skyrl_mega.trainer.run import Run
from skyrl_mega.trainer.shutdown import GracefulStop
from skyrl_mega.trainer.signal import with_advantage
from skyrl_mega.trainer.step import Step
from skyrl_mega.trainer.whole_mini_batch import chosen


def train(run: Run) -> None:
    """Trains until the steps or the prompts are used up. The engines hold the policy's weights when this is called.

    Raises:
        GracefulStop: SIGUSR1 came; the steps done are in a checkpoint.
        Stopped: Another signal did.
        CannotLearn: The last `run.patience` steps taught the policy nothing.
        EngineDiffers: Engine and policy differ by more than `health.mismatch` allows.
    """
    with heeding():
        run.begin()
        try:
            while not run.finished:
                take_step(run)
        except GracefulStop:
            run.save_before_leaving()
            raise


def take_step(run: Run) -> None:
    """One RL step. Until it touches the policy it can be abandoned."""
    run.shutdown.look()
    step = run.next_step()
    groups = run.rollouts.next_groups(step)
    with run.shutdown.defer():
        run.record_rollouts(step)
        if groups:  # dynamic sampling may have found nothing to learn from
            train_on(run, step, groups)
            run.version = step.number
            run.end_if_engine_differs(step)
            run.rollouts.before_sync(step)
            with step.phase("sync"):
                step.record(run.sync.sync(step.number))
            run.rollouts.synced(step.number)
        if run.due(run.config.evaluation.every, step.number):
            run.evaluate(step)
        run.complete(step)
        run.save_if_due()
        run.health.end_if_stuck(step.number)


def train_on(run: Run, step: Step, groups: list[Group]) -> None:
    """Log-probs and values under the weights that sampled, advantages over the whole step, optimizer steps on them."""
    if goes_by_reference(run.config, groups):
        train_on_parts(run, step, groups)
        return
    groups = fetch_group_arrays(groups)
    algorithm, data = run.config.algorithm, run.config.data
    batch = make_batch(groups, algorithm, run.config.rollout)
    if run.config.policy.moe.replay == "rollout":
        check_routes(batch)
    minis = mini_batches(batch, data.mini_batch_prompts, algorithm)
    with step.phase("logprobs"):
        run.policy.hold(minis)
        logprobs(run, step, minis)
        fetch(run, batch, minis)
    if run.critic:
        with step.phase("values"):
            batch["values"] = critic.values(run.critic, minis)

    only_critic = run.critic is not None and step.number <= run.config.critic.warmup_steps
    if algorithm.kl.where == "reward":
        step.record(run.kl.punish(batch, adapt=not only_critic))
    batch["advantages"], estimated = token_advantages(batch, algorithm)
    step.record({"policy/advantage_fraction": with_advantage(batch)})
    give(run.policy, batch, minis, "advantages")
    if run.critic:
        batch["returns"] = estimated + batch["values"]
        give(run.critic, batch, minis, "returns")
        with step.phase("critic"):
            step.record(critic.train_critic(run.critic, minis, run.config.critic.epochs))
        step.record(critic.quality(batch))

    seed = [run.config.run.seed, step.number]
    for name, parts in chosen(minis, algorithm, seed).items():
        run.policy.add(name, parts)
    order = training_order(len(minis), 1 if only_critic else data.epochs_per_step, seed)
    with step.phase("train"):
        sums = updates(run, step, minis, order, measured=only_critic)
    record_updates(run, step, sums, [minis[mini] for mini in order], adapt=not only_critic)


def train_on_parts(run: Run, step: Step, groups: list[Group]) -> None:
    """The same where the driver has no tokens: a trajectory's advantage and weight follow from rewards and lengths."""
    config = run.config
    found = outcomes(groups, config)
    step.record({"policy/advantage_fraction": found.with_advantage})
    minis = referred(found, config)
    with step.phase("logprobs"):
        run.policy.hold_parts(minis, drawn=config.rollout.conversation == "one_message")
        run.policy.forget()
        logprobs(run, step, minis)
    order = training_order(len(minis), config.data.epochs_per_step, [config.run.seed, step.number])
    with step.phase("train"):
        sums = updates(run, step, minis, order)
    record_updates(run, step, sums, [minis[mini] for mini in order], adapt=True)


def logprobs(run: Run, step: Step, minis: Sequence[Mini]) -> None:
    """Has the ranks compute what the step needs before its first optimizer step.

    Where there is one optimizer step and nothing else asks for them, it trains with the weights that sampled: its own
    log-probs are the old ones (`algorithms.old_logprobs`).
    """
    algorithm = run.config.algorithm
    needed = columns(algorithm)
    if pass_needed(algorithm, len(minis) * run.config.data.epochs_per_step):
        entropy, squares = (name if name in needed else None for name in ("old_entropy", "old_squares"))
        run.policy.keep_logprobs("old_logprobs", temperature=run.temperature, entropy=entropy, squares=squares)
        computed(step, minis)
    if run.reference:
        run.reference.keep_logprobs(minis, temperature=run.temperature)
        if run.reference.own is None:
            computed(step, minis)


def fetch(run: Run, batch: Batch, minis: Sequence[Sequences]) -> None:
    """Columns that the driver estimates or chooses by."""
    for name in sorted(columns(run.config.algorithm) - {"values"}):  # a critic's
        parts = run.policy.column(name)
        batch[name] = torch.cat(parts)
        for mini, values in zip(minis, parts, strict=True):
            mini[name] = values


def computed(step: Step, minis: Sequence[Mini]) -> None:
    """The policy's ranks have computed log-probs of all of these."""
    for mini in minis:
        step.computed("logprobs", load_of(mini))


def updates(
    run: Run, step: Step, minis: Sequence[Mini], order: Sequence[int], *, measured: bool = False
) -> list[dict[str, float]]:
    """An optimizer step on each mini-batch of `order`, or only its metrics where it teaches nothing or `measured`."""
    algorithm, found = run.config.algorithm, []
    taught = [not measured and learns(mini, algorithm, run.config.policy.moe) for mini in minis]
    for mini in order:
        figures = Figures(
            entropy_coefficient=run.entropy.applied, importance_mean=importance_mean_of(minis[mini], algorithm)
        )
        update = run.policy.train if taught[mini] else run.policy.measure
        found.append(update(mini, temperature=run.temperature, loss=algorithm.loss, figures=figures))
        step.computed("train", load_of(minis[mini]), BACKWARD if taught[mini] else 1)
    return found


def training_order(minis: int, epochs: int, seed: Sequence[int]) -> list[int]:
    """Which mini-batch each optimizer step of an RL step is on: all of them as they are, and in every further epoch in
    an order that is drawn from the seed."""
    generator = np.random.default_rng([*seed, 23])
    return [*range(minis), *(int(mini) for _ in range(epochs - 1) for mini in generator.permutation(minis))]


def give(model: TrainGroup, batch: Batch, minis: list[Sequences], name: str) -> None:
    """Cuts a column of the whole batch into its mini-batches, and gives it to a model's ranks, which hold these."""
    parts = batch[name].split([len(mini.tokens) for mini in minis])
    for mini, values in zip(minis, parts, strict=True):
        mini[name] = values
    model.add(name, parts)


def record_updates(run: Run, step: Step, sums: list[dict[str, float]], minis: Sequence[Mini], *, adapt: bool) -> None:
    """What a step's optimizer steps have measured.

    Args:
        run: Its entropy coefficient adapts to what was measured.
        step: Gets the metrics.
        sums: Of each optimizer step.
        minis: What each of them was on.
        adapt: Whether the policy learned, so that a coefficient may.
    """
    algorithm, replay = run.config.algorithm, run.config.policy.moe.replay
    moved = [bool(found.get("grad_norm")) for found in sums]
    step.record({"policy/steps_skipped": float(len(sums) - sum(moved))})
    as_sampled = sums[: moved.index(True) + 1] if any(moved) else sums
    """Those whose log-probs and choices are of the weights that sampled, whatever old log-probs are."""
    step.record(mismatch(sums if algorithm.old_logprobs == "policy" else as_sampled))
    step.record(replay_metrics(sums, as_sampled if replay == "rollout" else sums))
    step.record(update_metrics(sums, minis, algorithm))
    if run.entropy.used:
        step.record({"policy/entropy_coefficient": run.entropy.applied})
    if "policy/entropy" in step.metrics and adapt:
        run.entropy.see(step.metrics["policy/entropy"])


def update_metrics(sums: list[dict[str, float]], minis: Sequence[Mini], algorithm: AlgorithmConfig) -> dict[str, float]:
    """`policy/…`: the mean over the optimizer steps of what each of them measured.

    One without a token that counts has no mean over tokens, one that was only measured no gradient norm.
    """
    totals = [weight_of(mini) for mini in minis]
    updates = [averages(found, algorithm, total) for found, total in zip(sums, totals, strict=True)]
    found: dict[str, list[float]] = {}
    for update, total in zip(updates, totals, strict=True):
        for name, value in update.items():
            if total or name not in {*MEANS, "loss"}:
                found.setdefault(name, []).append(value)
    elsewhere = ("mismatch_", PREFIX)
    return {f"policy/{k}": sum(values) / len(values) for k, values in found.items() if not k.startswith(elsewhere)}
