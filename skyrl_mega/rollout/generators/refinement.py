"""`rollout.generator: refinement`: the policy answers, criticises its answer, and answers again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar

from skyrl_mega.config.options import Option, text
from skyrl_mega.rollout.generators import Branch, GeneratorService, GroupRequest, TrajectoryGenerator


class Refinement(TrajectoryGenerator):
    """Three turns of the policy, of which the environment judges the last: `rollout.max_turns` is at least 3. All
    three turns are trained on by the last one's reward."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "criticise": text("Find what is wrong with this answer.", "the user's words after the first answer"),
        "again": text("Answer the question again.", "the user's words after the criticism"),
    }

    async def generate(self, group: GroupRequest, service: GeneratorService) -> Sequence[Branch]:
        """Returns `group.samples` branches, each a conversation of three turns, judged by the environment.

        Raises:
            GeneratorFault: `rollout.max_turns` is below 3.
        """
        return await asyncio.gather(*(self._refine(service, sample) for sample in range(group.samples)))

    async def _refine(self, service: GeneratorService, sample: int) -> Branch:
        branch = await service.open(sample)
        for words in (self.options["criticise"], self.options["again"]):
            branch = (await branch.sample()).tell([{"role": "user", "content": words}])
        return await (await branch.sample()).step()
