"""Synchronous rollouts: prompts in data order, generation, and dynamic sampling within the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.trainer import saved_rollouts
from skyrl_mega.trainer.dynamic_sampling import GroupSelection
from skyrl_mega.trainer.health.failures import all_failed
from skyrl_mega.trainer.rollouts_ahead import Rollouts
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.trajectory import GREEDY, Group, Trajectory


class RolloutSource(Rollouts):
    """Takes prompts from the data and generates a step's trajectories with the engines.

    Args:
        config: The settings.
        prompts: All training prompts.
        stream: Chooses the prompts of the next step.
        generator: Samples the trajectories.
    """

    def __init__(self, config: Config, prompts: list[Prompt], stream: PromptStream, generator: Generator) -> None:
        self.config, self.prompts, self.stream, self.generator = config, prompts, stream, generator

    def next_groups(self, step: Step) -> list[Group]:
        """Generates and returns the step's groups, [] if too few prompts are left for a step; adds all trajectories,
        and metrics of sampling, to `step`.

        With dynamic sampling (DAPO, arXiv:2503.14476, equation 11) groups without a signal are dropped and replaced by
        new prompts or copies, in at most `max_rounds` rounds (`trainer/dynamic_sampling.py`). A step still short after
        the last round trains on fewer groups; `rollout/groups_missing` counts the gap. If every environment failed,
        sampling stops at once: no answer would be judged, and the run is about to end.

        The result depends only on the run's seed, the step's number, the position in the data and the weights. A step
        repeated after a resume is therefore the same.

        Raises:
            ActorFailed: An engine refused a request, or no engine or rollout worker is left and none restarts.
            WrongRoutes: An engine's expert routes do not match the tokens.
            UserError: A trajectory lacks the reward named by `algorithm.dynamic_sampling.reward`, or the generator or
                the chat template is unusable.
            Exception: `look` or `refill` of the generator raised it.
        """
        wanted, dynamic = self.config.data.prompts_per_step, self.config.algorithm.dynamic_sampling
        if not dynamic.enabled:
            return self._with_greedy(self._round(wanted, step), step)
        selection = GroupSelection(self.config.algorithm, wanted)
        while not selection.complete and selection.rounds < dynamic.max_rounds:
            groups = self._round(selection.prompts_to_sample(self.stream.remaining), step)
            if not groups:
                break  # fewer prompts are left in the last epoch
            selection.add(groups)
            if all_failed(step.trajectories):
                break
        chosen = selection.groups([self.config.run.seed, step.number])
        step.record(selection.metrics(chosen))
        return self._with_greedy(chosen, step)

    def prompts_left(self, done: int) -> int:
        """Returns the number of unused prompts of the data; ignores `done`, as nothing is generated ahead."""
        return self.stream.remaining

    def restore(self, folder: Path) -> str:
        """Restores the position in the data from a checkpoint, and discards trajectories generated ahead in another
        mode; their prompts are sampled again first. Returns a line about the discarded trajectories; empty if none were
        saved.

        Args:
            folder: The checkpoint's folder for rollouts.

        Raises:
            UserError: `rollouts.json` cannot be read, or the number of data rows, the seed or the shuffling differs
                from the saved run's.
            OSError, pyarrow.ArrowException, TypeError, ValueError: `rollouts.parquet` cannot be read.
        """
        kept = saved_rollouts.read(folder, self.config, self.stream, self.prompts)
        return str(kept) if isinstance(kept, saved_rollouts.Discarded) else ""

    def _round(self, count: int, step: Step) -> list[Group]:
        samples = self.config.data.samples_per_prompt
        chosen = self.stream.take(count)
        if not chosen:
            return []
        number, step.rounds = step.rounds, step.rounds + 1
        with step.phase("generate", total=count * samples) as progress:
            groups = self.generator.generate(
                [self.prompts[i] for i in chosen],
                samples=samples,
                sampling=self.config.rollout.sampling,
                seed=f"{self.config.run.seed}/{step.number}/{number}",
                progress=lambda done, _: progress.update(done),
                own=True,
            )
        step.trajectories += [t for group in groups for t in group.trajectories]
        return groups

    def _with_greedy(self, groups: list[Group], step: Step) -> list[Group]:
        """Adds a greedy answer to each group if the advantage estimator needs a baseline. Greedy answers are sampled in
        a separate round after the groups are chosen, under the samples' limits."""
        if not self.config.algorithm.advantage_traits.greedy or not groups or all_failed(step.trajectories):
            return groups
        distinct = list({id(group): group for group in groups}.values())  # a copied group shares its greedy answer
        with step.phase("generate", total=len(distinct)) as progress:
            answered = self.generator.generate(
                [group.prompt for group in distinct],
                samples=1,
                sampling=replace(self.config.rollout.sampling, temperature=0.0),
                seed=f"{self.config.run.seed}/{step.number}/greedy",
                progress=lambda done, _: progress.update(done),
            )
        for group, (greedy,) in zip(distinct, (answer.trajectories for answer in answered), strict=True):
            greedy.sample, group.greedy = GREEDY, greedy
            step.greedy.append(greedy)
        step.record(greedy_metrics(step.greedy))
        return groups


def greedy_metrics(greedy: list[Trajectory]) -> dict[str, float]:
    """Returns metrics of the step's greedy answers: the sum of the policy's tokens (`rollout/greedy_tokens`), the
    number of answers with a failed environment (`rollout/groups_without_baseline`), and the mean reward of the others
    (`reward/greedy`), left out if there are none. Metrics of samples exclude greedy answers."""
    rewards = [t.reward for t in greedy if not t.status.failed]
    metrics = {
        "rollout/greedy_tokens": float(sum(t.written for t in greedy)),
        "rollout/groups_without_baseline": float(len(greedy) - len(rewards)),
    }
    return metrics | ({"reward/greedy": sum(rewards) / len(rewards)} if rewards else {})
