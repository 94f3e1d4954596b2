"""Conversions of names of environments and reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_mega.config.migrate.convert import Dropped, Result
from skyrl_mega.config.migrate.state import TranslationState

BUILT_IN = ("gsm8k", "gsm8k_multi_turn", "aime", "search", "text2sql", "multiply", "lcb", "math")
"""Built-in environments with the same name in SkyRL or slime."""
TRL_FORM = (
    "TRL's form runs as it is, but completions are always messages here: a function for text prompts has to read "
    "completions[0][0]['content']"
)
"""Note for the account on a reward function of TRL: TRL passes plain text if the prompts of the data are plain text."""


def environment(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the name of a built-in environment for the first setting in `here`. Ignores `argument` and `state`.

    Raises:
        Dropped: The environment is not built in; the text says how to give its class.
    """
    if value in BUILT_IN:
        return {here[0]: value}, ""
    name = str(value) if str(value).isidentifier() else "NAME"
    raise Dropped(
        f"not built in; give environment.default={name} environment.classes.{name}=package.module:Class, "
        "the entry_point of its register (docs/own-environment.md)"
    )


def verl_reward(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns verl's settings for path and name of a reward function as `path:name` for the first setting in `here`;
    ignores `value`. Without a name, `compute_score`. Ignores `argument`. `state` is the translation so far.

    Raises:
        Dropped: No path is given.
    """
    for prefix in ("custom_reward_function", "reward.custom_reward_function"):
        if file := state.theirs(f"{prefix}.path"):
            name = state.theirs(f"{prefix}.name") or "compute_score"
            return {here[0]: f"{file}:{name}"}, "judges the rows without env_class, as verl's files are"
    raise Dropped("no file is given")


def trl_reward(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Translates TRL's `reward_funcs`, with a single reward function, into the setting `here[0]`, and returns the
    setting with a note about TRL's form of reward functions. Ignores `argument`. `state` is the translation so far.

    `package.module.function` becomes `package.module:function`. `file.py:function`, for a function imported from a file
    beside the script, stays. Nothing is imported.

    Args:
        value: Name of a function, or a list of names.

    Raises:
        Dropped: Several functions or none, a reward model (a name with `/`), or a name without a module, such as a
            function defined in the script. The text says how to proceed.
    """
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if len(names) != 1:
        raise Dropped(_sum(names, state.theirs("reward_weights")), look=True)
    [name] = names
    if ".py:" in name:  # python_script.py found the file beside the script
        return {here[0]: name}, TRL_FORM
    if "/" in name:
        raise Dropped(f"a reward model; ask a service with {name} from a function (docs/own-environment.md)", look=True)
    module, _, function = name.rpartition(".")
    if not module or not name.replace(".", "").isidentifier():
        raise Dropped(
            f"move {name} to a file of its own, and give environment.reward_function=my_reward.py:{name} "
            "(docs/own-environment.md)",
            look=True,
        )
    return {here[0]: f"{module}:{function}"}, TRL_FORM


def _sum(names: Sequence[str], weights: Any) -> str:
    """Returns the advice to add several reward functions, with two lines of code that do."""
    functions = [name.replace(":", ".").rpartition(".")[2] for name in names]
    factors = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
    terms = " + ".join(
        f"{factor} * {name}(completions, **row)[0]" for factor, name in zip(factors, functions, strict=True)
    )
    return (
        "a run has one reward function: write one that adds them, in a file that imports them, and give "
        "environment.reward_function=my_reward.py:total"
        f"\n      def total(completions, **row):\n          return [{terms}]"
    )
