"""The interfaces for running a trajectory, and a whole group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.gate import Start
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.rollout.workers.client import WorkerClient
from skyrl_mega.trajectories.trajectory import Trajectory


class Player(Protocol):
    """Runs trajectories: an `Agent` in this process, the client of the rollout workers, or either with a limit on open
    environments."""

    @property
    def router(self) -> Router | WorkerClient:
        """The router of the trajectories' requests."""

    async def play(self, prompt: Prompt, sample: int, name: str, start: Start | None = None) -> Trajectory:
        """Opens the environment, runs the trajectory, closes the environment, and returns the trajectory. A fault of
        the environment gives a trajectory with a failed status.

        Args:
            prompt: The prompt.
            sample: Number of the sample within the prompt, from 0.
            name: Unique name; the source of the requests' names and random stream.
            start: Awaited before the first turn (`Gate`); None: nothing is awaited. `start` is ignored if the number of
                open environments is limited, or workers run the trajectories.

        Raises:
            NoServingActor: No engine is left, in a phase.
            ActorFailed: An engine refused a request, or no engine or rollout worker is left and none restarts.
            WrongRoutes, UserError: An engine's routes do not match the tokens, or the chat template leaves out the
                assistant's words; from rollout workers an ActorFailed that names the error.
        """


class PlaysGroups(Protocol):
    """Runs whole groups by `rollout.generator`: in this process, or the client of the rollout workers."""

    @property
    def router(self) -> Router | WorkerClient:
        """The router of the groups' requests."""

    async def play_group(self, prompt: Prompt, names: Sequence[str], start: Start | None = None) -> list[Trajectory]:
        """Runs a group and returns its trajectories, closing all environments. A fault of the generator's code or of an
        environment gives trajectories with a failed status.

        Args:
            prompt: The prompt.
            names: Unique name of each trajectory.
            start: Awaited before the first request; None: nothing is awaited. `start` is ignored if workers run the
                group.

        Raises:
            NoServingActor: No engine is left, in a phase.
            ActorFailed: An engine refused a request, or no engine or rollout worker is left and none restarts.
            WrongRoutes, UserError: An engine's routes do not match the tokens, or the chat template leaves out the
                assistant's words; from rollout workers an ActorFailed that names the error.
        """
