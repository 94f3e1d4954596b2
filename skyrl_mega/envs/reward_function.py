"""The environment of a reward function written for verl or TRL: one turn, judged by the user's function as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from numbers import Real
from typing import Any, ClassVar, cast

import numpy as np

from skyrl_mega.common.errors import UserError
from skyrl_mega.envs import event_loop
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Message
from skyrl_mega.envs.validate import BadOutput

FORMS = (
    "`compute_score(data_source, solution_str, ground_truth, extra_info)` as in verl, or "
    "`reward(completions, prompts, **columns)` as in TRL"
)
"""The two forms of a reward function, for errors."""
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments of verl's form."""
LISTS = ("prompts", "completions")
"""Arguments of TRL's form besides the columns of the rows."""
NOT_COLUMNS = ("prompt", "completion", "completion_ids", "max_turns", "env_class")
"""Values of a row that TRL does not pass as columns, and the environment's name."""


class RewardFunctionEnv(BaseTextEnv):
    """A single turn judged by a user's function; `environment_of` creates the class for a function.

    The function's further keyword arguments are the environment's options (`environment.options.<name>`).
    """

    function: ClassVar[Callable[..., Any]]
    """The user's function; coroutines of all calls share an event loop."""
    users_code: ClassVar[Callable[..., Any]]
    """The function again, for reports of faults."""
    setting: ClassVar[str]
    """Setting with the function's path, for errors."""
    takes_lists: ClassVar[bool]
    """True for TRL's form, which takes lists: the function gets lists of one entry."""
    prompt: Sequence[Message] = ()
    """First messages of the conversation, for TRL's form."""

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Refuses options that the function does not accept.

        Raises:
            UserError: The function does not accept its form's arguments and these options; or, in verl's form, has a
                further parameter without a default. In TRL's form a column may give further parameters.
        """
        given = LISTS if cls.takes_lists else VERL_ARGUMENTS
        try:
            signature = inspect.signature(cls.function)
            if cls.takes_lists:  # further arguments are columns of the rows
                signature.bind_partial(**dict.fromkeys(given), **options)
            else:
                signature.bind(**dict.fromkeys(given), **options)
        except TypeError as error:
            inner = cls.setting.startswith("environment.options.")
            further = f"{cls.setting}_options" if inner else f"environment.options.{cls.setting.rpartition('.')[2]}"
            text = f"{_name(cls.function)} cannot be called with {', '.join((*given, *options))}: {error}"
            fix = f"further arguments are {further}"
            raise UserError(text, key=cls.setting, fix=f"add **kwargs; {fix}" if cls.takes_lists else fix) from error

    @classmethod
    def wrong_columns(cls, columns: Iterable[str], options: Mapping[str, Any]) -> str | None:
        """Returns the reason why TRL's form cannot be called with the columns of a file; None if it can, and always for
        verl's form.

        Args:
            columns: Names of the columns.
            options: Options accepted by `check_options`.
        """
        if not cls.takes_lists:
            return None
        passed = dict.fromkeys((*(name for name in columns if name not in NOT_COLUMNS), *LISTS))
        try:
            inspect.signature(cls.function).bind(**passed, **options)
        except TypeError as error:
            return f"{_name(cls.function)} cannot be called with {', '.join((*passed, *options))}: {error}"
        return None

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Keeps the prompt as an argument of the function; returns the prompt unchanged, and {}."""
        self.prompt = prompt
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Calls the user's function on the answer `action` and ends the trajectory; waits for the result of a
        coroutine.

        Returns:
            The reward, without messages: in verl's form the number, or `score` of a dict, whose other entries become
            metadata; in TRL's form the only number of the list, 0 for None.

        Raises:
            BadOutput: The function returned no reward.
            Exception: The function raised it.
        """
        self.turns += 1
        arguments = self._rows(action) if self.takes_lists else self._row(action)
        result = type(self).function(**arguments, **self.options)
        if inspect.isawaitable(result):
            result = event_loop.wait(result)
        reward, notes = _first(result) if self.takes_lists else _score(result)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=notes)

    def _row(self, action: str) -> dict[str, Any]:
        """Returns the arguments of verl's form; verl adds the last two entries of `extra_info` too."""
        info = self.extras.get("extra_info")
        if info is None or isinstance(info, Mapping):
            info = {**(info or {}), "num_turns": 2, "rollout_reward_scores": {}}
        values = (self.extras.get("data_source"), action, self.ground_truth, info)
        return dict(zip(VERL_ARGUMENTS, values, strict=True))

    def _rows(self, action: str) -> dict[str, Any]:
        """Returns the arguments of TRL's form: prompt, answer and every column of the row, in lists of one entry."""
        columns = {name: [value] for name, value in self.extras.items() if name not in NOT_COLUMNS}
        answer = [{"role": "assistant", "content": action}]
        return columns | {"prompts": [list(self.prompt)], "completions": [answer]}


@cache
def environment_of(function: Callable[..., Any], setting: str) -> type[RewardFunctionEnv]:
    """Returns a subclass of `RewardFunctionEnv` for a reward function; the same subclass for the same arguments.

    Args:
        function: The user's function, in verl's or TRL's form.
        setting: Setting with the function's path, for errors.

    Raises:
        UserError: The function takes neither `solution_str` nor `completions` nor `**kwargs`, or has no signature.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"{_name(function)} has no signature; allowed: {FORMS}", key=setting) from error
    takes_lists = "completions" in parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_lists and "solution_str" not in parameters and not anything:
        taken = ", ".join(parameters) or "nothing"
        raise UserError(f"{_name(function)} takes {taken}; allowed: {FORMS}", key=setting)
    body = {
        "__doc__": function.__doc__,
        "function": staticmethod(function),
        "users_code": staticmethod(function),
        "setting": setting,
        "takes_lists": takes_lists,
        "requires_ground_truth": not takes_lists,
    }
    return cast(type[RewardFunctionEnv], type(_name(function), (RewardFunctionEnv,), body))


def _score(result: Any) -> tuple[float, dict[str, Any]]:
    """Returns the reward and the notes of a result in verl's form: a number, or a dict with `score`."""
    if not isinstance(result, Mapping):
        return _number(result), {}
    if "score" not in result:
        raise BadOutput(f"the function gave a dict without score: {_shown(result)}; allowed: score, and further notes")
    notes = {str(name): _plain(value) for name, value in result.items() if name != "score"}
    metrics = {name: float(value) for name, value in notes.items() if isinstance(value, Real)}
    return _number(result["score"]), notes | ({"metrics": metrics} if metrics else {})


def _first(result: Any) -> tuple[float, dict[str, Any]]:
    """Returns the reward of a result in TRL's form: a list of one number; None, "not applicable", counts 0."""
    if not isinstance(result, Sequence | np.ndarray) or len(result) != 1:
        raise BadOutput(f"the function gave {_shown(result)}; allowed: a list of one number, as it got one completion")
    return (0.0 if result[0] is None else _number(result[0])), {}


def _number(value: Any) -> float:
    value = _plain(value)
    if not isinstance(value, Real):
        raise BadOutput(f"the function gave {_shown(value)}; allowed: a number, or in verl's form a dict with score")
    return float(value)


def _plain(value: Any) -> Any:
    """Returns the Python number of a scalar of numpy or torch; any other value unchanged."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:200]
