"""Prompts in, trajectories out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import Fleet, NobodyServes
from skyrl_mega.config.schema import EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.env_pool import EnvPool
from skyrl_mega.rollout.equipment import Equipment
from skyrl_mega.rollout.event_loop import EventLoop, Loop
from skyrl_mega.rollout.player_elsewhere import PlayerElsewhere
from skyrl_mega.rollout.renderer import Renderer
from skyrl_mega.rollout.router import Progress, Router
from skyrl_mega.rollout.slots import AnyAgent, PlayerHere, SlotAgent, Slots
from skyrl_mega.rollout.trajectory import Group, Trajectory
from skyrl_mega.rollout.waves import Waves
from skyrl_mega.rollout.workers import Workers
from skyrl_mega.telemetry.timeline import Timeline
from skyrl_mega.telemetry.trace import Span

Answer = TypeVar("Answer")

LOOK_EVERY_S = 0.5


class Generator:
    """Plays prompts on a group of engines, phase after phase in one event loop, which ends with the `with` block.

    With a loop in the background others may use the engines beside a phase (`rollout.service`).

    Args:
        fleet: The engines; those that serve are asked.
        chat: The model's tokenizer and template.
        rollout: Budgets and timeouts.
        environments: Which environments there are.
        refill: Brings engines back to service where none is left; a phase is then played again from its start.
        look: Asked twice a second while a phase is played; what it raises abandons the phase.
        reward_weights: `algorithm.reward_weights`.
        waves: All trajectories wait for one another, turn by turn (`rollout.waves`).
        loop: Where the phases run.
        workers: Other processes that play the trajectories; None plays them here.
        timeline: Is told what engines and environments have under way, and somebody takes it in time.
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
        waves: bool = False,
        loop: Loop | None = None,
        workers: Workers | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.fleet, self.chat, self.rollout, self.environments = fleet, chat, rollout, environments
        self.refill, self.look = refill, look
        self.reward_weights = reward_weights or {}
        self.router = Waves if waves else Router
        self.timeline, self.counted = timeline or Timeline(), timeline is not None
        self.threads = EnvPool(environments.workers, self.timeline.calls)
        self.slots = Slots(environments.slots)
        self.workers = workers
        self.spans: list[Span] | None = None
        """Where calls of environments are recorded."""
        self.recorder = self
        """Whose spans record its calls."""
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
    ) -> list[Group]:
        """A group of `samples` trajectories for every prompt, in the prompts' order.

        The same weights, prompts and seed give the same trajectories; single turns on one engine do so to the last bit,
        and with `waves` any.

        Args:
            prompts: What to play.
            samples: Trajectories of one prompt.
            sampling: How tokens are drawn.
            seed: Names this phase, such as `"<run seed>/<step>"`.
            progress: Called as trajectories end.

        Raises:
            ActorFailed: An engine refused a request, or none is left and none comes back; the root cause.
        """
        while True:
            try:
                # Cached prefixes of an earlier phase would change the shapes of the computation, and so the last bits.
                self.fleet.ask("forget", timeout=self.rollout.request_timeout_s)
                played = self.loop.run(self._generate(prompts, samples, sampling, seed, progress))
                return [Group(p, played[i * samples : (i + 1) * samples]) for i, p in enumerate(prompts)]
            except NobodyServes:
                if self.refill is None:
                    raise
                self.refill()

    def agent(self, sampling: SamplingConfig, router: type[Router] | None = None) -> AnyAgent:
        """An agent on these engines, for one phase. All of them are played in the same event loop.

        Args:
            sampling: How tokens are drawn.
            router: Another kind than a phase's, which a service has.
        """
        if self.workers is not None:
            service = router is not None
            player = PlayerElsewhere(self.workers, self.fleet, sampling, service=service, spans=self._spans)
            if self.counted:
                player.counted = self.timeline.merge
            return SlotAgent(player, self.slots)
        equipment = Equipment(self.chat, self.rollout, self.environments, self.reward_weights, self.threads)
        agent = equipment.agent(self.fleet, sampling, router or self.router)
        agent.spans, agent.router.count = self._spans, self.timeline.requests
        return agent if self.slots.most is None else SlotAgent(PlayerHere(agent), self.slots)

    def _spans(self) -> list[Span] | None:
        """Where calls of environments are recorded at present."""
        return self.recorder.spans

    async def _generate(
        self,
        prompts: list[Prompt],
        samples: int,
        sampling: SamplingConfig,
        seed: str,
        progress: Progress | None,
    ) -> list[Trajectory]:
        """In the order prompt 0 sample 0, prompt 0 sample 1, …."""
        agent = self.agent(sampling)
        done = 0
        total = len(prompts) * samples

        async def play(opened: Any, place: int) -> Trajectory:
            nonlocal done
            # By its place, not by its prompt: where an epoch ends in a phase, a prompt may be in it twice.
            try:
                trajectory = await agent.play(opened, f"{seed}/{place}")
            finally:
                agent.router.leave()
            done += 1
            if progress is not None:
                progress(done, total)
            return trajectory

        # All are opened before the first is played, so that the first requests leave together and in order.
        opening = [asyncio.create_task(agent.open(p, s)) for p in prompts for s in range(samples)]
        playing: list[asyncio.Task[Trajectory]] = []
        try:
            opened = await self._looking(asyncio.gather(*opening))
            agent.router.expect(total)
            playing += [asyncio.create_task(play(o, place)) for place, o in enumerate(opened)]
            return await self._looking(asyncio.gather(*playing))
        except ActorFailed as error:
            # Raised in every task that waited: their frames would fill pages.
            raise error.with_traceback(None) from error.__cause__
        finally:
            await closed(agent, opening, playing)
            agent.router.close()

    async def _looking(self, phase: asyncio.Future[list[Answer]]) -> list[Answer]:
        """Its result, unless `look` raises before; what becomes of it then is nobody's concern."""
        phase.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        while not phase.done():
            self.look()
            await asyncio.wait([phase], timeout=LOOK_EVERY_S)
        return phase.result()


async def closed(agent: AnyAgent, opening: list[asyncio.Task[Any]], playing: Sequence[asyncio.Task[Any]]) -> None:
    """Ends what is under way, and closes the environments that were opened and never played."""
    for task in (*opening, *playing):
        task.cancel()
    await asyncio.gather(*opening, *playing, return_exceptions=True)
    opened = [task.result() for task in opening if not task.cancelled() and task.exception() is None]
    await asyncio.gather(*(agent.close(one) for one in opened))
