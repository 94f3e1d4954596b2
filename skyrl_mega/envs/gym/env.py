"""Adapter for any gymnasium environment with text observations."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.envs.base import BaseTextEnv, BaseTextEnvStepOutput, Message
from skyrl_mega.envs.options import Option, mapping, number, switch, text
from skyrl_mega.envs.tags import all_tags


class GymEnv(BaseTextEnv):
    """Adapter for a gymnasium environment. The first observation is added to the prompt; a row's `extra_info.seed`
    decides the reset.

    Actions are numbers for `Discrete`, else text. Rewards are the environment's own, step by step. The environment is
    chosen by a setting: data rows never decide which code is imported.
    """

    requires_ground_truth = False

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "id": text(None, "as given to gymnasium.make"),
        "module": text(None, "imported first, where it registers the id"),
        "kwargs": mapping("passed to gymnasium.make"),
        "tag": text("action", 'an action stands inside <tag>…</tag>; "" takes the whole text', empty=True),
        "invalid_reward": number(0.0, "of a turn without an action that the environment allows"),
        "invalid_ends": switch(False, "whether such a turn ends the trajectory"),
    }

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self.gym = _make(self.options)

    @classmethod
    def check_ready(cls, options: Mapping[str, Any]) -> None:
        """Creates and resets an environment with these options, to detect errors before the run.

        Raises:
            UserError: gymnasium is missing or cannot create the environment, or its observations are not text.
            Exception: The gymnasium environment's `reset` raised it.
        """
        env = _make(options)
        try:
            observation, _ = env.reset(seed=0)
            _text(observation)
        finally:
            env.close()

    @classmethod
    def wrong_row(cls, row: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
        """Returns the reason why a row's seed is invalid, if not a whole number; None for a valid seed or no seed."""
        info = row.get("extra_info")
        seed = info.get("seed") if isinstance(info, Mapping) else info
        whole = isinstance(seed, int) or (isinstance(seed, float) and seed.is_integer())  # False for NaN and infinity
        if seed is None or (isinstance(info, Mapping) and whole):
            return None
        return f"column extra_info.seed = {shown(seed)}: allowed is a whole number, or none"

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        """Resets the environment and returns the prompt with the first observation, and the plain values of its info.

        If the last message is the user's, the observation is added to its end; else the observation becomes a new
        message.

        Raises:
            UserError: The observation is not text.
            Exception: The gymnasium environment's `reset` raised it.
        """
        seed = (self.extras.get("extra_info") or {}).get("seed")
        observation, info = self.gym.reset(seed=None if seed is None else int(seed))
        text = _text(observation)
        if prompt and prompt[-1]["role"] == "user":  # chat templates want the roles to alternate
            last = {**prompt[-1], "content": f"{prompt[-1]['content']}\n\n{text}"}
            return [*prompt[:-1], last], _plain(info)
        return [*prompt, {"role": "user", "content": text}], _plain(info)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Takes a step in the gymnasium environment with the action in the policy's text; returns its observation as a
        message, its reward and its end, and in `metadata` the plain values of its info, with `terminated` and
        `truncated`. A step that ends the trajectory has no message.

        A text without a valid action takes no step: it gets the option `invalid_reward`, an explanation as message, and
        `metadata` {"invalid": True}; with `invalid_ends` the trajectory ends, without the explanation.

        Raises:
            UserError: The observation is not text.
            Exception: The gymnasium environment raised it.
        """
        self.turns += 1
        move, wrong = self._move(action)
        if wrong is not None:
            done = bool(self.options["invalid_ends"])
            return BaseTextEnvStepOutput(
                observations=[] if done else [{"role": "user", "content": wrong}],
                reward=float(self.options["invalid_reward"]),
                done=done,
                metadata={"invalid": True},
            )
        observation, reward, terminated, truncated, info = self.gym.step(move)
        done = bool(terminated or truncated)
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": _text(observation)}],
            reward=float(reward),
            done=done,
            metadata={**_plain(info), "terminated": bool(terminated), "truncated": bool(truncated)},
        )

    def close(self) -> None:
        """Closes the gymnasium environment."""
        self.gym.close()

    def _move(self, text: str) -> tuple[Any, str | None]:
        """Returns the action and None, or None and the reply to a text without a valid action."""
        import gymnasium

        tag, space = self.options["tag"], self.gym.action_space
        if tag:
            tags = list(all_tags(text, tag))
            if not tags:
                return None, f"No action was found. Give one inside <{tag}>…</{tag}>."
            text = tags[-1].text.strip()
        if not isinstance(space, gymnasium.spaces.Discrete):
            return text, None if space.contains(text) else f"{text[:100]!r} is no action here."
        low, high = int(space.start), int(space.start) + int(space.n) - 1
        if re.fullmatch(r"-?\d{1,9}", text) and low <= int(text) <= high:
            return int(text), None
        return None, f"{text[:100]!r} is no action here: give a number from {low} to {high}."


def _make(options: Mapping[str, Any]) -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise UserError("environment gym: gymnasium is not installed; pip install 'skyrl-mega[gym]'") from error
    if not options["id"]:
        raise UserError("environment.options.gym.id is not set; allowed: an id that gymnasium.make knows")
    try:
        if options["module"]:
            importlib.import_module(options["module"])
        return gymnasium.make(options["id"], disable_env_checker=True, **options["kwargs"])
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise UserError(
            " ".join(str(error).split()),
            key="environment.options.gym.id",
            value=options["id"],
            fix="check the id, the module that registers it (environment.options.gym.module), and kwargs",
        ) from error


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise UserError(
            f"its observations are {type(observation).__name__}; allowed: text; wrap it in a "
            "gymnasium.ObservationWrapper that describes them",
            key="environment.options.gym",
        )
    return observation


def _plain(info: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if isinstance(value, str | int | float | bool)}
