"""The RL loop: generate and score, log-probs and values, advantages, train, sync, evaluate, checkpoint.

The `rollouts` decide if trajectories are generated within a step or ahead of training (`asynchrony.mode`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skyrl_mega.algorithms.losses import Figures
from skyrl_mega.algorithms.mismatch import mismatch
from skyrl_mega.algorithms.old_logprobs import columns, pass_needed
from skyrl_mega.algorithms.token_weights import MEANS, averages
from skyrl_mega.batch.advantages import (
    Advantages,
    compute_advantages,
    follow_from_rewards,
    has_gradient,
    silent_samples,
)
from skyrl_mega.batch.make_batch import make_batch, mini_batches, needs_tokens
from skyrl_mega.batch.mini_batch_stats import mean_importance_weight, token_selections
from skyrl_mega.batch.samples import Samples
from skyrl_mega.cluster.channel import polling_for_stop
from skyrl_mega.config.schema import AlgorithmConfig, Config
from skyrl_mega.planner.flops import BACKWARD
from skyrl_mega.trainer import critic
from skyrl_mega.trainer.heap import freeze_heap
from skyrl_mega.trainer.replay import PREFIX, check_routes, replay_metrics
from skyrl_mega.trainer.run import Run
from skyrl_mega.trainer.shutdown import GracefulStop
from skyrl_mega.trainer.speed import forward_load
from skyrl_mega.trainer.step import Step
from skyrl_mega.trainer.step_plan import StepFunction, StepPlan, one_update, step_function
from skyrl_mega.trajectories.trajectory import Group


def train(run: Run) -> None:
    """Trains until all steps are done or the prompts are used up, after an evaluation at the start if due. Expects
    engines with the policy's weights.

    Raises:
        GracefulStop: SIGUSR1 arrived; the completed steps are in a checkpoint.
        Stopped: Another signal arrived.
        CannotLearn: The policy learned nothing from the last `run.patience` steps.
        EngineDiffers: Engine and policy differ by more than `health.mismatch` allows.
        StaleTooFar: A token is older than `asynchrony.max_staleness` allows.
        WrongRoutes: Expert routes are missing or do not match the tokens.
        ActorFailed, ClusterError: A rank failed, or no engine or rollout worker is left; or arrays were lost.
        UserError: Too many environments failed, or the function of `run.loop` is wrong.
        OSError: A file of the run could not be written.
    """
    function = step_function(run.config)
    freeze_heap()
    with polling_for_stop():
        run.evaluate_before_training()
        try:
            while not run.finished:
                take_step(run, function)
        except GracefulStop:
            run.save_before_exit()
            raise


def take_step(run: Run, function: StepFunction = one_update) -> None:
    """Runs one RL step: generates groups, trains, syncs the engines, evaluates and saves if due. Without groups neither
    trains nor syncs.

    Args:
        run: The run.
        function: Calls the parts of the step in its order (`run.loop`); the default generates and trains.

    Raises:
        GracefulStop: A graceful end was requested before training began, so that the step is abandoned, or during the
            rest of the step, which is complete.
        Stopped: An immediate end was requested.
        CannotLearn: The policy learned nothing from the last `run.patience` steps.
        EngineDiffers: Engine and policy differ by more than `health.mismatch` allows.
        StaleTooFar: A token is older than `asynchrony.max_staleness` allows.
        WrongRoutes: Expert routes are missing or do not match the tokens.
        ActorFailed, ClusterError: A rank failed, or no engine or rollout worker is left; or arrays were lost.
        UserError: Too many environments failed, or `function` is wrong.
        OSError: A file of the run could not be written.
    """
    run.shutdown.raise_if_requested()
    with StepPlan(run, run.next_step(), train_on) as plan:
        function(plan)


def train_on(run: Run, step: Step, groups: list[Group]) -> None:
    """Trains the policy, and the critic if there is one, on a step's groups, and records the metrics in `step`.

    Computes log-probs and values under the present weights and advantages over the whole step, then trains the critic
    and the policy. In the first `critic.warmup_steps` steps the policy's updates are only measured, not applied.
    Advantages that follow from rewards alone come first, so that samples without a gradient take no backward pass. The
    driver reads tokens, and columns from the ranks, only if the algorithm works on tokens (`needs_tokens`).

    Raises ActorFailed if a rank fails, ClusterError if trajectories are lost, WrongRoutes if routes to replay are
    missing, UserError if a function of the user is wrong, and Stopped if the run must end.
    """
    algorithm, data, policy = run.config.algorithm, run.config.data, run.config.policy
    batch = make_batch(groups, algorithm, run.config.rollout)
    minis = mini_batches(batch, data.mini_batch_prompts, algorithm)
    if by_token := needs_tokens(run.config):
        batch.read_tokens()
    if policy.moe.replay == "rollout":
        check_routes(batch.tokens)
    advantages = compute_advantages(batch, algorithm) if follow_from_rewards(algorithm) else None
    with step.phase("logprobs"):
        run.policy.hold(minis, silent_by_mini_batch(advantages, minis, run.config) if advantages else None)
        compute_logprobs(run, step, minis)
        for name in sorted(columns(algorithm) - {"values"}):  # values come from the critic
            batch.tokens[name] = torch.cat(run.policy.column(name))
    if run.critic:
        with step.phase("values"):
            batch.tokens["values"] = critic.values(run.critic, minis)

    only_critic = run.critic is not None and step.number <= run.config.critic.warmup_steps
    if algorithm.kl.where == "reward":
        step.record(run.kl.penalize(batch, adapt=not only_critic))
    advantages = advantages or compute_advantages(batch, algorithm)
    step.record({"policy/advantage_fraction": int(advantages.learning.sum()) / max(1, int(batch.counts.sum()))})
    parts = split(advantages.whitened, minis, by_token=by_token)
    run.policy.add("advantages", parts, per_sample=not by_token)
    views = batch.mini_batch_tokens(minis, parts) if by_token else []
    if run.critic:
        batch.tokens["returns"] = advantages.estimated + batch.tokens["values"]
        run.critic.add("returns", split(batch.tokens["returns"], minis, by_token=True))
        with step.phase("critic"):
            step.record(critic.train_critic(run.critic, views, run.config.critic.epochs))
        step.record(critic.quality(batch.tokens))

    seed = [run.config.run.seed, step.number]
    for name, values in token_selections(views, algorithm, seed).items():
        run.policy.add(name, values)
    importance_means = [mean_importance_weight(view, algorithm) for view in views] or [1.0] * len(minis)
    trainable = [
        not only_critic and has_gradient(mini.counts, learning, algorithm, policy.moe)
        for mini, learning in zip(minis, split(advantages.learning, minis, by_token=False), strict=True)
    ]
    step.record({"policy/forward_only_fraction": forward_only_fraction(run, minis, trainable)})
    if policy.share_prefixes:
        left_out = sum(int(run.policy.left_out(index).sum()) for index in range(len(minis)))
        step.record({"policy/shared_fraction": left_out / max(1, sum(int(mini.lengths.sum()) for mini in minis))})
    order = training_order(len(minis), 1 if only_critic else data.epochs_per_step, seed)
    with step.phase("train"):
        updates = run_optimizer_steps(run, step, minis, order, trainable, importance_means)
    record_updates(run, step, updates, [minis[index] for index in order], adapt=not only_critic)


def silent_by_mini_batch(advantages: Advantages, minis: Sequence[Samples], config: Config) -> list[Tensor]:
    """Returns, for each mini-batch of S samples, a tensor bool [S]: True for samples with a gradient of exactly 0."""
    algorithm, moe = config.algorithm, config.policy.moe
    learning = split(advantages.learning, minis, by_token=False)
    return [silent_samples(mini.counts, part, algorithm, moe) for mini, part in zip(minis, learning, strict=True)]


def compute_logprobs(run: Run, step: Step, minis: Sequence[Samples]) -> None:
    """Has the ranks compute old log-probs, and the reference's if there is one, and keep both as columns.

    With a single optimizer step, the log-probs of that step are the old log-probs: the policy's pass is then skipped
    unless the driver needs a column; see `algorithms.old_logprobs`.

    Raises:
        ActorFailed: A rank failed.
    """
    algorithm = run.config.algorithm
    needed = columns(algorithm)
    if pass_needed(algorithm, len(minis) * run.config.data.epochs_per_step):
        entropy, squares = (name if name in needed else None for name in ("old_entropy", "old_squares"))
        run.policy.keep_logprobs("old_logprobs", temperature=run.temperature, entropy=entropy, squares=squares)
        count_logprob_flops(run, step, minis)
    if run.reference:
        run.reference.keep_logprobs(minis, temperature=run.temperature)
        if run.reference.ranks is None:
            count_logprob_flops(run, step, minis)


def count_logprob_flops(run: Run, step: Step, minis: Sequence[Samples]) -> None:
    """Adds a forward pass over these mini-batches to the work of the phase `logprobs` in `step.loads`."""
    for index, mini in enumerate(minis):
        step.add_load("logprobs", forward_load(mini, run.policy.left_out(index)))


def run_optimizer_steps(
    run: Run,
    step: Step,
    minis: Sequence[Samples],
    order: Sequence[int],
    trainable: Sequence[bool],
    importance_means: Sequence[float],
) -> list[dict[str, float]]:
    """Runs optimizer steps on the stored mini-batches in the given `order`, and returns the metrics of each step.

    Call `run.policy.hold(minis)` first, and add the columns of the loss: the ranks train on the mini-batches of the
    latest `hold`. The metrics are sums weighted like the loss; `update_metrics` makes means of the sums.

    Args:
        run: The run.
        step: Receives the amount of work (`Step.loads`).
        minis: The mini-batches given to `hold`, only to count the work.
        order: Index of the mini-batch of each optimizer step.
        trainable: For each mini-batch, False to measure the metrics without an optimizer step.
        importance_means: For each mini-batch, the divisor of its importance weights.

    Raises:
        ActorFailed: A rank failed.
    """
    metrics, loss = [], run.config.algorithm.loss
    for index in order:
        figures = Figures(entropy_coefficient=run.entropy.applied, importance_mean=importance_means[index])
        update = run.policy.train if trainable[index] else run.policy.measure
        metrics.append(update(index, temperature=run.temperature, loss=loss, figures=figures))
        count_training_flops(run, step, minis[index], index, trained=trainable[index])
    return metrics


def count_training_flops(run: Run, step: Step, mini: Samples, index: int, *, trained: bool) -> None:
    """Adds the work of an optimizer step on mini-batch number `index`, or only of its forward pass if it is not
    `trained`, to the phase `train` in `step.loads`. Some samples may take no backward pass
    (`TrainGroup.forward_only`)."""
    left_out = run.policy.left_out(index)
    step.add_load("train", forward_load(mini, left_out))
    if trained:
        learning = torch.ones(len(mini.parts), dtype=torch.bool).index_fill(0, run.policy.forward_only(index), False)
        rows = learning.nonzero()[:, 0]
        step.add_load("train", forward_load(mini.take(rows), left_out[rows]), BACKWARD - 1)


def forward_only_fraction(run: Run, minis: Sequence[Samples], trainable: Sequence[bool]) -> float:
    """Returns the share of a step's tokens, from 0 to 1, for which training computes metrics, but no backward pass; 0
    without tokens.

    Args:
        run: The run.
        minis: The mini-batches of the step.
        trainable: False for a mini-batch that is only measured.
    """
    without = [
        int((mini.lengths[run.policy.forward_only(index)] if trained else mini.lengths).sum())
        for index, (mini, trained) in enumerate(zip(minis, trainable, strict=True))
    ]
    return sum(without) / max(1, sum(int(mini.lengths.sum()) for mini in minis))


def training_order(minis: int, epochs: int, seed: Sequence[int]) -> list[int]:
    """Returns the mini-batch index of each optimizer step of an RL step: the given order in the first epoch, then a
    random permutation per further epoch, seeded by `seed`."""
    generator = np.random.default_rng([*seed, 23])
    return [*range(minis), *(int(index) for _ in range(epochs - 1) for index in generator.permutation(minis))]


def split(values: Tensor, minis: Sequence[Samples], *, by_token: bool) -> list[Tensor]:
    """Splits a step's values, per token [T] or per sample [S], into the values of each mini-batch and returns these in
    the order of `minis`, as views of `values`. `by_token` is True for values per token."""
    return list(values.split([int(mini.lengths.sum()) if by_token else len(mini.parts) for mini in minis]))


def record_updates(
    run: Run, step: Step, updates: list[dict[str, float]], minis: Sequence[Samples], *, adapt: bool
) -> None:
    """Records the metrics of a step's optimizer steps in `step`: the number of steps without a weight update,
    mismatch and replay, the means of all others, and the entropy coefficient used. Then adapts this coefficient.

    Args:
        run: The run, with the entropy coefficient to adapt to the measured entropy.
        step: Receives the metrics.
        updates: Metrics of each optimizer step.
        minis: The mini-batch of each optimizer step; as many as `updates`.
        adapt: True if the policy was trained: only then the entropy coefficient may change, for the next step.
    """
    algorithm, replay = run.config.algorithm, run.config.policy.moe.replay
    moved = [bool(update.get("grad_norm")) for update in updates]
    step.record({"policy/steps_skipped": float(len(updates) - sum(moved))})
    # The first weight update still measures the weights at the start of the step.
    as_sampled = updates[: moved.index(True) + 1] if any(moved) else updates
    step.record(mismatch(updates if algorithm.old_logprobs == "policy" else as_sampled))
    step.record(replay_metrics(updates, as_sampled if replay == "rollout" else updates))
    step.record(update_metrics(updates, minis, algorithm))
    if run.entropy.used:
        step.record({"policy/entropy_coefficient": run.entropy.applied})
    if "policy/entropy" in step.metrics and adapt:
        run.entropy.update(step.metrics["policy/entropy"])


def update_metrics(
    updates: list[dict[str, float]], minis: Sequence[Samples], algorithm: AlgorithmConfig
) -> dict[str, float]:
    """Returns the metrics `policy/…` of a step: means over the optimizer steps, without mismatch and replay, recorded
    separately. `minis` has the mini-batch of each of `updates`.

    A mini-batch without a token in the loss is left out of means over tokens. Mini-batches that are only measured do
    not contribute a gradient norm.
    """
    totals = [mini.total_weight for mini in minis]
    means = [averages(update, algorithm, total) for update, total in zip(updates, totals, strict=True)]
    values_by_name: dict[str, list[float]] = {}
    for mean, total in zip(means, totals, strict=True):
        for name, value in mean.items():
            if total or name not in {*MEANS, "loss"}:
                values_by_name.setdefault(name, []).append(value)
    separate = ("mismatch_", PREFIX)
    return {
        f"policy/{k}": sum(values) / len(values) for k, values in values_by_name.items() if not k.startswith(separate)
    }
