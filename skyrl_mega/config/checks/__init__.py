"""Checks of the settings, without a machine and without reading files.

Rules between fields of a group are the group's `refusals` in `config/schema/`; rules between groups are in the files
here, by subject. Each error is a line of key, value, allowed values, fix. Checks of model, data or devices are in
`skyrl_mega.cli.inputs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config import megatron_options
from skyrl_mega.config.checks import devices, drafts, elastic, engines, generators, learning, policy, unused
from skyrl_mega.config.keys import keys
from skyrl_mega.config.precision import check_precision
from skyrl_mega.config.refusals import raise_first, raising
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusals

LONGEST_NAME = 255
"""Maximum bytes of a file name."""


def check(config: Config, *, planned: bool = False) -> None:
    """Checks all settings and their relations, and raises for the first impossible setting.

    Args:
        config: The settings.
        planned: True if nothing will be started. Settings supported only in a plan are then accepted, and
            `cluster.device=auto` means GPUs. False: with `cluster.device=auto` the number of GPUs is not checked.

    Raises:
        UserError: A setting is rejected; names key, value, allowed values and fix.
    """
    check_values(config)
    check_paths(config)
    for group in (config.run, config.model, config.warmup, config.weights.files):
        raise_first(config, group.refusals())
    raise_first(config, config.policy.optimizer.refusals("policy.optimizer"))
    learning.check_critic(config)
    raise_first(config, config.critic.optimizer.refusals("critic.optimizer"))
    megatron_options.check(config)
    raise_first(config, config.data.refusals())
    learning.check_samples(config)
    raise_first(config, config.algorithm.refusals())
    for check_relations in (
        learning.check_algorithm,
        unused.check_unused,
        drafts.check_drafts,
        policy.check_replay,
        policy.check_speed,
        devices.check_residency,
        learning.check_asynchrony,
        check_precision,
        devices.check_profile,
        devices.check_deterministic,
        devices.check_environment,
        engines.check_rollout,
        elastic.check_elastic,
        generators.check_generator,
        engines.check_wire,
        engines.check_endpoints,
    ):
        check_relations(config)
    devices.check_cluster(config, planned)


def check_evaluation(config: Config, starts_engines: bool = True) -> None:
    """Raises UserError for settings with which no evaluation can run; settings used only in training, and the number of
    GPUs (`check_gpus`), are not checked.

    Args:
        config: The settings.
        starts_engines: True if the evaluation starts engines, False for an endpoint.

    Raises:
        UserError: A setting is rejected; names key, value, allowed values and fix.
    """
    check_values(config)
    check_paths(config)
    raise_first(config, config.run.refusals())
    engines.check_rollout(config)
    if starts_engines:
        engines.check_own_engines(config)
        drafts.check_drafts(config)
        raise_first(config, config.model.refusals())
        engines.check_topology(config)
    else:
        engines.check_endpoint(config)


def check_values(config: Config) -> None:
    """Checks every value by itself, against type and range of its key; relations between settings are not checked.

    Raises:
        UserError: A value is not allowed.
    """
    for name, value in _values(config, ""):
        if not (key := keys()[name]).allows(value):
            raise UserError(key.refusal(value), key=name, value=shown(value))


def _values(settings: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field, name in _members()[prefix]:
        value = getattr(settings, field)
        if keys()[name].group and isinstance(value, keys()[name].type):
            yield from _values(value, f"{name}.")
        else:
            yield name, value


@cache
def _members() -> dict[str, list[tuple[str, str]]]:
    """Returns field and key of every setting, by the prefix of its group ("" for the root)."""
    members: dict[str, list[tuple[str, str]]] = {}
    for name in keys():
        group, dot, field = name.rpartition(".")
        members.setdefault(group + dot, []).append((field, name))
    return members


@raising
def check_paths(c: Config) -> Refusals:
    """Raises a UserError for a path with a name of more than `LONGEST_NAME` bytes between slashes.

    File systems accept no such path; whether a path exists is not checked.
    """
    paths_by_key = {
        "run.name": [c.run.name],
        "run.directory": [c.run.directory],
        "model.path": [c.model.path],
        "reference.path": [c.reference.path or ""],
        "critic.path": [c.critic.path or ""],
        "data.train": c.data.train,
        "data.eval": c.data.eval,
        "warmup.files": c.warmup.files,
        "rollout.drafts.path": [c.rollout.drafts.path or ""],
        "environment.retriever.index": [c.environment.retriever.index or ""],
    }
    for key, paths in paths_by_key.items():
        for path in paths:
            if any(len(part.encode()) > LONGEST_NAME for part in path.split("/")):
                yield key, f"allowed are names of at most {LONGEST_NAME} bytes", "", shown(path)
