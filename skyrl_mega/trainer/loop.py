"""The RL loop, synchronous: generate and score, advantages, log-probs, train, sync, evaluate, checkpoint."""

from __future__ import annotations

from skyrl_mega.algorithms.mismatch import mismatch
from skyrl_mega.algorithms.token_weights import averages
from skyrl_mega.cluster.channel import heeding
from skyrl_mega.config.schema import AlgorithmConfig
from skyrl_mega.megatron.sequences import Sequences
from skyrl_mega.rollout.trajectory import Group
from skyrl_mega.trainer.batch import make_batch, mini_batches, token_advantages
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
    algorithm, data = run.config.algorithm, run.config.data
    batch = make_batch(groups, algorithm, run.config.rollout)
    batch["advantages"] = token_advantages(batch, algorithm)
    minis = mini_batches(batch, data.mini_batch_prompts, algorithm)

    with step.phase("logprobs"):
        run.policy.hold(minis)
        if len(minis) > 1:  # the first one trains with the weights that sampled: its own log-probs are the old ones
            run.policy.keep_logprobs("old_logprobs", temperature=run.temperature)
        if run.reference:
            run.reference.keep_logprobs(minis, temperature=run.temperature)

    with step.phase("train"):
        sums = [run.policy.train(mini, temperature=run.temperature, loss=algorithm.loss) for mini in range(len(minis))]
    step.record(mismatch(sums))
    step.record(update_metrics(sums, minis, algorithm))


def update_metrics(
    sums: list[dict[str, float]], minis: list[Sequences], algorithm: AlgorithmConfig
) -> dict[str, float]:
    """`policy/…`: the mean over the optimizer steps of what each of them measured."""
    totals = [float(mini["weights"].sum()) for mini in minis]
    updates = [averages(found, algorithm, total) for found, total in zip(sums, totals, strict=True)]
    names = [name for name in updates[0] if not name.startswith("mismatch_")]
    return {f"policy/{name}": sum(update[name] for update in updates) / len(updates) for name in names}
