"""What a run is given, checked and made ready before any of its processes starts: model, data, devices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_mega.config.checks import check_gpus
from skyrl_mega.config.derived import length_limit, policy_ranks, reference_ranks
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.data.rows import check_files, load_demonstrations
from skyrl_mega.envs import registry
from skyrl_mega.layout.parallel import Parallel
from skyrl_mega.models.registry import architecture
from skyrl_mega.telemetry.console import Console
from skyrl_mega.weights import headers

CPU_EXPERT_COLUMNS = 32
"""vLLM's CPU kernels pad an expert's width per worker to this multiple, and a padded layer cannot be updated twice."""


def check_inputs(config: Config) -> Mapping[str, Any]:
    """Checks model, layouts, environments and the data files that exist already; builds nothing.

    Returns:
        The model's config.json.

    Raises:
        UserError: one line.
    """
    registry.check(config.environment)
    hf = model_config(config)
    check_layouts(config, hf)
    if config.reference.path:
        headers.check_files(Path(config.reference.path))
    _check_data(config, missing_ok=config.data.prepare is not None)
    return hf


def prepare(config: Config, console: Console) -> Config:
    """Builds the model and prepares the data where they are absent. `check_inputs` has seen the rest.

    Returns:
        The settings with `cluster.device` decided.

    Raises:
        UserError: one line.
    """
    path = Path(config.model.path)
    if config.model.build and not path.exists():
        from skyrl_mega.models.tiny import build

        with console.phase("build model"):
            build(config.model.build, path, config.run.seed)
    absent = [file for file in _files(config) if not Path(file).exists()]
    if config.data.prepare and absent:
        from skyrl_mega.data.prepare import prepare as prepare_data

        with console.phase("prepare data"):
            try:
                prepare_data(config.data.prepare)
            except UserError as error:
                raise UserError(f"data.prepare: {error}") from error
        _check_data(config, missing_ok=False)
    return with_device(config)


def model_config(config: Config) -> Mapping[str, Any]:
    """The config.json of `model.path`, or the one that `model.build` will write there."""
    path = Path(config.model.path)
    if path.exists() or config.model.build is None:
        hf: Mapping[str, Any] = headers.read_config(path)
        headers.check_files(path, hf)
        return hf
    from skyrl_mega.models.tiny import hf_config

    return hf_config(config.model.build)


def check_layouts(config: Config, hf: Mapping[str, Any]) -> None:
    """The policy's, the reference's and the engines' cuts of the model."""
    kind = architecture(hf)
    ranks = policy_ranks(config)
    kind.check_layout(hf, Parallel.from_config(config.policy.layout, ranks))
    if config.reference.layout:
        reference = Parallel.from_config(config.reference.layout, reference_ranks(config), key="reference.layout")
        kind.check_layout(hf, reference, "reference.layout")
    kind.check_engine(hf, config.rollout.tensor, bool(config.rollout.options.get("enable_expert_parallel")))
    decoder = kind.describe(hf)
    if config.cluster.device == "cpu" and decoder.experts:
        width = decoder.experts.width // config.rollout.tensor
        if width % CPU_EXPERT_COLUMNS:
            raise UserError(
                f"rollout.tensor = {config.rollout.tensor}: leaves {width} columns of an expert to a worker; vLLM on a "
                f"CPU needs a multiple of {CPU_EXPERT_COLUMNS}; choose another rollout.tensor or model"
            )
    if length_limit(config.rollout) > decoder.max_length:
        raise UserError(
            f"rollout.max_length: sequences of up to {length_limit(config.rollout)} tokens; the model is made for "
            f"{decoder.max_length} (max_position_embeddings); lower rollout.max_prompt_tokens or "
            "rollout.sampling.max_tokens"
        )


def with_device(config: Config) -> Config:
    """Decides `cluster.device = auto`; UserError where `cuda` is asked for and there is none.

    The driver of a Ray cluster may stand on a node without a GPU: there `cuda` is taken at its word.
    """
    import torch

    found = torch.cuda.is_available() or (config.cluster.device == "cuda" and "RAY_ADDRESS" in os.environ)
    if config.cluster.device == "cuda" and not found:
        raise UserError("cluster.device = cuda: torch sees no CUDA device here; allowed is cpu or auto")
    device = "cuda" if found and config.cluster.device != "cpu" else "cpu"
    decided = replace(config, cluster=replace(config.cluster, device=device))
    if device == "cuda":
        check_gpus(decided)
    return decided


def _files(config: Config) -> list[str]:
    return [*config.data.train, *config.data.eval, *(config.warmup.files if config.warmup.steps else [])]


def _check_data(config: Config, missing_ok: bool) -> None:
    """Every row of the prompts' and demonstrations' files."""

    def present(files: list[str]) -> list[str]:
        return [file for file in files if not missing_ok or Path(file).exists()]

    check_files(present(config.data.train), config.environment, key="data.train")
    check_files(present(config.data.eval), config.environment, key="data.eval")
    if config.warmup.steps:
        load_demonstrations(present(config.warmup.files))
