"""Conversions of names of environments and reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_mega.config.migrate.convert import Dropped, Result
from skyrl_mega.config.migrate.state import TranslationState

BUILT_IN = ("gsm8k", "gsm8k_multi_turn", "aime", "search", "text2sql", "multiply", "lcb", "math")
"""Environments with the same name in SkyRL or slime."""


def environment(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Copies the name of an environment that is built in; others need a class."""
    if value in BUILT_IN:
        return {here[0]: value}, ""
    name = str(value) if str(value).isidentifier() else "NAME"
    raise Dropped(
        f"not built in; give environment.default={name} environment.classes.{name}=package.module:Class, "
        "the entry_point of its register (docs/own-environment.md)"
    )


def verl_reward(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Joins the file and the name of a reward function."""
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):
        if file := state.theirs(f"{prefix}.path"):
            name = state.theirs(f"{prefix}.name") or "compute_score"
            return {here[0]: f"{file}:{name}"}, "judges the rows without env_class, as verl's files are"
    raise Dropped("no file is given")


def trl_reward(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Copies the import path of a single reward function."""
    names = value if isinstance(value, list) else [value]
    if len(names) != 1:
        raise Dropped("a run has one reward function; write one that adds them, and give environment.reward_function")
    module, _, name = str(names[0]).rpartition(".")
    if not module or not str(names[0]).replace(".", "").isidentifier():
        raise Dropped(
            f"move {names[0]} to a file of its own, and give environment.reward_function=my_reward.py:{names[0]} "
            "(docs/own-environment.md)"
        )
    return {here[0]: f"{module}:{name}"}, "TRL's form of a reward function runs as it is"
