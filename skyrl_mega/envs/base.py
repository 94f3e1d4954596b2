"""The environment contract: what judges a policy's text and answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NotRequired, TypedDict

from skyrl_mega.config.values import shown
from skyrl_mega.envs.options import Option, filled
from skyrl_mega.envs.truths import spec_of

Message = dict[str, Any]
"""A chat message: `role` and `content`, both text. One of role `tool` may have `tool_call_id` and `name`, one of the
assistant `tool_calls`, a list."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of a message. Chat templates drop any other without a word."""


class BaseTextEnvStepOutput(TypedDict):
    """What one step gives back: a plain dict with these keys."""

    observations: list[Message]
    """Messages appended to the conversation before the next turn; [] when there is none."""
    reward: float | Mapping[str, float]
    """This step's reward. A trajectory's reward is the sum over its steps. Several have names, and are added up with
    `algorithm.reward_weights`."""
    rewards_at: NotRequired[Sequence[tuple[int, float]] | None]
    """May be left out. (end, reward) of parts of the answer, which are earned beside `reward`: the token that completes
    the first `end` characters of `action` has it, where advantages are estimated by token."""
    done: bool
    """Whether the trajectory ends here."""
    metadata: dict[str, Any]
    """For people: kept with the trajectory, never seen by the policy. `tool_calls`, a list, says what was called."""
    messages: NotRequired[list[Message] | None]
    """May be left out. The whole conversation, rewritten, in the place of all that the policy saw before;
    `observations` is then []. Needs `rewrites_history` and `rollout.step_wise`."""


class BaseTextEnv:
    """One conversation with a policy: made for one trajectory, stepped once per turn, closed at its end.

    A subclass overrides `step`. It is constructed as `cls(env_config=…, extras=…)`, away from the GPUs. `step` may
    block (a database, an HTTP call): environments run in threads, each step under `rollout.env_timeout_s`.
    """

    requires_ground_truth: ClassVar[bool] = True
    """Rows without `reward_spec.ground_truth` are refused before the run starts. Set False to judge without one."""

    rewrites_history: ClassVar[bool] = False
    """Whether `step` may give `messages`, a conversation that is not the old one with more behind it."""
    OPTIONS: ClassVar[Mapping[str, Option] | None] = None
    """Its options, as `skyrl_mega.envs.options` declares them: others, and values that they do not allow, are refused
    before a run starts. None takes whatever is given."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Entries of the last step's metadata that are scores between 0 and 1, for `skyrl_mega.evaluate`; the first one is
    the accuracy. Without any, a sample is right when its reward is at least 1."""

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        """Keeps what the row says.

        Args:
            env_config: `environment.options.<name>` of the configuration.
            extras: `reward_spec`, `extra_info`, `data_source` and every further column of the row, and the run's
                `max_turns`.
        """
        self.env_config: Mapping[str, Any] = env_config or {}
        self.options: Mapping[str, Any] = filled(type(self).__name__, self.env_config, self.OPTIONS)
        """`env_config`, and what is usual of the `OPTIONS` that it leaves out."""
        self.extras: Mapping[str, Any] = extras or {}
        self.ground_truth: Any = spec_of(self.extras)[1].get("ground_truth")
        """`reward_spec.ground_truth` of the row, of whatever type the row gives it."""
        self.max_turns: int = int(self.extras.get("max_turns", 1))
        """Turns of this trajectory at most."""
        self.turns: int = 0
        """Turns taken; an environment of several turns counts them itself in `step`."""

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuses what `OPTIONS` cannot say of options, whatever the machine; called before anything else is done.

        Args:
            options: `environment.options.<name>` of the configuration, filled.

        Raises:
            UserError: What is wrong, and the fix.
        """

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Refuses a machine on which this environment cannot work; called when the data that ask for it are in place.

        Args:
            options: As `check_options`, which has seen them.

        Raises:
            UserError: What is missing, and the fix.
        """

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns why no answer can equal a row's `reward_spec.ground_truth`, and what is allowed; None if one can.

        Args:
            truth: Not None.
        """
        return None

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
        """Returns why no answer to a row can earn the reward: the column, the reason, what is allowed; None if one can.

        Asked of every row before a run starts.

        Args:
            row: Its columns but for the prompt.
            options: As `check_options`, which has seen them.
        """
        column, spec = spec_of(row)
        truth = spec.get("ground_truth")
        wrong = None if truth is None else cls.wrong_ground_truth(truth)
        return f"column {column}.ground_truth = {shown(truth)}: {wrong}" if wrong else None

    @classmethod
    def longest_step_s(cls, options: Mapping[str, Any]) -> float:
        """Seconds that one step may take by the options' own limits; to be below `rollout.env_timeout_s`.

        Args:
            options: As `check_options`, which has seen them.
        """
        return 0.0

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Opens the conversation: the messages that the policy sees first, and information for people."""
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges the policy's text of this turn (stop string included) and answers it."""
        raise NotImplementedError(f"{type(self).__name__}.step")

    def out_of_time(self) -> BaseTextEnvStepOutput | None:
        """Judges what there is where the trajectory's time (`rollout.trajectory_timeout_s`) is over between two turns.

        Of an environment that judges only at the end, which `step` has not seen then. Its own time is
        `rollout.env_timeout_s`. None: the trajectory has the rewards that it was given.
        """
        return None

    def close(self) -> None:
        """Releases what the environment holds; called once, also after a failure."""
