"""The RL loop, synchronous: generate and score, advantages, log-probs, train, sync, evaluate, checkpoint."""

from __future__ import annotations

import torch

from skyrl_mega.algorithms.mismatch import mismatch
from skyrl_mega.cluster.channel import heeding
from skyrl_mega.rollout.trajectory import Trajectory
from skyrl_mega.trainer.batch import batch_of, mini_batches
from skyrl_mega.trainer.run import Run, Step
from skyrl_mega.trainer.stop import Leaving


def train(run: Run) -> None:
    """Trains until the steps or the prompts are used up. The engines hold the policy's weights when this is called.

    Raises:
        Leaving: SIGUSR1 came; the steps done are in a checkpoint.
        Stopped: Another signal did.
        CannotLearn: The last `run.patience` steps taught the policy nothing.
    """
    with heeding():
        run.begin()
        try:
            while not run.finished:
                take_step(run)
        except Leaving:
            run.save_before_leaving()
            raise


def take_step(run: Run) -> None:
    """One RL step. Until it touches the policy it can be abandoned."""
    run.notice.look()
    step = run.next_step()
    groups = run.sampler.sample(step)
    with run.notice.held():
        run.keep(step)
        if groups:  # dynamic sampling may have found nothing to learn from
            learn(run, step, groups)
            with step.phase("sync"):
                step.record(run.sync.sync(step.number))
        if run.due(run.config.evaluation.every, step.number):
            run.evaluate(step)
        run.complete(step)
        run.save_if_due()
        run.health.end_if_stuck(step.number)


def learn(run: Run, step: Step, groups: list[list[Trajectory]]) -> None:
    """Advantages, log-probs under the weights that sampled, and the optimizer steps on them."""
    algorithm = run.config.algorithm
    batch = batch_of(groups, algorithm, run.response_limit, run.config.rollout.step_wise)

    with step.phase("logprobs"):
        old, _ = run.policy.logprobs(batch, temperature=run.temperature)
        batch.fields["old_logprobs"] = old
        if run.reference:
            batch.fields["reference_logprobs"], _ = run.reference(batch, temperature=run.temperature)
    engine, mask = batch.fields["rollout_logprobs"], batch.fields["mask"]
    step.record(mismatch(torch.from_numpy(engine), torch.from_numpy(old), torch.from_numpy(mask)))

    with step.phase("train"):
        prompts = run.config.data.mini_batch_prompts or len(groups)
        minis = mini_batches(batch, prompts, algorithm.loss_mean)
        updates = [run.policy.train(mini, temperature=run.temperature) for mini in minis]
    step.record({f"policy/{name}": sum(u[name] for u in updates) / len(updates) for name in updates[0]})
