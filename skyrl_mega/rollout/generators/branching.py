"""`rollout.generator: branching`: answers that leave a first answer where the policy was least certain."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar

from skyrl_mega.config.options import Option, whole
from skyrl_mega.rollout.generators import Branch, GeneratorService, GroupRequest, TrajectoryGenerator


class Branching(TrajectoryGenerator):
    """Samples `stems` whole answers and then, for the other trajectories, new ends of these answers, from the tokens
    with the lowest log-probs on. Only the new ends are sampled again.

    The least certain token is chosen by what the policy sampled, so the new ends are no fair sample of the policy.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {"stems": whole(2, "whole answers of each prompt", low=1)}

    async def generate(self, group: GroupRequest, service: GeneratorService) -> Sequence[Branch]:
        """Returns `group.samples` branches: first the whole answers, at most `stems`, then the answers with new ends.

        Raises:
            GeneratorFault: An answer needs more turns or requests than the run allows.
        """
        stems = min(self.options["stems"], group.samples)
        roots = await asyncio.gather(*(service.open(i) for i in range(stems)))
        answers = await asyncio.gather(*(root.sample() for root in roots))
        ends = []
        for i in range(stems, group.samples):
            answer = answers[i % stems]
            least = sorted(range(len(answer.turn_tokens)), key=answer.turn_logprobs.__getitem__)
            ends.append(answer.cut(least[(i // stems - 1) % len(least)] if least else 0).sample())
        branches = [*answers, *await asyncio.gather(*ends)]
        return await asyncio.gather(*map(self._finish, branches))

    async def _finish(self, branch: Branch) -> Branch:
        """Returns the branch continued to its end."""
        branch = await branch.step()
        return branch if branch.done else await self._finish(await branch.sample())
