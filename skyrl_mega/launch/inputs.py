"""What a run is given, checked and made ready before any of its processes starts: model, data, devices."""

from __future__ import annotations

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
from skyrl_mega.models.known import how_to_get, hub_name, known
from skyrl_mega.models.registry import architecture
from skyrl_mega.telemetry.console import Console
from skyrl_mega.weights import headers

CPU_EXPERT_COLUMNS = 32
"""vLLM's CPU kernels pad an expert's width per worker to this multiple, and a padded layer cannot be updated twice."""


def check_inputs(config: Config, *, dry: bool = False) -> Mapping[str, Any]:
    """Checks model, layouts, environments and the data files that exist already; builds nothing.

    Args:
        dry: Nothing will run. Where a model of known sizes is not on this machine, they stand for its config.json, and
            its data may be absent too.

    Returns:
        The model's config.json.

    Raises:
        UserError: one line.
    """
    registry.check(config.environment)
    hf = model_config(config, dry=dry)
    check_layouts(config, hf)
    if config.reference.path and not (dry and hub_name(config.reference.path)):
        headers.check_files(Path(config.reference.path))
    elsewhere = dry and _is_elsewhere(config)
    _check_data(config, missing_ok=elsewhere or config.data.prepare is not None)
    return hf


def _is_elsewhere(config: Config) -> bool:
    """Whether the model is one whose sizes are known and that is not on this machine."""
    return not config.model.build and not Path(config.model.path).exists() and hub_name(config.model.path) is not None


def absent(config: Config) -> list[str]:
    """Files and folders of a run that are not on this machine and that no setting makes; a dry run cannot see them."""
    given = [] if config.model.build else [config.model.path]
    if config.reference.path:
        given.append(config.reference.path)
    if not config.data.prepare:
        given += _files(config)
    return [path for path in given if not Path(path).exists()]


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


def model_config(config: Config, *, dry: bool = False) -> Mapping[str, Any]:
    """The config.json of `model.path`, or the one that `model.build` will write there.

    In a dry run a model that is absent may be one of those whose sizes are known.
    """
    path = Path(config.model.path)
    if _is_elsewhere(config):
        if dry:
            return known(path)
        raise UserError(f"model.path: {path} is not there; {how_to_get(path)}")
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
    longest = config.model.max_length or decoder.max_length
    if length_limit(config.rollout) > longest:
        of = "model.max_length" if config.model.max_length else "max_position_embeddings"
        raise UserError(
            f"rollout.max_length: sequences of up to {length_limit(config.rollout)} tokens; the model is made for "
            f"{longest} ({of}); lower rollout.max_prompt_tokens or rollout.sampling.max_tokens"
        )


def with_device(config: Config) -> Config:
    """Decides `cluster.device = auto`; UserError where `cuda` is asked for and there is none."""
    import torch

    found = torch.cuda.is_available()
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
