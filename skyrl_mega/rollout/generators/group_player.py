"""Runs the groups of a generator of one's own, in this process."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Sequence

from skyrl_mega.common.trials import last_frame
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent import edits
from skyrl_mega.rollout.agent.agent_loop import Agent, pause
from skyrl_mega.rollout.gate import Start
from skyrl_mega.rollout.generators import finish
from skyrl_mega.rollout.generators.base import TrajectoryGenerator
from skyrl_mega.rollout.generators.group_state import GeneratorFault, GroupRequest
from skyrl_mega.rollout.generators.service import GeneratorService
from skyrl_mega.trajectories.trajectory import Status, Trajectory


class GroupPlayer:
    """Runs groups by a generator. Keeps no state between groups.

    Args:
        agent: Runs turns and environments.
        generator: Makes the trajectories.
    """

    def __init__(self, agent: Agent, generator: TrajectoryGenerator) -> None:
        self.agent, self.generator, self.router = agent, generator, agent.router

    async def play_group(self, prompt: Prompt, names: Sequence[str], start: Start | None = None) -> list[Trajectory]:
        """Runs a group and returns its trajectories. If the generator's code fails, all are failed trajectories with
        the error. After an infrastructure fault of an environment the group is repeated from the prompt, at most
        `environment.retries` times, with the same random streams.

        Args:
            prompt: The prompt.
            names: Unique name of each trajectory.
            start: Awaited before the first request; None: nothing is awaited.

        Raises:
            NoServingActor: No engine is left, in a phase.
            ActorFailed: An engine refused a request, or the restart budget is used up.
            WrongRoutes: An engine's routes do not match the tokens.
            UserError: The chat template leaves out the assistant's words.
        """
        group = GroupRequest(prompt, tuple(names))
        for retries in itertools.count():
            trajectories = await self._attempt(group, start)
            for t in trajectories:
                t.retries = retries
            failed = any(t.status is Status.ERROR_INFRASTRUCTURE for t in trajectories)
            if not failed or retries >= self.agent.retries:
                return trajectories
            await pause(retries)
        raise AssertionError

    async def _attempt(self, group: GroupRequest, start: Start | None) -> list[Trajectory]:
        service = GeneratorService(self.agent, group, start)
        try:
            trajectories = await self._generate(service)
            if service.fault is None:
                await service.started()  # the other groups of a phase wait for this group
        finally:
            await service.close()
        if service.fault is not None:  # the generator may have caught the exception
            raise service.fault
        return trajectories

    async def _generate(self, service: GeneratorService) -> list[Trajectory]:
        """Returns the generator's trajectories; failed ones if its code fails."""
        try:
            return finish.trajectories(await self.generator.generate(service.group, service), service, self.generator)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            text = str(error) if isinstance(error, GeneratorFault) else f"generate raised {error!r}"
            if isinstance(error, asyncio.CancelledError):
                text = "generate awaited a task that it had cancelled"
            status = Status.ERROR_INFRASTRUCTURE if isinstance(error, InfrastructureFault) else Status.ERROR_ENV
            about = {"error": f"generator {type(self.generator).__name__}: {text}", **_place(error, self.generator)}
            failed = [self.agent.failed_trajectory(service.group.prompt, i, "") for i in range(service.group.samples)]
            for t in failed:
                edits.fail(t, status, about)
            return failed


def _is_cancelled() -> bool:
    """Returns True if the group's own task is being cancelled. A CancelledError otherwise comes from a task that the
    generator cancelled and awaited."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _place(error: BaseException, generator: TrajectoryGenerator) -> dict[str, str]:
    """Returns `{"at": …}` with the innermost line of the generator's file that raised the error; {} if unknown."""
    file = inspect.getsourcefile(type(generator))
    frame = last_frame(error, file)
    return {"at": f"{file}, line {frame.lineno}: {frame.line}"} if frame else {}
