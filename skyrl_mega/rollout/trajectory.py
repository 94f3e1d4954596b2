"""What a rollout leaves behind."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from skyrl_mega.envs.prompt import Prompt

if TYPE_CHECKING:  # torch is not for those who only read trajectories
    from skyrl_mega.megatron.sequences import Column
    from skyrl_mega.rollout.away import Away

__all__ = ["ARRAYS", "GREEDY", "Group", "Kind", "Prompt", "Status", "Step", "Trajectory", "begun", "words"]

ARRAYS = ("tokens", "mask", "logprobs", "columns", "messages")
"""Fields of a trajectory that grow with its tokens."""

GREEDY = -1
"""`Trajectory.sample` of an answer that is no sample: drawn at temperature 0, for others to be compared with."""


class Status(str, Enum):
    """How a trajectory ended."""

    COMPLETED = "completed"
    """The environment said done."""
    TRUNCATED_TOKENS = "truncated_tokens"
    """The token budget ended it (DAPO's overlong)."""
    TRUNCATED_TURNS = "truncated_turns"
    """The turn budget ended it."""
    TRUNCATED_TIME = "truncated_time"
    """Its wall-clock budget ended it; what was generated until then is kept."""
    ERROR_ENV = "error_env"
    """The environment raised, or gave what the contract does not allow; the reward is 0."""
    ERROR_ENV_TIMEOUT = "error_env_timeout"
    """An environment step took longer than its limit; the reward is 0."""
    ERROR_INFRASTRUCTURE = "error_infrastructure"
    """A service under the environment failed, as often as the trajectory was played; the reward is 0."""

    @property
    def truncated(self) -> bool:
        """Whether a budget ended it."""
        return self in (Status.TRUNCATED_TOKENS, Status.TRUNCATED_TURNS, Status.TRUNCATED_TIME)

    def filtered(self, by: str) -> bool:
        """Whether the overlong filter takes it out of the loss, `by` what `algorithm.overlong.filter_by` names."""
        return self.truncated if by == "budgets" else self is Status.TRUNCATED_TOKENS

    @property
    def failed(self) -> bool:
        """Whether the environment failed: nothing can be learned from it."""
        return self in (Status.ERROR_ENV, Status.ERROR_ENV_TIMEOUT, Status.ERROR_INFRASTRUCTURE)


class Kind(str, Enum):
    """Whose words a step of a trajectory is."""

    PROMPT = "prompt"
    """A conversation's opening: the first, or one that the environment put in the place of all that was before."""
    RESPONSE = "response"
    """The policy's."""
    OBSERVATION = "observation"
    """The environment's answer, and what the template puts around it."""


@dataclass
class Step:
    """One part of a trajectory, in the order in which it happened. The spans of all steps tile `Trajectory.tokens`."""

    kind: Kind
    start: int
    """Its first token's position in `Trajectory.tokens`."""
    end: int
    """The position after its last token. Words that nobody read have none: start = end."""
    at_s: float = 0.0
    """Seconds from the trajectory's opening to this step's beginning."""
    generate_s: float = 0.0
    """Seconds until the response was there, waiting for an engine included."""
    env_s: float = 0.0
    """Seconds in the environment: in `init` for the first prompt, in `step` for a response. The last step's also in
    `close`."""
    messages: int = 0
    """How many of `Trajectory.messages` are this step's; the steps' follow one another."""
    reward: float | None = None
    """A response's; None where the environment did not judge it."""
    finish: str | None = None
    """What ended a response: `stop`, `length` or `timeout`."""
    tool_calls: list[Any] = field(default_factory=list)
    """`metadata["tool_calls"]` of the environment's step."""


@dataclass
class Trajectory:
    """One sample of one prompt. `tokens`, `mask` and `logprobs` have the same length T and are aligned by position.
    They are arrays of 9 bytes a token, which grow as lists do and which numpy reads in place.

    Where an environment rewrites the conversation (`rollout.step_wise`), the new one stands after the old one as a
    further `prompt` step: the context of a response is what lies between the last prompt's start and its own.

    Its repr has none of `ARRAYS`: asyncio.run writes that of what it returns, and must not fetch what is away.
    """

    prompt: Prompt
    sample: int
    """Which of the prompt's samples; `GREEDY` is none of them."""
    tokens: array[int] = field(repr=False)
    """int32. Prompt, responses and observations, exactly as the engine was given and produced them."""
    mask: array[int] = field(repr=False)
    """int8. 1 where the policy produced the token, else 0 (prompt, observations)."""
    logprobs: array[float] = field(repr=False)
    """float32, as engines compute them. The engine's log-prob of each token of the policy, 0.0 elsewhere. Natural log,
    under the sampling temperature.
    NaN for an end token that no engine drew (`rollout.conversation: one_message`)."""
    prompt_length: int
    """Tokens before the first response: those of the first prompt."""
    reward: float
    """Sum of the environment's step rewards."""
    status: Status
    turns: int
    """Responses generated."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Where the environment gives several, each one's sum over the steps, before weights."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(weight version, position in `tokens` from where on the policy's tokens are drawn with it), in order."""
    messages: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """The conversation as text, for people; a rewritten one is added to what was before."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The last step's metadata."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time in `generate` and `env`; in `slot` until the environment could be opened, where `environment.slots` bounds
    how many are."""
    again: int = 0
    """How often it was played again, from its prompt, for faults of the infrastructure."""
    steps: list[Step] = field(default_factory=list)
    """What happened when."""
    columns: dict[str, Column] = field(default_factory=dict, repr=False)
    """Further values of its tokens, [T, …] each, which the batch carries along."""
    away: Away | None = None
    """Where `ARRAYS` are, if they are not here (`rollout/by_reference.py`): reading one fetches it."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # asked only for what is not here
            if name in ARRAYS and (away := vars(self).get("away")) is not None:
                return away.fetch()[name]
            raise AttributeError(f"{type(self).__name__}.{name}")

    @property
    def length(self) -> int:
        """Its tokens."""
        return len(self.tokens) if self.away is None else self.away.length

    @property
    def written(self) -> int:
        """Tokens of the policy."""
        return sum(self.mask) if self.away is None else self.away.written

    def drawn_by_version(self) -> list[int]:
        """Tokens of the policy, for each entry of `versions`."""
        if self.away is not None:
            return self.away.drawn
        if not self.versions:  # the policy was never asked
            return []
        ends = [*(start for _, start in self.versions[1:]), len(self.tokens)]
        return [sum(self.mask[start:end]) for (_, start), end in zip(self.versions, ends, strict=True)]

    @property
    def context(self) -> array[int]:
        """What the policy sees, an array of its own: all from the last prompt on."""
        start = next((step.start for step in reversed(self.steps) if step.kind is Kind.PROMPT), 0)
        return self.tokens[start:]

    @property
    def response_length(self) -> int:
        """Responses and observations, in tokens: all that is no prompt."""
        rewritten = sum(step.end - step.start for step in self.steps[1:] if step.kind is Kind.PROMPT)
        return self.length - self.prompt_length - rewritten


@dataclass
class Group:
    """The samples of one prompt, which advantages compare with one another.

    A prompt that is drawn twice in one step (an epoch ends within it) has two groups.
    """

    prompt: Prompt
    trajectories: list[Trajectory]
    """In the order of `Trajectory.sample`."""
    greedy: Trajectory | None = None
    """An answer at temperature 0, whose reward is ReMax's baseline. Nothing learns from it."""

    @property
    def rewards(self) -> list[float]:
        """One for each trajectory."""
        return [t.reward for t in self.trajectories]


def begun(prompt: Prompt, sample: int) -> Trajectory:
    """One of which nothing has been played."""
    return Trajectory(
        prompt,
        sample,
        tokens=array("i"),
        mask=array("b"),
        logprobs=array("f"),
        prompt_length=0,
        reward=0.0,
        status=Status.TRUNCATED_TURNS,
        turns=0,
        seconds={"generate": 0.0, "env": 0.0},
        steps=[Step(Kind.PROMPT, 0, 0)],
    )


def words(t: Trajectory) -> list[str]:
    """What the policy said in each turn of a trajectory; of one whose arrays are away as `Away.words` has it."""
    if t.away is not None:
        return t.away.words
    found: list[str] = []
    at = 0
    for step in t.steps:
        if step.kind is Kind.RESPONSE:
            found += [m["content"] for m in t.messages[at : at + step.messages] if m["role"] == "assistant"]
        at += step.messages
    return found
