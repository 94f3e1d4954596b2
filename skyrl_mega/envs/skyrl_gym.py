"""Stand-in for the package `skyrl_gym`: the public names with which environments for SkyRL are written.

A user's file importing `skyrl_gym` runs unchanged without the package. An installed `skyrl_gym` is used instead. Other
code cannot import the stand-in: `modules` are present only during the import of a user's file (`common/imports.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

PACKAGE = "skyrl_gym"
"""Import name of SkyRL's package of environments."""

ObsType = TypeVar("ObsType")
ActType = TypeVar("ActType")
MessageType = dict[str, str]
ConversationType = list[MessageType]


class Error(Exception):
    """An error of the package's own functions."""


class RegistrationError(Error):
    """A name registered twice."""


class EnvStepOutput(TypedDict):
    """Result of a step of any environment."""

    observations: Any
    reward: Any
    done: bool
    metadata: NotRequired[dict[str, Any] | None]


class BaseTextEnvStepOutput(TypedDict):
    """Result of a step of a text environment."""

    observations: ConversationType
    reward: float
    done: bool
    metadata: dict[str, Any]
    postprocessed_action: NotRequired[str | None]


class Env(Generic[ObsType, ActType]):
    """Base of all environments."""

    def init(self, *args: Any, **kwargs: Any) -> tuple[ObsType, dict[str, Any]]:
        """Opens the environment; a subclass must override this method, which raises NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__}.init")

    def step(self, action: ActType) -> Any:
        """Takes a step; a subclass must override this method, which raises NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__}.step")

    def close(self) -> None:
        """Releases resources; the default does nothing."""

    def __enter__(self) -> Env[ObsType, ActType]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class BaseTextEnv(Env[ConversationType, str]):
    """Base of text environments, with groups of tools."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self.max_turns = 1
        self.tool_groups: Sequence[ToolGroup] = []
        self.tool_to_toolgroup: dict[str, str] = {}

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Returns the prompt unchanged, and no information."""
        return prompt, {}

    def init_tool_groups(self, tool_groups: Sequence[ToolGroup] = ()) -> None:
        """Replaces the groups of tools of this environment."""
        self.tool_groups = tool_groups
        pairs = [group.get_tool_to_group_mapping() for group in tool_groups]
        self.tool_to_toolgroup = {tool: group for mapping in pairs for tool, group in mapping.items()}

    _init_tool_groups = init_tool_groups  # the name in earlier versions

    def _execute_tool(self, tool_group_name: str, tool_name: str, tool_input: Sequence[Any]) -> Any:
        """Calls a tool with the entries of `tool_input` as arguments.

        Raises:
            ValueError: No group or tool of this name.
        """
        for group in self.tool_groups:
            if group.name == tool_group_name:
                return group.execute_tool(tool_name, *tool_input)
        raise ValueError(f"there is no tool group {tool_group_name!r}")

    def get_metrics(self) -> dict[str, Any]:
        """Returns metric → value of this trajectory; {} by default."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns metric → mean over the trajectories with a number for this metric."""
        return default_aggregate_metrics(metrics)


class tool:
    """Decorator of a tool: a method of a ToolGroup."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func, self.name = func, func.__name__

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else self.func.__get__(instance, owner)


class ToolGroup:
    """Tools with a shared state: the methods with the decorator `tool`."""

    def __init__(self, name: str) -> None:
        self.name = name
        names = [n for n in dir(type(self)) if isinstance(getattr(type(self), n, None), tool)]
        self._tool_registry: dict[str, Callable[..., Any]] = {name: getattr(self, name) for name in names}

    def get_name(self) -> str:
        """Returns the group's name."""
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """Returns the method of a tool, bound to this group; None for an unknown name."""
        return self._tool_registry.get(name)

    def get_tool_names(self) -> list[str]:
        """Returns the names of all tools of the group."""
        return list(self._tool_registry)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the tool `name` with the other arguments and returns its result.

        Raises:
            ValueError: No tool of this name.
        """
        if (function := self.get_tool(name)) is None:
            raise ValueError(f"tool group {self.name!r} has no tool {name!r}")
        return function(*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """Returns tool name → this group's name."""
        return dict.fromkeys(self._tool_registry, self.name)


@dataclass
class EnvSpec:
    """Specification of a registered environment."""

    id: str
    entry_point: Callable[..., Any] | str
    """The class, or `package.module:Class`."""
    kwargs: dict[str, Any] = field(default_factory=dict)


registry: dict[str, EnvSpec] = {}
"""Name → environment, as registered by the user's files. Rows cannot name these: `environment.classes` decides."""


def register(id: str, entry_point: Callable[..., Any] | str, kwargs: dict[str, Any] | None = None) -> None:
    """Adds an environment to `registry`, for `make`.

    Args:
        id: Name of the environment.
        entry_point: Its class, or `package.module:Class`; imported by `make` only.
        kwargs: Arguments of the class; None for none.

    Raises:
        RegistrationError: The name is taken.
    """
    if id in registry:
        raise RegistrationError(f"environment {id!r} is registered twice")
    registry[id] = EnvSpec(id, entry_point, kwargs or {})


def deregister(id: str) -> None:
    """Removes the environment `id` from `registry`.

    Raises:
        Error: The name is unknown.
    """
    spec(id)
    del registry[id]


def spec(env_id: str) -> EnvSpec:
    """Returns the specification of a registered environment.

    Raises:
        Error: The name is unknown.
    """
    if env_id not in registry:
        raise Error(f"no environment {env_id!r} is registered")
    return registry[env_id]


def make(id: str | EnvSpec, **kwargs: Any) -> Any:
    """Creates and returns a registered environment; imports the class of an entry point given as text.

    Args:
        id: Name, or specification.
        **kwargs: Arguments of the environment's class, in addition to the registered arguments.

    Raises:
        Error: The name is unknown.
        ImportError, AttributeError: The entry point leads nowhere.
    """
    registered = id if isinstance(id, EnvSpec) else spec(id)
    create = registered.entry_point
    if isinstance(create, str):
        module, _, name = create.partition(":")
        create = getattr(importlib.import_module(module), name)
    return create(**{**registered.kwargs, **kwargs})


def default_aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns metric → mean over the dicts with a number for this metric; a metric without any number is left out."""
    names = dict.fromkeys(name for figures in metrics for name in figures)
    values = {n: [float(f[n]) for f in metrics if isinstance(f.get(n), int | float)] for n in names}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items() if numbers}


@cache
def modules() -> dict[str, ModuleType]:
    """Returns the stand-in's modules by import name, `skyrl_gym` and below."""
    error = dict(Error=Error, RegistrationError=RegistrationError)
    core = dict(Env=Env, EnvStepOutput=EnvStepOutput, ObsType=ObsType, ActType=ActType)
    base = dict(
        BaseTextEnv=BaseTextEnv,
        BaseTextEnvStepOutput=BaseTextEnvStepOutput,
        ConversationType=ConversationType,
        MessageType=MessageType,
    )
    registration = dict(
        register=register, deregister=deregister, make=make, spec=spec, registry=registry, EnvSpec=EnvSpec
    )
    names: dict[str, dict[str, Any]] = {
        PACKAGE: {"Env": Env} | registration,
        f"{PACKAGE}.core": core,
        f"{PACKAGE}.error": error,
        f"{PACKAGE}.metrics": dict(default_aggregate_metrics=default_aggregate_metrics),
        f"{PACKAGE}.envs": registration,
        f"{PACKAGE}.envs.base_text_env": base | core,
        f"{PACKAGE}.envs.registration": registration,
        f"{PACKAGE}.tools": dict(tool=tool, ToolGroup=ToolGroup),
        f"{PACKAGE}.tools.core": dict(tool=tool, ToolGroup=ToolGroup),
    }
    stand_ins = {name: ModuleType(name, "Stand-in of skyrl_mega, see skyrl_mega/envs/skyrl_gym.py.") for name in names}
    for name, module in stand_ins.items():
        vars(module).update(names[name], __path__=[])
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(stand_ins[parent], last, module)
    return stand_ins
