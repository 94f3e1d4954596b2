"""Where a step's trajectories come from: prompts in their order, generation, and DAPO's dynamic sampling."""

from __future__ import annotations

import torch

from skyrl_mega.algorithms.filters import informative_groups
from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.rollout.trajectory import Group
from skyrl_mega.trainer.health.failures import all_failed
from skyrl_mega.trainer.step import Step


class RolloutSource:
    """Draws prompts and has the engines answer them."""

    def __init__(self, config: Config, prompts: list[Prompt], stream: PromptStream, generator: Generator) -> None:
        self.config, self.prompts, self.stream, self.generator = config, prompts, stream, generator

    def next_groups(self, step: Step) -> list[Group]:
        """The step's groups.

        With dynamic sampling (DAPO, arXiv:2503.14476, equation 11) groups whose rewards are all the same are left out
        and as many new prompts are drawn, in at most `max_rounds` rounds. A step that is then still short takes what
        it has; `rollout/groups_missing` says how much that is. Where every environment has failed, no more is drawn:
        nothing that a policy says would be judged, and the run is about to end.
        """
        wanted, dynamic = self.config.data.prompts_per_step, self.config.algorithm.dynamic_sampling
        kept: list[Group] = []
        rounds = 0
        while len(kept) < wanted and rounds < (dynamic.max_rounds if dynamic.enabled else 1):
            groups = self._round(wanted - len(kept), rounds, step)
            if not groups:
                break  # the last epoch has no more prompts
            rounds += 1
            step.trajectories += [t for group in groups for t in group.trajectories]
            if all_failed(step.trajectories):
                break
            if dynamic.enabled:
                differs = informative_groups(torch.tensor([group.rewards for group in groups]))
                groups = [group for group, d in zip(groups, differs.tolist(), strict=True) if d]
            kept += groups
        if dynamic.enabled:
            drawn = len(step.trajectories) // self.config.data.samples_per_prompt
            step.record(
                {
                    "rollout/rounds": float(rounds),
                    "rollout/groups_left_out": float(drawn - len(kept)),
                    "rollout/groups_missing": float(wanted - len(kept)),
                }
            )
        return kept

    def _round(self, count: int, number: int, step: Step) -> list[Group]:
        samples = self.config.data.samples_per_prompt
        chosen = self.stream.take(count)
        if not chosen:
            return []
        with step.phase("generate", total=count * samples) as progress:
            return self.generator.generate(
                [self.prompts[i] for i in chosen],
                samples=samples,
                sampling=self.config.rollout.sampling,
                seed=f"{self.config.run.seed}/{step.number}/{number}",
                progress=lambda done, _: progress.update(done),
            )
