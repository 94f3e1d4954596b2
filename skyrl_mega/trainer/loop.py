"""The RL loop, synchronous: generate and score, advantages, log-probs, train, sync, evaluate, checkpoint."""

from __future__ import annotations

import numpy as np
import torch

from skyrl_mega.algorithms.mismatch import mismatch
from skyrl_mega.algorithms.token_weights import averages
from skyrl_mega.cluster.channel import heeding
from skyrl_mega.rollout.trajectory import Group
from skyrl_mega.trainer.batch import batch_of, mini_batches, not_drawn
from skyrl_mega.trainer.run import Run
from skyrl_mega.trainer.shutdown import GracefulStop
from skyrl_mega.trainer.step import Step


def train(run: Run) -> None:
    """Trains until the steps or the prompts are used up. The engines hold the policy's weights when this is called.

    Raises:
        GracefulStop: SIGUSR1 came; the steps done are in a checkpoint.
        Stopped: Another signal did.
        CannotLearn: The last `run.patience` steps taught the policy nothing.
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
            with step.phase("sync"):
                step.record(run.sync.sync(step.number))
        if run.due(run.config.evaluation.every, step.number):
            run.evaluate(step)
        run.complete(step)
        run.save_if_due()
        run.health.end_if_stuck(step.number)


def train_on(run: Run, step: Step, groups: list[Group]) -> None:
    """Advantages, log-probs under the weights that sampled, and the optimizer steps on them."""
    algorithm = run.config.algorithm
    batch = batch_of(groups, algorithm, run.response_limit, run.config.rollout.step_wise)

    with step.phase("logprobs"):
        old, _ = run.policy.logprobs(batch, temperature=run.temperature)
        batch.fields["old_logprobs"] = old
        if run.reference:
            batch.fields["reference_logprobs"], _ = run.reference(batch, temperature=run.temperature)
    engine = batch.fields["rollout_logprobs"]
    drawn = ~not_drawn(batch, run.config.rollout.conversation)  # nothing is to be corrected where no engine drew
    mask = batch.fields["mask"] * drawn
    step.record(mismatch(torch.from_numpy(engine), torch.from_numpy(old), torch.from_numpy(mask)))
    batch.fields["rollout_logprobs"] = np.where(drawn, engine, old)

    with step.phase("train"):
        prompts = run.config.data.mini_batch_prompts or len(groups)
        minis = mini_batches(batch, prompts, algorithm)
        sums = [run.policy.train(mini, temperature=run.temperature, loss=algorithm.loss) for mini in minis]
    totals = [float(mini.fields["weights"].sum()) for mini in minis]
    updates = [averages(found, algorithm, total) for found, total in zip(sums, totals, strict=True)]
    step.record({f"policy/{name}": sum(u[name] for u in updates) / len(updates) for name in updates[0]})
