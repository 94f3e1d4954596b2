"""Preparation of a run after its inputs are checked: the device, an absent model, absent data."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from skyrl_mega.cli.inputs import check_data, data_files, environment_names
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.devices import check_gpus, check_spec
from skyrl_mega.config.checks.policy import check_speed
from skyrl_mega.config.pools import total_nodes
from skyrl_mega.config.precision import check_precision
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusals
from skyrl_mega.envs import registry
from skyrl_mega.models.megatron import TRANSFORMER_ENGINE, layer_spec
from skyrl_mega.telemetry.console import Console


def prepare(config: Config, console: Console) -> Config:
    """Decides the device, builds an absent model (`model.build`) and creates absent data (`data.prepare`). An existing
    model is not changed. Prints the phases, and rows of new data whose reward no answer can earn.

    Call after `check_inputs`.

    Returns:
        The settings with `cluster.device` decided.

    Raises:
        UserError: The device cannot be used, the model cannot be built, or the prepared data are invalid.
        InfrastructureFault, pyarrow.ArrowException: `data.prepare` failed, as in `make_data`.
        ClusterError: The nodes at RAY_ADDRESS did not join in time, or Ray refused the connection.
    """
    config = with_device(config)
    path = Path(config.model.path)
    if config.model.build and not path.exists():
        from skyrl_mega.models.tiny import build

        with console.phase("build model"):
            build(config.model.build, path, config.run.seed)
    if make_data(config, data_files(config), console):
        check_data(config, lambda line: console.say(f"note: {line}"), missing_ok=False)
    return config


def try_machine(config: Config) -> None:
    """Tries what trajectories start on this machine, such as a container, whose missing image is pulled; does nothing
    for environments that start nothing. Returns nothing. Call after `prepare`, once per run.

    Raises:
        UserError: A trajectory could not start.
        Exception: An environment's own `try_machine` raised it.
    """
    for name in environment_names(config):
        registry.try_machine(name, config.environment)


def make_data(config: Config, files: list[str], console: Console) -> bool:
    """Runs `data.prepare` if any of the files is absent. Does not check the result.

    Returns:
        True if the preparation ran; False if it is not configured or no file is absent.

    Raises:
        UserError: An option or a source of `data.prepare` is wrong.
        InfrastructureFault: A sandbox or container of the preparation does not start.
        pyarrow.ArrowException: A value of a source does not have the type of its column.
    """
    if not config.data.prepare or all(Path(file).exists() for file in files):
        return False
    from skyrl_mega.data.prepare import prepare as prepare_data

    with console.phase("prepare data"):
        try:
            prepare_data(config.data.prepare)
        except UserError as error:
            raise UserError(error, key="data.prepare") from error
    return True


def with_device(config: Config, training: bool = True) -> Config:
    """Returns the settings with `cluster.device` decided, and on CUDA `gpu_memory_gib` read from the GPU if null.

    Also checks the number of GPUs and nodes, and settings that depend on the device.

    Args:
        config: The settings.
        training: True if policy, reference and critic need GPUs too; False for an evaluation.

    Raises:
        UserError: torch cannot use the GPUs present, `cuda` is requested without a GPU, GPUs or nodes are too few, or
            the installed packages are for GPUs but the device is a CPU; with `training`, the policy's precision, layers
            or speed settings need another device or a missing package; or the cluster at RAY_ADDRESS does not answer,
            or there is none for two kinds of nodes.
        ClusterError: The nodes at RAY_ADDRESS did not join in time, or Ray refused the connection.
    """
    import torch

    from skyrl_mega.cluster import devices
    from skyrl_mega.cluster.ray_session import gpus_joined
    from skyrl_mega.cluster.run_placement import check_nodes

    joined = bool(os.environ.get("RAY_ADDRESS"))
    if config.cluster.pools.engines is not None and training and not joined:
        raise UserError(
            "two kinds of nodes need a Ray cluster, and RAY_ADDRESS is not set",
            key="cluster.pools.engines",
            fix="start Ray on all nodes and give RAY_ADDRESS (docs/pools.md), or give cluster.pools.engines=null",
        )
    device = devices.choose_device(
        config.cluster.device,
        partial(gpus_joined, total_nodes(config), config.cluster.start_timeout_s) if joined else lambda: 0,
        torch=devices.torch_view(),
        here=devices.gpu_evidence(),
        joined=joined,
    )
    decided = replace(config, cluster=replace(config.cluster, device=device))
    if device == "cuda":
        if decided.cluster.gpu_memory_gib is None and torch.cuda.is_available():
            size = torch.cuda.get_device_properties(0).total_memory / 2**30
            decided = replace(decided, cluster=replace(decided.cluster, gpu_memory_gib=size))
        check_gpus(decided, training)
        check_nodes(decided, training)
    check_vllm(device)
    if training:
        check_precision(decided)
        check_spec(decided)
        _check_packages(decided)
        check_speed(decided)
    return decided


def check_vllm(device: str) -> None:
    """Checks that the installed vLLM can compute on a CPU if `device` is `cpu`. A missing vLLM passes, and on `cuda`
    any version. vLLM's CPU packages have `cpu` in their name or version.

    Raises:
        UserError: vLLM is for GPUs and the device is `cpu`: every engine would fail at the start.
    """
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return
    if device == "cpu" and "cpu" not in version:
        raise UserError(
            f"the vLLM installed here, {version}, computes on GPUs alone; run with "
            ".venv/bin/python, which `make quickstart` makes, or where there are GPUs",
            key="cluster.device",
            value="cpu (which auto means where there is no GPU)",
        )


@raising
def _check_packages(config: Config) -> Refusals:
    """Raises a UserError if the policy's layers need packages that are not installed. On a node without a GPU this is
    left to the ranks."""
    import torch

    installed = {
        str(distribution.name).lower().replace("_", "-") for distribution in importlib.metadata.distributions()
    }
    missing = [name for name in TRANSFORMER_ENGINE if name not in installed]
    spec = layer_spec(config.policy.spec, config.cluster.device)
    if spec == "te" and torch.cuda.is_available() and missing:
        why = f"a policy on CUDA has Transformer Engine's layers, and {' and '.join(missing)} are not installed here"
        fix = "install them with `make cuda`, or give policy.spec=local, which trains without, slower"
        yield "policy.spec", why, fix
