"""Where a step's trajectories come from: prompts, generation, and DAPO's dynamic sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_mega.algorithms.filters import informative_groups
from skyrl_mega.config.schema import Config
from skyrl_mega.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from skyrl_mega.data.order import PromptStream
    from skyrl_mega.envs.prompt import Prompt
    from skyrl_mega.rollout.generator import Generator
    from skyrl_mega.trainer.run import Step

import torch


class Sampler:
    """Draws prompts in their order and has the engines answer them."""

    def __init__(self, config: Config, prompts: list[Prompt], stream: PromptStream, generator: Generator) -> None:
        self.config, self.prompts, self.stream, self.generator = config, prompts, stream, generator

    def sample(self, step: Step) -> list[Trajectory]:
        """The step's groups of trajectories.

        With dynamic sampling (DAPO, arXiv:2503.14476 eq. 11), groups whose rewards are all the same are left out and as many new prompts
        are drawn, at most `max_rounds` times; then the step takes what it has, and `rollout/short_groups` says how many are missing.
        """
        data, dynamic = self.config.data, self.config.algorithm.dynamic_sampling
        wanted, kept, drawn, rounds = data.prompts_per_step, [], [], 0
        while len(kept) < wanted and rounds < (dynamic.max_rounds if dynamic.enabled else 1):
            chosen = self.stream.take(wanted - len(kept))
            if not chosen:
                break
            with step.phase("generate", total=len(chosen) * data.samples_per_prompt) as progress:
                trajectories = self.generator.generate(
                    [self.prompts[i] for i in chosen],
                    samples=data.samples_per_prompt,
                    sampling=self.config.rollout.sampling,
                    seed=(self.config.run.seed, step.number, rounds),
                    progress=progress.update,
                )
            groups = [
                trajectories[i : i + data.samples_per_prompt]
                for i in range(0, len(trajectories), data.samples_per_prompt)
            ]
            drawn += trajectories
            rewards = torch.tensor([[t.reward for t in group] for group in groups])
            keep = informative_groups(rewards).tolist() if dynamic.enabled else [True] * len(groups)
            kept += [group for group, differs in zip(groups, keep, strict=True) if differs]
            rounds += 1
        step.record_rollout(drawn)
        if dynamic.enabled:
            total = len(drawn) // data.samples_per_prompt
            step.record(
                {
                    "rollout/rounds": float(rounds),
                    "rollout/groups_left_out": float(total - len(kept)),
                    "rollout/groups_missing": float(max(0, wanted - len(kept))),
                }
            )
        return [t for group in kept for t in group]
