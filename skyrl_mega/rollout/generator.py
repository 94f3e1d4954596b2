"""Generation of trajectories from prompts, phase by phase."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Self, TypeVar

from skyrl_mega.cluster.fleet import Fleet, NoServingActor
from skyrl_mega.config.containers import environment_slots
from skyrl_mega.config.schema import EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent.agent_factory import AgentFactory
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.event_loop import EventLoop, Loop, cancel_all
from skyrl_mega.rollout.gate import Gate, Start
from skyrl_mega.rollout.generators import load
from skyrl_mega.rollout.generators.group_player import GroupPlayer
from skyrl_mega.rollout.player import Player, PlaysGroups
from skyrl_mega.rollout.slots import SlotPlayer, Slots
from skyrl_mega.rollout.workers.client import WorkerClient
from skyrl_mega.rollout.workers.group import Workers
from skyrl_mega.telemetry.timeline import Timeline
from skyrl_mega.telemetry.trace import Span
from skyrl_mega.trajectories.trajectory import Group, Trajectory

Answer = TypeVar("Answer")
Progress = Callable[[int, int], None]
"""Called with the numbers of finished and of all trajectories."""

LOOK_EVERY_S = 0.5
"""Seconds between two checks if the run must end."""


class Generator:
    """A generator of trajectories on a group of engines, phase after phase in the same event loop. The loop ends with
    the `with` block.

    With a background loop, other code may use the engines during a phase (`rollout.service`).

    Args:
        fleet: The engines; only engines in service receive requests.
        chat: Tokenizer and chat template of the model.
        rollout: Limits and timeouts.
        environments: The environments of the run.
        refill: Brings engines back into service if none is left; the phase then restarts from its beginning.
        look: Called twice a second during a phase; an exception from it abandons the phase.
        reward_weights: `algorithm.reward_weights`.
        lockstep: True to send the requests of a turn only once all trajectories have one (`rollout.routing.lockstep`).
            Ignored with `workers`.
        loop: The event loop of the phases.
        workers: Rollout workers running the trajectories; None runs them in this process.
        timeline: Counts requests and environment calls in progress. Pass a timeline only if the counts are collected
            regularly.
    """

    def __init__(
        self,
        fleet: Fleet,
        chat: Renderer,
        rollout: RolloutConfig,
        environments: EnvironmentConfig,
        refill: Callable[[], object] | None = None,
        look: Callable[[], None] = lambda: None,
        *,
        reward_weights: Mapping[str, float] | None = None,
        lockstep: bool = False,
        loop: Loop | None = None,
        workers: Workers | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.fleet, self.chat, self.rollout, self.environments = fleet, chat, rollout, environments
        self.refill, self.look = refill, look
        self.reward_weights = reward_weights or {}
        self.lockstep = lockstep
        self.timeline, self.counts_are_read = timeline or Timeline(), timeline is not None
        self.threads = EnvPool(environments.workers, self.timeline.calls)
        self.slots = Slots(environment_slots(environments))
        self.workers = workers
        self.spans: list[Span] | None = None
        """Records calls of environments; None records nothing."""
        self.recorder = self
        """The generator whose `spans` record calls of this one."""
        self.loop = loop or EventLoop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.__exit__(*error)

    def generate(
        self,
        prompts: list[Prompt],
        samples: int,
        sampling: SamplingConfig,
        *,
        seed: str,
        progress: Progress | None = None,
        own: bool = False,
    ) -> list[Group]:
        """Runs `samples` trajectories of every prompt and returns a group per prompt, in the prompts' order. Clears the
        engines' prefix caches first. Blocks, without a time limit, until all trajectories ended; `look` can end the
        wait. A fault of an environment is not raised: its trajectory has a failed status.

        Equal weights, prompts and seed give equal random streams. The results are bit-identical with `lockstep`, and
        for single-turn trajectories on a single engine (limits: docs/parity.md). Otherwise rounding may differ between
        runs and change log-probs and, rarely, a token and the rest of its trajectory.

        Args:
            prompts: The prompts.
            samples: Trajectories per prompt.
            sampling: Sampling parameters.
            seed: Name of this phase, such as `"<run seed>/<step>"`.
            progress: Called after each finished trajectory; counts from 1 again if the phase restarts because all
                engines were lost (`refill`).
            own: True to make the groups by `rollout.generator`, if set.

        Raises:
            ActorFailed: An engine refused a request, or no engine is left and none restarts; with the root cause.
            WrongRoutes: An engine's expert routes do not match the tokens.
            UserError: The generator of `rollout.generator` cannot be imported or created, or the chat template leaves
                out the assistant's words.
            Exception: `look` or `refill` raised it; all trajectories are cancelled.
        """
        while True:
            try:
                # Cached prefixes of an earlier phase would change the shapes of the computation, and hence the last
                # bits.
                self.fleet.ask("forget", timeout=self.rollout.request_timeout_s)
                by_generator = own and self.rollout.generator is not None
                played = self.loop.run(self._generate(prompts, samples, sampling, seed, progress, by_generator))
                return [Group(p, played[i * samples : (i + 1) * samples]) for i, p in enumerate(prompts)]
            except NoServingActor:
                if self.refill is None:
                    raise
                self.refill()

    def player(self, sampling: SamplingConfig, *, service: bool = False) -> Player:
        """Returns a player on these engines, for a phase or a service.

        Call the player in a single event loop. The caller closes the player's router at the end of a phase
        (`router.close`); the router of a service lasts as long as the run.

        Args:
            sampling: Sampling parameters.
            service: True for a service: a request without an engine waits for `router.rejoin`, which the caller calls
                after every weight sync. In a phase such a request raises NoServingActor. A service ignores `lockstep`.
        """
        if self.workers is not None:
            return SlotPlayer(self._client(self.workers, sampling, service=service), self.slots)
        agent = self._agent(sampling, service=service)
        return agent if self.slots.most is None else SlotPlayer(agent, self.slots)

    def group_player(self, sampling: SamplingConfig, *, service: bool = False) -> PlaysGroups:
        """Returns a player of whole groups by `rollout.generator`, which must be set; see `player`. Arguments as in
        `player`.

        Raises:
            UserError: The generator cannot be imported or created.
        """
        if self.workers is not None:
            return self._client(self.workers, sampling, service=service)
        own = load.create(self.rollout)
        assert own is not None
        return GroupPlayer(self._agent(sampling, service=service), own)

    def _client(self, workers: Workers, sampling: SamplingConfig, *, service: bool) -> WorkerClient:
        client = WorkerClient(workers, self.fleet, sampling, service=service, spans=self._spans)
        if self.counts_are_read:
            client.on_counts = self.timeline.merge
        return client

    def _agent(self, sampling: SamplingConfig, *, service: bool) -> Agent:
        factory = AgentFactory(self.chat, self.rollout, self.environments, self.reward_weights, self.threads)
        agent = factory.agent(self.fleet, sampling, lockstep=self.lockstep and not service, service=service)
        agent.spans, agent.router.count = self._spans, self.timeline.requests
        return agent

    def _spans(self) -> list[Span] | None:
        """Returns the list that records environment calls at present, or None."""
        return self.recorder.spans

    async def _generate(
        self,
        prompts: list[Prompt],
        samples: int,
        sampling: SamplingConfig,
        seed: str,
        progress: Progress | None,
        own: bool = False,
    ) -> list[Trajectory]:
        """Returns the trajectories in the order prompt 0 sample 0, prompt 0 sample 1, …. With `own`, groups are made by
        `rollout.generator`."""
        # Named by place, not by prompt: a phase across an epoch's end may contain a prompt twice.
        names, done = [f"{seed}/{place}" for place in range(len(prompts) * samples)], 0

        async def counted(playing: Awaitable[list[Trajectory]]) -> list[Trajectory]:
            nonlocal done
            trajectories = await playing
            done += len(trajectories)
            if progress is not None:
                progress(done, len(names))
            return trajectories

        if own:
            groups = self.group_player(sampling)
            router, starts = groups.router, Gate(len(prompts)).starts
            waiting = [
                groups.play_group(prompt, names[i * samples : (i + 1) * samples], starts[i])
                for i, prompt in enumerate(prompts)
            ]
        else:
            player = self.player(sampling)
            router, starts = player.router, Gate(len(names)).starts
            router.expect(len(names))
            waiting = [
                _single(player, prompts[place // samples], place % samples, name, starts[place])
                for place, name in enumerate(names)
            ]
        playing = [asyncio.create_task(counted(each)) for each in waiting]
        try:
            return [t for trajectories in await self._watched(asyncio.gather(*playing)) for t in trajectories]
        finally:
            await cancel_all(playing)
            router.close()

    async def _watched(self, phase: asyncio.Future[list[Answer]]) -> list[Answer]:
        """Returns the result of a phase, while calling `look` twice a second. If `look` raises, the phase's result is
        ignored."""
        phase.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        while not phase.done():
            self.look()
            await asyncio.wait([phase], timeout=LOOK_EVERY_S)
        return phase.result()


async def _single(player: Player, prompt: Prompt, sample: int, name: str, start: Start) -> list[Trajectory]:
    """Returns the trajectory of a sample, which its router then no longer expects."""
    try:
        return [await player.play(prompt, sample, name, start)]
    finally:
        player.router.leave()
