"""`rollout.generator: tree_search`: a tree of answers with common beginnings."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import ClassVar

from skyrl_mega.config.options import Option, whole
from skyrl_mega.rollout.generators import Branch, GeneratorService, GroupRequest, TrajectoryGenerator


class TreeSearch(TrajectoryGenerator):
    """Samples an answer's beginning piece by piece and splits it after each piece, until the tree has
    `data.samples_per_prompt` leaves. The common beginnings are sampled once.

    Each leaf is a fair sample of the policy, though leaves of a branch are alike, so every leaf trains on all of its
    tokens: a common token gets the mean advantage of its leaves.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "depth": whole(2, "pieces of an answer before its rest", low=1, high=64),
        "tokens": whole(64, "tokens of a piece", low=1),
    }

    async def generate(self, group: GroupRequest, service: GeneratorService) -> Sequence[Branch]:
        """Returns the leaves of the tree: `group.samples` branches.

        Raises:
            GeneratorFault: The tree needs more turns or requests than the run allows.
        """
        root = await service.open()
        return await self._grow(root, group.samples, self.options["depth"])

    async def _grow(self, branch: Branch, leaves: int, depth: int) -> list[Branch]:
        """Returns the leaves of a branch: splits it in `depth` further rounds, as evenly as possible."""
        if not depth or branch.ended or branch.done:
            return await asyncio.gather(*(self._finish(branch) for _ in range(leaves)))
        split = max(2, round(leaves ** (1 / (depth + 1)))) if leaves > 1 else 1
        parts = [leaves // split + (i < leaves % split) for i in range(min(split, leaves))]
        pieces = await asyncio.gather(*(branch.sample(self.options["tokens"]) for _ in parts))
        grown = [self._grow(piece, part, depth - 1) for piece, part in zip(pieces, parts, strict=True)]
        return [leaf for leaves_of in await asyncio.gather(*grown) for leaf in leaves_of]

    async def _finish(self, branch: Branch) -> Branch:
        """Returns the branch continued to its end."""
        branch = await (branch if branch.ended else await branch.sample()).step()
        return branch if branch.done else await self._finish(branch)
