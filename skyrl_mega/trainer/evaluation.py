"""Scores on held-out prompts: mean reward and pass@n for each data source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from skyrl_mega.config.derived import evaluation_sampling
from skyrl_mega.config.schema import Config
from skyrl_mega.data.sources import set_names, source_of
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.telemetry.console import Phase
from skyrl_mega.telemetry.events import Event
from skyrl_mega.trainer.health.failures import failures, refuse_broken
from skyrl_mega.trajectories.trajectory import Trajectory


class Evaluator:
    """Samples the evaluation prompts, `evaluation.samples` times each, and computes scores.

    Args:
        config: The settings.
        prompts: The evaluation prompts.
        generator: Samples the trajectories.
        say: Prints a message for the user.
    """

    def __init__(
        self, config: Config, prompts: list[Prompt], generator: Generator, say: Callable[[str], None] = print
    ) -> None:
        self.config, self.prompts, self.generator, self.say = config, prompts, generator, say

    @property
    def samples(self) -> int:
        """Number of trajectories of an evaluation: prompts times `evaluation.samples`."""
        return len(self.prompts) * self.config.evaluation.samples

    def evaluate(self, step: int, progress: Phase) -> dict[str, float]:
        """Samples all evaluation prompts with the engines' present weights and returns the metrics of `scores`; {}
        without prompts. Prints failures of environments.

        Args:
            step: Number of completed RL steps, part of the seed.
            progress: Updated with the number of finished trajectories.

        Raises:
            UserError: The environment of every trajectory failed.
            ActorFailed: An engine refused a request, or no engine is left and none restarts.
            Exception: `look` or `refill` of the generator raised it.
        """
        if not self.prompts:
            return {}
        settings = self.config.evaluation
        groups = self.generator.generate(
            self.prompts,
            samples=settings.samples,
            sampling=evaluation_sampling(self.config),
            seed=f"{self.config.run.seed}/{step}/evaluation",
            progress=lambda done, _: progress.update(done),
        )
        trajectories = [t for group in groups for t in group.trajectories]
        refuse_broken(trajectories)
        if failure_text := failures(trajectories):
            text = f"health: evaluation after step {step}: environment_fails: {failure_text}"
            self.say(Event("health", text, step=step, finding="environment_fails", evidence=failure_text))
        metrics = scores(trajectories)
        if failed := [name.split("/")[1] for name, share in metrics.items() if name.endswith("/failed") and share == 1]:
            self.say(
                f"evaluation after step {step}: all samples of {', '.join(failed)} failed; there is no mean over "
                "all sets"
            )
        return metrics


def scores(trajectories: list[Trajectory]) -> dict[str, float]:
    """Returns, for each data source, `eval/<source>/mean`, the mean over prompts of the mean reward of a prompt's
    samples, and `eval/<source>/pass_at_<n>`, the share of prompts with a sample of positive reward. n is the largest
    number of samples of a prompt of the source, failed samples included.

    Samples with a failed environment are excluded and only counted in `eval/<source>/failed`, the share of failures,
    present if any failed. Figures of the environment (`Trajectory.metrics`) are averaged over the samples that have the
    figure: `eval/<source>/of/<name>`. A prompt whose samples all failed does not count in mean and pass@n; a source
    with only such prompts lacks both.
    """
    samples: dict[str, dict[int, list[Trajectory]]] = defaultdict(lambda: defaultdict(list))
    names = set_names(source_of(t.prompt) for t in trajectories)
    for t in trajectories:
        samples[names[source_of(t.prompt)]][t.prompt.uid].append(t)
    out = {}
    for source, by_prompt in samples.items():
        most = max(map(len, by_prompt.values()))
        judged = [[t.reward for t in group if not t.status.failed] for group in by_prompt.values()]
        if rewards := [r for r in judged if r]:
            out[f"eval/{source}/mean"] = float(np.mean([np.mean(r) for r in rewards]))
            out[f"eval/{source}/pass_at_{most}"] = float(np.mean([max(r) > 0 for r in rewards]))
        figures = [t.metrics for group in by_prompt.values() for t in group if not t.status.failed]
        for name in sorted({name for figure in figures for name in figure}):
            out[f"eval/{source}/of/{name}"] = float(np.mean([figure[name] for figure in figures if name in figure]))
        if failed := sum(map(len, by_prompt.values())) - sum(map(len, judged)):
            out[f"eval/{source}/failed"] = failed / sum(map(len, by_prompt.values()))
    return out
