"""`rollout.generator: best_of_n`: samples more answers than wanted and trains on those with the most to learn from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar

from skyrl_mega.config.options import Option, whole
from skyrl_mega.rollout.generators import Branch, GeneratorService, GroupRequest, TrajectoryGenerator


class BestOfN(TrajectoryGenerator):
    """Samples `n` answers and returns the best and the worst, half each: the rewards differ as much as they can.

    The returned answers are no fair sample of the policy: rewards and lengths of the step are those of the choice.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "n": whole(16, "answers sampled for each prompt; at least data.samples_per_prompt", low=1)
    }

    async def generate(self, group: GroupRequest, service: GeneratorService) -> Sequence[Branch]:
        """Samples `n` answers, at least `group.samples`, and returns `group.samples` of these, judged, sorted by rising
        reward: those with the lowest rewards, then those with the highest, one more if the number is odd.

        Raises:
            GeneratorFault: An answer needs more turns or requests than the run allows.
        """
        n = max(self.options["n"], group.samples)
        answers = await asyncio.gather(*(self._answer(service, i % group.samples) for i in range(n)))
        ranked = sorted(answers, key=lambda answer: answer.reward)
        worst = group.samples // 2
        return [*ranked[:worst], *ranked[n - group.samples + worst :]]

    async def _answer(self, service: GeneratorService, sample: int) -> Branch:
        branch = await service.open(sample)
        while not branch.done:
            branch = await (await branch.sample()).step()
        return branch
