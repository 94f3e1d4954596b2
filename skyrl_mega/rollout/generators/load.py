"""Generators by name, and a user's own by import path (`rollout.generator`)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from skyrl_mega.common import imports
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config.options import Option, filled
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.rollout.generators.base import SHARED, TrajectoryGenerator

KEY = "rollout.generator"
BUILT_IN: Mapping[str, str] = {
    "best_of_n": "skyrl_mega.rollout.generators.best_of_n:BestOfN",
    "branching": "skyrl_mega.rollout.generators.branching:Branching",
    "refinement": "skyrl_mega.rollout.generators.refinement:Refinement",
    "tree_search": "skyrl_mega.rollout.generators.tree_search:TreeSearch",
}
"""Name → import path of the built-in generators."""
CONTRACT = dict.fromkeys(
    ("TrajectoryGenerator", "GroupRequest", "GeneratorService", "Branch"),
    "from skyrl_mega.rollout.generators import TrajectoryGenerator, GroupRequest, GeneratorService, Branch",
)


def create(rollout: RolloutConfig) -> TrajectoryGenerator | None:
    """Returns the generator of `rollout.generator`; None for the built-in agent loop.

    Raises:
        UserError: The name is unknown, the import fails, the class is no generator, its constructor raises, or an
            option is invalid.
    """
    if rollout.generator is None:
        return None
    cls = _class_of(rollout.generator)
    options = filled("rollout.generator_options", rollout.generator_options, cls.OPTIONS)
    try:
        return cls(options)
    except Exception as error:  # a user's constructor may raise anything
        text = f"{cls.__name__}(options) raised {error!r}"
        raise UserError(
            text, key=KEY, value=rollout.generator, fix="take one argument, a mapping of options"
        ) from error


def _class_of(name: str) -> type[TrajectoryGenerator]:
    if ":" not in name and name not in BUILT_IN:
        raise imports.unknown_name(name, BUILT_IN, KEY, "class")
    cls = imports.load(BUILT_IN.get(name, name), KEY, contract=CONTRACT)
    if not (isinstance(cls, type) and issubclass(cls, TrajectoryGenerator)):
        text = "it is no generator; allowed is a class that inherits from skyrl_mega.rollout.generators."
        raise UserError(f"{text}TrajectoryGenerator", key=KEY, value=name)
    form = f"{cls.__name__}.generate"
    if cls.generate is TrajectoryGenerator.generate or not inspect.iscoroutinefunction(cls.generate):
        text = f"{form} is missing" if cls.generate is TrajectoryGenerator.generate else f"{form} is not async"
        raise UserError(text, key=KEY, value=name, fix="write `async def generate(self, group, service)`")
    try:
        inspect.signature(cls.generate).bind(None, None, None)
    except TypeError as error:
        text = f"{form} cannot be called by generate(group, service): {error}"
        raise UserError(text, key=KEY, value=name, fix="write `async def generate(self, group, service)`") from error
    if cls.shared not in SHARED:
        text = f"{cls.__name__}.shared is {shown(cls.shared)}; allowed is {' or '.join(SHARED)}"
        raise UserError(text, key=KEY, value=name)
    if not isinstance(cls.OPTIONS, Mapping) or not all(isinstance(option, Option) for option in cls.OPTIONS.values()):
        text = f"{cls.__name__}.OPTIONS is {shown(cls.OPTIONS)}; allowed is a mapping of name to declaration"
        fix = 'write `OPTIONS = {"n": whole(5, "what it is", low=1)}`, by `from skyrl_mega.envs.options import whole`'
        raise UserError(text, key=KEY, value=name, fix=fix)
    return cls
