"""The RL loop, synchronous: generate, score, advantages, log-probs, train, sync, evaluate, checkpoint."""

from __future__ import annotations

from skyrl_mega.algorithms.mismatch import mismatch
from skyrl_mega.trainer.batch import batch_of, mini_batches
from skyrl_mega.trainer.run import Run


def train(run: Run) -> None:
    """Trains until the steps or the prompts are used up. The engines hold the policy's weights when this is called."""
    config = run.config
    if run.step == 0 and config.evaluation.before:
        run.evaluate()
    while not run.finished:
        with run.next_step() as step:
            trajectories = run.sampler.sample(step)

            with step.phase("logprobs"):
                batch = batch_of(trajectories, config.algorithm, run.response_limit)
                old, _ = run.policy.logprobs(batch, temperature=run.temperature)
                batch.fields["old_logprobs"] = old
                if run.reference:
                    batch.fields["reference_logprobs"] = run.reference.logprobs(batch, temperature=run.temperature)
                step.record(mismatch(*run.tensors(batch.fields["rollout_logprobs"], old, batch.fields["mask"])))

            with step.phase("train"):
                for mini in mini_batches(batch, trajectories, run.mini_batch_prompts, config.algorithm.loss_mean):
                    step.record_policy(run.policy.train(mini, temperature=run.temperature))

            with step.phase("sync"):
                step.record(run.sync.sync(step.number))

            if run.due(config.evaluation.every):
                with step.phase("eval"):
                    step.record(run.evaluate())
            if run.due(config.checkpoint.every):
                with step.phase("checkpoint"):
                    run.save()
