"""The interface of a generator of one's own (`rollout.generator`, docs/generators.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from skyrl_mega.config.options import Option
from skyrl_mega.rollout.generators.branch import Branch
from skyrl_mega.rollout.generators.group_state import GroupRequest
from skyrl_mega.rollout.generators.service import GeneratorService

SHARED = ("each", "once")
"""Values of `TrajectoryGenerator.shared`."""


class TrajectoryGenerator:
    """Makes the trajectories of a prompt. An object serves all groups of a process, many at a time, and keeps no state
    between groups: a resumed run repeats an unfinished group from the prompt.

    Args:
        options: `rollout.generator_options`, with the defaults of `OPTIONS` filled in.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {}
    """Name → declaration of each option (`skyrl_mega.envs.options`)."""
    shared: str = "each"
    """Training on tokens that several returned trajectories have in common. `each`: every trajectory trains on all of
    its sampled tokens, so that common tokens count once for each. `once`: only the first of the trajectories trains on
    the common tokens; the others read them as context."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options

    async def generate(self, group: GroupRequest, service: GeneratorService) -> Sequence[Branch]:
        """Returns the group's trajectories: `group.samples` different branches, each `judged` by the environment. Must
        not block: other groups run in the same event loop. An exception fails the trajectories of this group only.
        Every generator defines this method; the base class raises NotImplementedError.

        Args:
            group: The prompt, and the number of trajectories.
            service: The engines and environments.
        """
        raise NotImplementedError
