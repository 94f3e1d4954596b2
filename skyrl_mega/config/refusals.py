"""Conversion of refused settings (`Refusals`) to an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from skyrl_mega.common.errors import NO_VALUE, UserError
from skyrl_mega.common.values import WIDEST, shown
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusal, Refusals

P = ParamSpec("P")


def raise_first(config: Config, refusals: Refusals) -> None:
    """Raises a UserError for the first refused setting; returns None if nothing is refused. Later refusals are not
    computed.

    Args:
        config: The settings; the source of the value in the error, unless the refusal contains the value.
        refusals: The refused settings.

    Raises:
        UserError: A setting is refused; names key, value, reason and fix.
    """
    for given in refusals:
        refused = given if isinstance(given, Refusal) else Refusal(*given)
        raise UserError(
            refused.problem,
            key=refused.key,
            value=_value(config, refused.key) if refused.value is None else refused.value,
            fix=refused.fix,
            settings=refused.settings,
            together=refused.together,
        )


def raising(rule: Callable[Concatenate[Config, P], Refusals]) -> Callable[Concatenate[Config, P], None]:
    """Decorates a generator of refusals; the decorated function raises a UserError for the first refusal, or returns
    None. The generator's later rules do not run after a refusal."""

    @wraps(rule)
    def check(config: Config, *args: P.args, **kwargs: P.kwargs) -> None:
        raise_first(config, rule(config, *args, **kwargs))

    return check


def _value(config: Config, key: str) -> Any:
    """Returns a setting's value as text; NO_VALUE if there is no such setting."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name, NO_VALUE) if isinstance(value, dict) else getattr(value, name, NO_VALUE)
    if value is NO_VALUE or (isinstance(value, str) and value.isprintable() and 0 < len(value) <= WIDEST):
        return value
    return f"{value:g}" if isinstance(value, float) else shown(value)
