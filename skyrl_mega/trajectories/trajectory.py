"""Trajectories and prompt groups: the results of rollouts."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from skyrl_mega.envs.prompt import Prompt

if TYPE_CHECKING:  # torch is not for those who only read trajectories
    from skyrl_mega.trajectories.remote_arrays import RemoteArrays
    from skyrl_mega.trajectories.sequences import Column

__all__ = [
    "ARRAYS",
    "GREEDY",
    "TOKEN_REWARDS",
    "Group",
    "Kind",
    "Prompt",
    "Status",
    "Trajectory",
    "TrajectoryStep",
    "new_trajectory",
    "policy_texts",
]

ARRAYS = ("tokens", "mask", "logprobs", "columns", "messages", "tools")
"""Fields of a trajectory that may be large: tokens, texts and schemas."""

GREEDY = -1
"""`Trajectory.sample` of the greedy answer (temperature 0), used as a baseline for the samples."""

TOKEN_REWARDS = "token_rewards"
"""Name of the column: float64 [T], extra reward of each token of the policy. Present only if an environment gives
`rewards_at`; the step's reward includes these values."""


class Status(str, Enum):
    """Reason for the end of a trajectory."""

    COMPLETED = "completed"
    """The environment reported done."""
    TRUNCATED_TOKENS = "truncated_tokens"
    """The token limit was reached (DAPO's overlong)."""
    TRUNCATED_TURNS = "truncated_turns"
    """The turn limit was reached."""
    TRUNCATED_TIME = "truncated_time"
    """The wall-clock limit was reached; the tokens generated so far are kept."""
    ERROR_ENV = "error_env"
    """The environment raised an exception or broke the contract; the reward is 0."""
    ERROR_ENV_TIMEOUT = "error_env_timeout"
    """A call of the environment exceeded the time limit; the reward is 0."""
    ERROR_INFRASTRUCTURE = "error_infrastructure"
    """A service under the environment failed in every attempt; the reward is 0."""

    @property
    def truncated(self) -> bool:
        """True if the limit of tokens, turns or time ended the trajectory."""
        return self in (Status.TRUNCATED_TOKENS, Status.TRUNCATED_TURNS, Status.TRUNCATED_TIME)

    def filtered(self, by: str) -> bool:
        """Returns True if a trajectory with this status is excluded from the loss when the filter of overlong
        (truncated) trajectories is switched on (`algorithm.overlong`).

        Args:
            by: The setting `algorithm.overlong.filter_by`. `budgets` excludes all truncated trajectories; any other
                value only trajectories truncated at the token limit.
        """
        return self.truncated if by == "budgets" else self is Status.TRUNCATED_TOKENS

    @property
    def failed(self) -> bool:
        """True for the three `ERROR_…` statuses: the environment or a service under it failed, so that there is nothing
        to learn."""
        return self in (Status.ERROR_ENV, Status.ERROR_ENV_TIMEOUT, Status.ERROR_INFRASTRUCTURE)


class Kind(str, Enum):
    """Author of the tokens of a step."""

    PROMPT = "prompt"
    """The opening of a conversation: the first prompt, a new conversation put by the environment in place of everything
    before, or a further conversation of an agent."""
    RESPONSE = "response"
    """Tokens of the policy."""
    OBSERVATION = "observation"
    """The environment's answer, with surrounding text of the template."""


@dataclass
class TrajectoryStep:
    """A part of a trajectory, in chronological order. The spans of all steps tile `Trajectory.tokens`."""

    kind: Kind
    start: int
    """Position of the first token in `Trajectory.tokens`."""
    end: int
    """Position after the last token; equal to `start` for text never given to the policy."""
    at_s: float = 0.0
    """Seconds from the trajectory's opening to the beginning of this step."""
    generate_s: float = 0.0
    """Seconds until the response was complete, including the wait for an engine."""
    env_s: float = 0.0
    """Seconds in the environment: in `init` for the first prompt, in `step` for a response. The last step also includes
    `close`."""
    messages: int = 0
    """Number of this step's messages in `Trajectory.messages`, in step order."""
    reward: float | None = None
    """Reward of a response; None if the environment gave no grade."""
    finish: str | None = None
    """Reason for the end of a response: `stop`, `length` or `timeout`."""
    tool_calls: list[Any] = field(default_factory=list)
    """`metadata["tool_calls"]` of the environment's step."""


@dataclass
class Trajectory:
    """A sampled conversation that begins with a prompt. `tokens`, `mask` and `logprobs` have the same length T and are
    aligned by position. The three are arrays of 9 bytes per token in total; the arrays grow as lists do, and numpy
    reads them without a copy.

    If an environment rewrites the conversation (`rollout.step_wise`), the new conversation follows the old one as a
    further `prompt` step. The context of a response reaches from the start of the last prompt to the response. The
    conversations of an agent (`envs.agent`) follow one another in the same way; the prompt of a branch contains replies
    of the policy, trained on in an earlier conversation.

    The repr leaves out `ARRAYS`, because `asyncio.run` writes the repr of a result and would fetch remote arrays.
    """

    prompt: Prompt
    sample: int
    """Number of the sample within the prompt; `GREEDY` for the greedy answer."""
    tokens: array[int] = field(repr=False)
    """Prompt, responses and observations, int32, exactly as given to and produced by the engine."""
    mask: array[int] = field(repr=False)
    """1 for tokens of the policy, else 0 (prompt, observations); int8."""
    logprobs: array[float] = field(repr=False)
    """The engine's log-prob of each token of the policy, 0.0 elsewhere; float32, as computed by engines. Natural log,
    under the sampling temperature. NaN for an end token not sampled by an engine (`rollout.conversation:
    one_message`)."""
    prompt_length: int
    """Number of tokens of the first prompt, before the first response."""
    reward: float
    """Sum of the environment's step rewards."""
    status: Status
    turns: int
    """Number of generated responses."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Unweighted sum of each named reward over the steps, if the environment gives several."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(weight version, first position in `tokens` sampled from this version), in order."""
    messages: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """The conversation as text, for people; a rewritten conversation is appended."""
    tools: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """The tools in the prompt, in the format of chat templates; for people."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata returned by the environment's last step."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds in `generate` and `env`, and in `slot` waiting to open the environment if `environment.slots` is set."""
    retries: int = 0
    """Number of times that the trajectory was started again after an infrastructure fault."""
    steps: list[TrajectoryStep] = field(default_factory=list)
    """The steps, in chronological order; those of an agent conversation by conversation."""
    columns: dict[str, Column] = field(default_factory=dict, repr=False)
    """Further values of each token, shape [T, …], carried along by the batch."""
    remote_arrays: RemoteArrays | None = None
    """Location of `ARRAYS` stored remotely (`by_reference.py`), else None. Reading any of the fields fetches all."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # called only for absent attributes
            if name in ARRAYS and (remote_arrays := vars(self).get("remote_arrays")) is not None:
                return remote_arrays.fetch()[name]
            raise AttributeError(f"{type(self).__name__}.{name}")

    @property
    def metrics(self) -> dict[str, float]:
        """The environment's figures of this trajectory by name: the finite numbers of the metadata's entry `metrics`;
        {} without such an entry."""
        given = self.metadata.get("metrics")
        numbers = given.items() if isinstance(given, dict) else ()
        return {name: float(n) for name, n in numbers if isinstance(n, int | float) and _is_finite(n)}

    @property
    def length(self) -> int:
        """Number of all tokens: prompts, responses and observations."""
        return len(self.tokens) if self.remote_arrays is None else self.remote_arrays.length

    @property
    def written(self) -> int:
        """Number of the policy's tokens."""
        if self.remote_arrays is not None:
            return self.remote_arrays.written
        return int(np.count_nonzero(_is_written(self.mask)))

    def tokens_by_version(self) -> list[int]:
        """Returns the number of the policy's tokens for each entry of `versions`; [] if the policy produced nothing."""
        if self.remote_arrays is not None:
            return self.remote_arrays.tokens_by_version
        if not self.versions:  # the policy produced nothing
            return []
        ends = [*(start for _, start in self.versions[1:]), len(self.tokens)]
        is_written = _is_written(self.mask)
        spans = zip(self.versions, ends, strict=True)
        return [int(np.count_nonzero(is_written[start:end])) for (_, start), end in spans]

    @property
    def context(self) -> array[int]:
        """The tokens of the current conversation, as the policy sees them, in a new array: all tokens from the start of
        the last prompt step; without a prompt step, all tokens of the trajectory.

        Fetches remote arrays. Raises ClusterError if these are lost.
        """
        start = next((step.start for step in reversed(self.steps) if step.kind is Kind.PROMPT), 0)
        return self.tokens[start:]

    @property
    def response_length(self) -> int:
        """Number of tokens of responses and observations: all tokens without the first prompt and later prompt
        steps."""
        rewritten = sum(step.end - step.start for step in self.steps[1:] if step.kind is Kind.PROMPT)
        return self.length - self.prompt_length - rewritten


@dataclass
class Group:
    """The trajectories of a prompt, compared with each other by advantages.

    A prompt sampled twice in a step (across the end of an epoch) has two groups.
    """

    prompt: Prompt
    trajectories: list[Trajectory]
    """The samples in the order of `Trajectory.sample`."""
    greedy: Trajectory | None = None
    """The answer at temperature 0, ReMax's baseline; not used for training."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """Reward of each trajectory."""
        return tuple(t.reward for t in self.trajectories)


def new_trajectory(prompt: Prompt, sample: int) -> Trajectory:
    """Returns a trajectory without tokens, with an empty first prompt step, reward 0 and status `TRUNCATED_TURNS`."""
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
        steps=[TrajectoryStep(Kind.PROMPT, 0, 0)],
    )


def policy_texts(t: Trajectory) -> list[str]:
    """Returns the policy's text in each turn of a trajectory, in order; with remote arrays, long texts in the short
    form of `remote_arrays.shortened`, without fetching."""
    if t.remote_arrays is not None:
        return t.remote_arrays.texts
    texts: list[str] = []
    at = 0
    for step in t.steps:
        if step.kind is Kind.RESPONSE:
            texts += [m["content"] for m in t.messages[at : at + step.messages] if m["role"] == "assistant"]
        at += step.messages
    return texts


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number larger than any float
        return False


def _is_written(mask: Any) -> npt.NDArray[np.bool_]:
    """Returns True for each token of the policy.

    Args:
        mask: Numbers of any type, bytes included: 1 for a token of the policy.
    """
    values = np.frombuffer(mask, np.uint8) if isinstance(mask, bytes) else np.asarray(mask)
    return values == 1
