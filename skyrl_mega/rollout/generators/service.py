"""The engines and environments of a group, as a generator of one's own sees them."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.base import Message
from skyrl_mega.rollout.agent import edits
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.seeds import stream_seed
from skyrl_mega.rollout.gate import Start
from skyrl_mega.rollout.generators.branch import Branch
from skyrl_mega.rollout.generators.group_state import GeneratorFault, GroupRequest, GroupState
from skyrl_mega.telemetry.trace import Span, wall_clock
from skyrl_mega.trajectories.trajectory import Status


class GeneratorService(GroupState):
    """Engines and environments for a single group.

    Args:
        agent: Runs the trajectories.
        group: The group to generate.
        start: Awaited before the first request (`Gate`); None: nothing is awaited.
    """

    def __init__(self, agent: Agent, group: GroupRequest, start: Start | None = None) -> None:
        super().__init__(agent, group, start)
        self._opens: Counter[int] = Counter()
        self._named: Counter[str] = Counter()

    async def open(self, sample: int = 0) -> Branch:
        """Opens an environment and returns a branch with its first messages. If the environment fails, or runs an agent
        of its own, the branch is `done`, with the error in its trajectory.

        Args:
            sample: Index of the trajectory whose name gives the random streams: below `group.samples`. Branches of the
                same sample share an engine and the cached prefix.

        Raises:
            GeneratorFault: `sample` is no such index, or `generate` has returned.
        """
        if not 0 <= sample < self.group.samples:
            raise GeneratorFault(f"open: sample is {sample}; allowed is 0 to {self.group.samples - 1}")
        path = f"o{self._opens[sample]}-" if self._opens[sample] else ""
        self._opens[sample] += 1
        with self.working():
            opened = await self.agent.open(self.group.prompt, sample)
        self.opened.append(opened.env)
        if opened.env.is_agent:
            text = "it runs an agent, which asks the policy itself"
            fault = opened.env.fault(Status.ERROR_ENV, text)
            edits.fail(opened.trajectory, fault.status, fault.about)
            await opened.env.close()
        return Branch(self, self.group.names[sample], opened, path)

    async def sample(self, tokens: Sequence[int], max_tokens: int | None = None) -> Completion:
        """Returns the policy's continuation of any tokens: new tokens, their log-probs and weight versions, and the
        reason for the end. The tokens are not trained on; `Branch.sample` samples for training.

        Args:
            tokens: The prompt, such as from `render`; not empty.
            max_tokens: Most tokens to sample, within `rollout.max_length`; None takes the limit of a turn.

        Raises:
            GeneratorFault: The prompt is empty or too long, `max_tokens` is below 1, the group has used its requests,
                or `generate` has returned.
            Exception: A fault of the run; do not catch.
        """
        context = array("i", tokens)
        wanted = self.limits.turn if max_tokens is None else max_tokens
        most = min(wanted, self.limits.length - len(context))
        if not context or most < 1:
            raise GeneratorFault(
                f"sample: {len(context)} tokens, and {wanted} to sample; allowed are 1 to {self.limits.length - 1} "
                "tokens (rollout.max_length), and at least 1 to sample"
            )
        with self.working():
            await self.started()
            digest = hashlib.blake2b(context.tobytes(), digest_size=8).hexdigest()
            name = f"{self.group.names[0]}/{digest}-{self._named[digest]}"
            self._named[digest] += 1
            left = None if self.until is None else max(0.0, self.until - time.perf_counter())
            request = Request(name, context, most, stream_seed(name), left)
            completion = await self.of_run(self.agent.router.generate(request))
        self.count(len(completion.tokens))
        return completion

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Returns the tokens of a conversation, up to the point at which the policy generates; a new list.

        Args:
            messages: The conversation.
            tools: Tools offered to the policy, in the format of chat templates.

        Raises:
            TemplateError: The chat template rejects the messages.
            TooLong: The text surely has more tokens than a sequence may have.
        """
        return [*self.agent.first([*messages], tools)]

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of a turn's tokens, without the end-of-turn token if the last token is one."""
        return self.agent.chat.text(tokens)

    def random(self, purpose: str = "") -> Random:
        """Returns a new generator of random numbers. The numbers depend on the run's seed, the group and `purpose`
        alone: a second call with the same `purpose` gives the same numbers."""
        return Random(stream_seed(f"{self.group.names[0]}/random/{purpose}"))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records the time of the `with` block under `name` in the profile of a profiled step
        (`telemetry.profile.steps`); records nothing in other steps, or if the block raises."""
        began = time.perf_counter()
        yield
        if (spans := self.agent.spans()) is not None:
            about = {"prompt": self.group.prompt.uid}
            spans.append(Span(name, wall_clock(began), wall_clock(time.perf_counter()), about))
