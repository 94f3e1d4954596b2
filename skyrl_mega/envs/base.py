"""The environment contract: an environment judges the policy's text and answers the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NotRequired, TypedDict

from skyrl_mega.common.values import shown
from skyrl_mega.envs.options import Option, filled
from skyrl_mega.envs.truths import spec_of

Message = dict[str, Any]
"""A chat message: `role` and `content`, both text. A `tool` message may also carry `tool_call_id` and `name`, an
`assistant` message `tool_calls`, a list.
"""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of a message. Chat templates silently drop any other role."""


class BaseTextEnvStepOutput(TypedDict):
    """The result of one step: a plain dict with these keys."""

    observations: list[Message]
    """Messages appended to the conversation before the next turn; [] for none."""
    reward: float | Mapping[str, float]
    """Reward of this step. A trajectory's reward is the sum over its steps. A dict holds several rewards by name,
    summed with `algorithm.reward_weights`.
    """
    rewards_at: NotRequired[Sequence[tuple[int, float]] | None]
    """Optional. (end, reward) of parts of the answer, earned in addition to `reward`. Where advantages are estimated
    per token, the token completing the first `end` characters of `action` receives the reward.
    """
    done: bool
    """True if the trajectory ends here."""
    metadata: dict[str, Any]
    """Information for people: kept with the trajectory, never seen by the policy. `tool_calls` lists the calls."""
    messages: NotRequired[list[Message] | None]
    """Optional. The whole conversation, rewritten; replaces everything the policy saw before, and `observations` is
    then []. Needs `rewrites_history` and `rollout.step_wise`.
    """


class BaseTextEnv:
    """A conversation with a policy: created for one trajectory, stepped once per turn, closed at the end.

    A subclass overrides `step`. An instance is made as `cls(env_config=…, extras=…)`, in a process without GPUs. `step`
    may block (a database, an HTTP call): environments run in threads, each step under `rollout.env_timeout_s`.
    """

    blocking: ClassVar[bool] = True
    """False if every method returns within a millisecond whatever the policy wrote: the environment then runs without
    threads and without time limits. Not inherited: a subclass with other methods repeats the declaration.
    """

    requires_ground_truth: ClassVar[bool] = True
    """True if every row needs `reward_spec.ground_truth`: rows without a ground truth are refused before the run
    starts. Set False to judge without a ground truth.
    """

    rewrites_history: ClassVar[bool] = False
    """True if `step` may return `messages` that change the earlier conversation instead of only adding to the end."""
    OPTIONS: ClassVar[Mapping[str, Option] | None] = None
    """Options of the environment, declared with `skyrl_mega.envs.options`. Undeclared options and invalid values are
    refused before a run starts. None accepts everything.
    """
    metrics: ClassVar[tuple[str, ...]] = ()
    """Entries of the last step's metadata that are scores between 0 and 1, for `skyrl_mega.evaluate`; the first entry
    is the accuracy. Without entries, a sample is right if the reward is at least 1.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        """Stores the options and the row.

        Args:
            env_config: `environment.options.<name>` of the configuration.
            extras: `reward_spec`, `extra_info`, `data_source` and every further column of the row, and the run's
                `max_turns`.

        Raises:
            UserError: An option is not declared in `OPTIONS`, or has an invalid value.
        """
        self.env_config: Mapping[str, Any] = env_config or {}
        self.options: Mapping[str, Any] = filled(type(self).__name__, self.env_config, self.OPTIONS)
        """`env_config`, completed with the defaults of `OPTIONS`."""
        self.extras: Mapping[str, Any] = extras or {}
        self.ground_truth: Any = spec_of(self.extras)[1].get("ground_truth")
        """`reward_spec.ground_truth` of the row, of any type."""
        self.max_turns: int = int(self.extras.get("max_turns", 1))
        """Maximum number of turns of this trajectory."""
        self.turns: int = 0
        """Turns taken; a multi-turn environment increments the count in `step`."""

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuses invalid options that `OPTIONS` cannot detect, whatever the machine; called before anything else. The
        default accepts all options.

        Args:
            options: `environment.options.<name>` of the configuration, with defaults filled in.

        Raises:
            UserError: An option is wrong; the message names the problem and the fix.
        """

    @classmethod
    def with_absolute_paths(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the options with absolute file paths, for processes started in another folder; the default returns
        them unchanged.

        Args:
            options: `environment.options.<name>` of the configuration, without defaults.
        """
        return options

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Refuses a machine that cannot run this environment; called once the data that use the environment are in
        place. The default accepts every machine.

        Args:
            options: Options accepted by `check_options`.

        Raises:
            UserError: A requirement is missing; the message names the requirement and the fix.
        """

    @classmethod
    def try_machine(cls, options: Mapping[str, Any]) -> None:
        """Tries what a trajectory starts on this machine, such as a container, before a new run starts; not called in a
        dry run. May take as long as a trajectory's start. The default does nothing.

        Args:
            options: Options accepted by `check_options`.

        Raises:
            UserError: The start fails; the message names the cause.
        """

    @classmethod
    def wrong_ground_truth(cls, truth: Any) -> str | None:
        """Returns the reason why no answer can equal a row's `reward_spec.ground_truth`, and the allowed form; None if
        an answer can. The default is None.

        Args:
            truth: The ground truth; not None.
        """
        return None

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
        """Returns the reason why no answer to a row can earn the reward (column, reason, allowed form); None if an
        answer can, and for a row without a ground truth.

        Called for every row before a run starts. The default applies `wrong_ground_truth`.

        Args:
            row: The row's columns without the prompt.
            options: Options accepted by `check_options`.
        """
        column, spec = spec_of(row)
        truth = spec.get("ground_truth")
        wrong = None if truth is None else cls.wrong_ground_truth(truth)
        return f"column {column}.ground_truth = {shown(truth)}: {wrong}" if wrong else None

    @classmethod
    def longest_step_s(cls, options: Mapping[str, Any]) -> float:
        """Returns the longest duration of one step in seconds under the options' own limits.

        The duration must be below `rollout.env_timeout_s`. The default is 0.

        Args:
            options: Options accepted by `check_options`.
        """
        return 0.0

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Opens the conversation; returns the first messages for the policy, and information for people.

        The default returns the row's prompt unchanged, and {}.
        """
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judges the policy's text of this turn (`action`), stop string included. A subclass must override this method;
        the default raises NotImplementedError.

        Returns:
            The reward of this turn, the messages for the policy's next turn, and whether the trajectory ends.
        """
        raise NotImplementedError(f"{type(self).__name__}.step")

    def out_of_time(self) -> BaseTextEnvStepOutput | None:
        """Returns the judgement of the work so far, when the trajectory's time limit (`rollout.trajectory_timeout_s`)
        expires between turns.

        Intended for environments that judge only at the end: `step` has not judged the work then. The call itself is
        limited by `rollout.env_timeout_s`. None, the default, keeps the rewards given so far.
        """
        return None

    def close(self) -> None:
        """Releases the environment's resources; called once, also after a failure. The default does nothing."""
