"""From refused settings to the error of the first one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from skyrl_mega.common.errors import NO_VALUE, UserError
from skyrl_mega.common.values import WIDEST, shown
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusals

P = ParamSpec("P")


def raise_first(config: Config, refusals: Refusals) -> None:
    """Raises for the first refused setting; the value is read from the settings, unless the refusal has one.

    Raises:
        UserError: A setting is refused; names key, value, reason and fix.
    """
    for key, problem, *rest in refusals:
        value = rest[1] if len(rest) > 1 else _value(config, key)
        raise UserError(problem, key=key, value=value, fix=rest[0] if rest else "")


def raising(rule: Callable[Concatenate[Config, P], Refusals]) -> Callable[Concatenate[Config, P], None]:
    """Turns a generator of refusals into a check that raises UserError for the first."""

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
