"""A branch: a trajectory in progress, as a value. Every method returns a new branch and leaves the old one unchanged,
so that a branch may be continued several times.

Only tokens sampled through `sample` are trained on, each with the log-prob and the weight version of its sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from skyrl_mega.envs import validate
from skyrl_mega.envs.base import Message
from skyrl_mega.rollout.agent import edits
from skyrl_mega.rollout.agent.agent_loop import CUT_STATUS, PolicyTurn
from skyrl_mega.rollout.agent.environment import Environment, EnvironmentFault
from skyrl_mega.rollout.agent.opened import Opened
from skyrl_mega.rollout.generators.group_state import GeneratorFault, GroupState
from skyrl_mega.trajectories.trajectory import Kind, Status, Trajectory, TrajectoryStep

OPEN = "open"
"""Finish of a turn that may be continued."""


@dataclass(frozen=True)
class SampledPiece:
    """Sampled tokens of a branch: the beginning of an engine's answer."""

    origin: int
    """Number of the engine's answer within the group."""
    start: int
    """Position of the first token in the branch."""
    count: int
    """Number of tokens, from the first of the answer."""


@dataclass(frozen=True)
class JudgedTurn:
    """A turn that an environment judged, for repeating the turn in a new environment."""

    text: str
    messages: list[Message]
    """The environment's answer."""


@dataclass(eq=False)
class LiveEnvironment:
    """An open environment, owned by the branch that continued last."""

    env: Environment
    judged: int = 0
    """Number of turns judged, counted from the beginning of the call."""


class Branch:
    """A trajectory in progress. Made by `GeneratorService.open`.

    Args:
        service: The group's service.
        name: Name of the trajectory whose engine and random streams the branch uses.
        opened: The trajectory so far, with its environment.
        path: Distinguishes the branch, in the names of requests, from other branches of the same name; "" for the
            first.
    """

    def __init__(self, service: GroupState, name: str, opened: Opened, path: str = "") -> None:
        self.service, self.name, self._path = service, name, path
        self.opened = opened
        """The trajectory so far."""
        self._live = LiveEnvironment(opened.env)
        self._messages = list(opened.trajectory.messages)
        """The conversation at the opening, which a further environment must repeat."""
        self._judged: list[JudgedTurn] = []
        """The turns that the environment has judged."""
        self.pieces: list[SampledPiece] = []
        """All sampled tokens, in order."""
        self._finish: str | None = None
        """Reason for the end of the turn in progress, or `OPEN`; None without such a turn."""
        self._is_judged = self._owns_environment = False
        self._depth = self._samples = self._derived = 0
        self.done = not opened.env.is_open
        """True once the trajectory has ended: the environment is done or failed, or a limit is reached. Such a branch
        ignores further calls."""

    @property
    def tokens(self) -> array[int]:
        """Tokens of the policy's present context, as the next turn reads them: the latest conversation if the
        environment replaced earlier ones; a new array."""
        return self._trajectory.context

    @property
    def turn_tokens(self) -> list[int]:
        """Tokens of the turn in progress, or of the last turn, with the end-of-turn token; [] before the first."""
        step = self._turn
        return self._trajectory.tokens[step.start : step.end].tolist() if step else []

    @property
    def turn_logprobs(self) -> list[float]:
        """Log-prob of each of `turn_tokens` in nats, at sampling; [] before the first turn."""
        step = self._turn
        return self._trajectory.logprobs[step.start : step.end].tolist() if step else []

    @property
    def text(self) -> str:
        """Text of the turn in progress, or of the last turn, without the end-of-turn token; "" before the first."""
        return self.service.agent.chat.text(self.turn_tokens)

    @property
    def ended(self) -> bool:
        """True if the turn in progress is complete: by a stop token or string, or by a limit of the run. False without
        a turn in progress, and if `max_tokens` of `sample` or `cut` ended the turn, so that `sample` continues the same
        turn."""
        return self._finish not in (None, OPEN)

    @property
    def judged(self) -> bool:
        """True if the trajectory has ended, or the environment has judged the last turn."""
        return self.done or self._is_judged

    @property
    def reward(self) -> float:
        """Sum of the environment's rewards so far."""
        return self._trajectory.reward

    @property
    def turns(self) -> int:
        """Number of turns of the policy, including the turn in progress."""
        return self._trajectory.turns

    async def sample(self, max_tokens: int | None = None) -> Branch:
        """Returns this branch with further tokens of the policy: a new turn, or the rest of the turn in progress.
        Without room for a token, or if the time is over before the first token, the returned branch is `done`. A branch
        that is `done` is returned as an unchanged copy.

        Args:
            max_tokens: Most tokens to sample; None samples to the end of the turn. A turn ended by this limit alone
                stays open.

        Raises:
            GeneratorFault: The turn in progress is complete, the trajectory or the group has used its turns or
                requests, `max_tokens` is below 1, or `generate` has returned.
            Exception: A fault of the run; do not catch.
        """
        if self.ended and not self.done:
            raise GeneratorFault("sample: the turn is complete; call step or tell first")
        if max_tokens is not None and max_tokens < 1:
            raise GeneratorFault(f"sample: max_tokens is {max_tokens}; allowed is at least 1, or None")
        branch = self._derive()
        if not self.done:
            with self.service.working():
                await branch._generate(max_tokens)
        return branch

    async def step(self) -> Branch:
        """Returns this branch after the environment judged the turn: with the reward, and the observations unless the
        trajectory has ended (`done`). A turn that `max_tokens` or `cut` left open is judged as it is. A failed
        environment ends the trajectory with a failed status. A branch that is `done` is returned as an unchanged copy.

        The first branch to continue takes the environment over. Any further branch gets a new environment, in which the
        earlier turns are repeated; with other answers than before, the environment counts as failed.

        Raises:
            GeneratorFault: There is no turn to judge, or `generate` has returned.
            Exception: A fault of the run; do not catch.
        """
        if self._finish is None and not self.done:
            raise GeneratorFault("step: there is no turn to judge; call sample first")
        branch = self._derive()
        if not self.done:
            with self.service.working():
                await branch._judge()
        return branch

    def tell(self, messages: Sequence[Message]) -> Branch:
        """Returns this branch with messages after the turn in place of the environment's, which does not see the turn.
        The trajectory ends if a limit of the run ended the turn, the chat template rejects the messages, or the
        messages leave no room for another turn. A branch that is `done` is returned as an unchanged copy.

        Args:
            messages: At least one message, such as `{"role": "user", "content": "Try again."}`.

        Raises:
            GeneratorFault: There is no turn to answer, the trajectory has used its turns, or a message is invalid.
        """
        if self._finish is None and not self.done:
            raise GeneratorFault("tell: there is no turn to answer; call sample first")
        if not self.done:
            self._check_turns("tell")
        branch = self._derive()
        if not self.done:
            branch._answer(messages)
        return branch

    def cut(self, tokens: int) -> Branch:
        """Returns this branch with only the first `tokens` tokens of the turn in progress; `sample` continues there.
        With 0, the turn is removed. A branch that is `done` is returned as an unchanged copy.

        Args:
            tokens: Number of tokens to keep, from 0.

        Raises:
            GeneratorFault: There is no turn in progress, or the turn has fewer tokens.
        """
        count = len(self.turn_tokens) if self._finish else 0
        if not self.done and not (self._finish and 0 <= tokens <= count):
            raise GeneratorFault(f"cut: tokens is {tokens}; allowed is 0 to the {count} tokens of the turn in progress")
        branch = self._derive()
        if not self.done and tokens < count:
            branch._cut(tokens)
        return branch

    @property
    def _trajectory(self) -> Trajectory:
        return self.opened.trajectory

    @property
    def _turn(self) -> TrajectoryStep | None:
        return next((step for step in reversed(self._trajectory.steps) if step.kind is Kind.RESPONSE), None)

    def _derive(self) -> Branch:
        """Returns a copy under a path of its own, which depends on the order of the calls of this branch only."""
        branch = copy(self)
        branch._path = f"{self._path}{self._depth}.{self._derived}-" if self._derived else self._path
        self._derived += 1
        branch._depth, branch._derived = self._depth + 1, 0
        branch._is_judged = branch._owns_environment = False
        branch.opened = self.opened.copied()
        branch._judged, branch.pieces = [*self._judged], [*self.pieces]
        return branch

    async def _generate(self, max_tokens: int | None) -> None:
        service, agent, t = self.service, self.service.agent, self._trajectory
        await service.started()
        self.opened.until = service.until
        continues, limits = self._finish == OPEN, agent.limits
        if not continues:
            self._check_turns("sample")
        else:
            limits = replace(limits, turn=limits.turn - len(self.turn_tokens))
        if (room := limits.room(t)) < 1:
            t.status = Status.TRUNCATED_TOKENS
            await self._end()
            return
        start, name = len(t.tokens), f"{self.name}/{self._path}{self._samples}"
        most = room if max_tokens is None else min(room, max_tokens)
        self._samples += 1
        turn = await service.of_run(agent.generate_turn(self.opened, name, most))
        t.seconds["generate"] += t.steps[-1].generate_s
        self.pieces.append(SampledPiece(service.count(turn.tokens), start, turn.tokens))
        self._finish = OPEN if turn.finish == "length" and most < room else turn.finish
        if continues:
            new = t.steps.pop()
            t.steps[-1].end, t.steps[-1].finish = new.end, new.finish
            t.steps[-1].generate_s += new.generate_s
        elif turn.tokens:
            t.turns += 1
        else:  # the time was over before the first token
            await self._guarded(self._out_of_time(turn.finish))
            await self._end()

    def _check_turns(self, call: str) -> None:
        most, turn = self.service.agent.limits.turns, self.turns + 1
        if turn > most:
            more = f"rollout.max_turns is {most}; give at least {turn}"
            raise GeneratorFault(f"{call}: this leads to turn {turn} of a trajectory, and {more}")

    async def _out_of_time(self, finish: str) -> bool:
        await self._take_environment()
        await self.service.agent.end_without_answer(self.opened, finish)
        return True

    async def _judge(self) -> None:
        text, finish = self.text, "stop" if self._finish == OPEN else str(self._finish)

        async def judge() -> bool:
            await self._take_environment()
            return await self.service.agent.judge(self.opened, PolicyTurn(text, len(self.turn_tokens), finish))

        ended = await self._guarded(judge())
        self._finish, self._is_judged = None, True
        if ended:
            await self._end()
        else:
            self._judged.append(JudgedTurn(text, self._trajectory.messages[-self._trajectory.steps[-1].messages :]))

    async def _take_environment(self) -> None:
        """Sets `opened.env` to an environment that has judged the branch's earlier turns, and no more: the open one, or
        a new one in which the turns are repeated.

        Raises:
            EnvironmentFault: The new environment failed, or did not repeat its answers.
        """
        agent, live, self._owns_environment = self.service.agent, self._live, True
        if live.judged == len(self._judged):
            live.judged += 1
            live.env.t, self.opened.env = self._trajectory, live.env
            return
        env = self.opened.env = agent.environment(self._trajectory)
        self._live = LiveEnvironment(env, len(self._judged) + 1)
        self.service.opened.append(env)
        answers = [await env.open(agent.limits.turns, agent.chat)]
        for turn in self._judged:
            output = await env.step(turn.text, agent.reward_weights)
            answers.append(output.messages or output.observations)
        if answers != [self._messages, *(turn.messages for turn in self._judged)]:
            text = "it does not repeat its answers to the same turns, so that a generator cannot branch after a turn"
            raise env.fault(Status.ERROR_ENV, text)

    def _answer(self, messages: Sequence[Message]) -> None:
        """Appends messages after the turn."""
        t, agent = self._trajectory, self.service.agent
        try:
            output = validate.StepOutput(
                validate.check_messages("tell: messages", messages), None, 0.0, False, {}, {}, rewards_at=[]
            )
        except validate.BadOutput as error:
            raise GeneratorFault(str(error)) from error
        edits.append_messages(t, [{"role": "assistant", "content": self.text}])
        edits.begin(t, Kind.OBSERVATION, self.opened.seconds)
        edits.append_messages(t, output.observations)
        if self._finish in CUT_STATUS:
            t.status, self.done = CUT_STATUS[self._finish], True
        elif agent.append_answer(self.opened, output):
            self.done = True
        self._finish = None

    def _cut(self, tokens: int) -> None:
        t, step = self._trajectory, self._trajectory.steps[-1]
        end = step.start + tokens
        edits.cut(t, end)
        self.opened.routes = self.opened.routes.copied(end)
        pieces = [piece for piece in self.pieces if piece.start < end]
        self.pieces = [replace(piece, count=min(piece.count, end - piece.start)) for piece in pieces]
        step.end, step.finish, self._finish = end, OPEN, OPEN
        if not tokens:
            t.steps.pop()
            t.turns -= 1
            self._finish = None

    async def _guarded(self, work: Awaitable[bool]) -> bool:
        """Returns the result of `work`, or True after a fault of the environment, which becomes the trajectory's."""
        try:
            return await self.service.of_run(work)
        except EnvironmentFault as fault:
            edits.fail(self._trajectory, fault.status, fault.about)
            return True

    async def _end(self) -> None:
        self.done = True
        if not self._trajectory.status.failed:
            self.service.agent.end_message(self._trajectory)
        if self._owns_environment:
            await self.opened.env.close()
