"""Checks of the settings against the model: layouts of policy, reference, critic and engines, FP8, widths of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skyrl_mega.cli.experts import check_spread
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config.derived import (
    engine_data,
    engine_ranks,
    expert_parallel,
    fp8_parameters,
    fp8_weights,
    length_limit,
    planned_device,
)
from skyrl_mega.config.precision import needs
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusals
from skyrl_mega.engines.vllm import arguments
from skyrl_mega.megatron import arguments as megatron_arguments
from skyrl_mega.models import engine, fp8_widths
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.megatron import layer_spec
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import fit, fp8_blocks
from skyrl_mega.planner.memory import critic_dims

CPU_EXPERT_COLUMNS = 32
"""vLLM's CPU kernels pad an expert's width per worker to a multiple of this number; a padded layer cannot be updated
twice."""

CACHE_OPTIONS = ("disable_hybrid_kv_cache_manager", "disable_sliding_window")
"""vLLM arguments without caches of bounded size: layers with windows then keep every token or all layers see a window
only, and layers with states fail."""
CUT_SHARED = ("flashinfer_all2allv", "flashinfer_nvlink_two_sided", "moonep")
"""vLLM's values of `all2all_backend` with which replicas cut shared experts; plans and the sync count whole ones."""
FREE = ("max_position_embeddings", "quantization_config")
"""Keys of config.json that may differ in an engine; FP8 has checks of its own (`config.checks.engines`)."""
NAMES = ("architectures", "model_type")
"""Keys of config.json that may differ if they name the same model."""


def check_layouts(config: Config, hf: Mapping[str, Any]) -> None:
    """Checks the layouts of policy, reference and critic against the model, and the engines with `check_engine`. Does
    not check if the memory suffices.

    Options are compared with the sources of megatron-core and vLLM, without an import. Options of a package that is not
    installed are not checked, and no error says so; all other checks still run.

    Raises:
        UserError: The ranks or engines cannot split the model or compute in a precision, the policy cannot share
            prefixes, megatron-core or vLLM has no such option or the value has another type, `hf_overrides` would
            change the model, or sequences may exceed the model's length.
    """
    _check_fp8(config, hf)
    if config.policy.share_prefixes:
        for block in architecture(hf).describe(hf).parts:
            block.check_shared_prefixes("policy.share_prefixes")
    check_engine(config, hf)
    megatron_arguments.check(config.policy, config.critic)
    policy, reference = fit.parallel_of(config)
    layouts = {"policy.layout": policy, "reference.layout": reference, "critic.layout": critic_dims(config)}
    grids = {key: grid for key, grid in layouts.items() if grid}
    for key, grid in grids.items():
        architecture(hf).check_layout(hf, grid, key)
        _check_widths(config, hf, grid, key)
        trained = key != "reference.layout"
        if config.cluster.device == "cpu" and trained and grid.expert > 1 and grid.expert_tensor > 1:
            raise UserError(
                f"with {key}.expert = {grid.expert} it gathers uneven parts, which Gloo cannot"
                "; give one of the two as 1, or run on GPUs",
                key=f"{key}.expert_tensor",
                value=grid.expert_tensor,
            )
    check_spread(config, grids)


def _check_fp8(config: Config, hf: Mapping[str, Any]) -> None:
    """Refuses FP8 in policy or wire for blocks that have not been tested with FP8."""
    wants = {
        "policy.precision.recipe": needs(config.policy.precision) is not None,
        "weights.wire": config.weights.wire == "fp8",
    }
    for key in (key for key, wanted in wants.items() if wanted):
        for block in architecture(hf).describe(hf).parts:
            block.check_fp8(key)


def _check_widths(config: Config, hf: Mapping[str, Any], layout: ParallelDims, key: str) -> None:
    """Checks that a layout leaves widths suitable for `policy.precision`; `auto` is checked like a GPU."""
    spec = layer_spec(config.policy.spec, planned_device(config))
    decoder = architecture(hf).describe(hf)
    fp8_widths.check(decoder, layout, config.policy.precision, spec, key)
    fp8_blocks.check(config, decoder, layout)


@raising
def _check_overrides(config: Config, hf: Mapping[str, Any]) -> Refusals:
    """Refuses values of config.json with which engines could compute another model than the policy, such as other
    routes or a sliding window: every value that is not the one of config.json, but for `FREE` and `NAMES`."""
    overrides = config.rollout.options.get("hf_overrides")
    decoder, needed = architecture(hf).describe(hf), dict(hf)
    for block in decoder.parts:
        needed |= block.engine_arguments(planned_device(config)).get("hf_overrides", {})
    for key, value in overrides.items() if isinstance(overrides, Mapping) else ():
        if key in FREE or (key in needed and value == needed[key]) or (key in NAMES and _describes(hf, key, value)):
            continue
        why = "engines would compute another model than the policy, which reads config.json alone"
        fix = "leave it out, or change config.json of model.path"
        yield f"rollout.options.hf_overrides.{key}", why, fix, shown(value)


@raising
def _check_caches(config: Config, decoder: Decoder) -> Refusals:
    """Refuses `CACHE_OPTIONS` for a model that has layers with sliding windows or states, which are planned as such."""
    cut = EngineCut.of(config.rollout)
    bounded = any(block.kv_window() is not None or block.state_bytes(cut, 1) for block in decoder.blocks)
    for option in CACHE_OPTIONS:
        if bounded and config.rollout.options.get(option):
            why = "the model has layers with sliding windows or states, whose bounded size vLLM would give up"
            yield f"rollout.options.{option}", why, "leave it out"


@raising
def _check_all_to_all(config: Config, decoder: Decoder) -> Refusals:
    """Refuses `CUT_SHARED` for replicas of a model whose shared experts are planned whole in every worker."""
    chosen, shared = config.rollout.options.get("all2all_backend"), decoder.experts and decoder.experts.shared
    replicas = config.rollout.tensor > 1 and engine_data(config.rollout) > 1 and expert_parallel(config.rollout)
    if chosen in CUT_SHARED and replicas and shared and shared.engine_whole:
        why = "vLLM then cuts the shared experts, which are planned and sent whole"
        yield "rollout.options.all2all_backend", why, "leave it out"


def _describes(hf: Mapping[str, Any], key: str, value: Any) -> bool:
    """Returns True if config.json describes the same layers with another value of a key."""
    changed = {**hf, key: value}
    try:
        other = architecture(changed).describe(changed)
    except UserError:
        return False
    decoder = architecture(hf).describe(hf)
    return replace(other, max_length=decoder.max_length) == decoder


def check_engine(config: Config, hf: Mapping[str, Any]) -> None:
    """Checks an engine's arguments, layout, precision and maximum sequence length against the model. Does not check if
    the memory suffices.

    Names and simple types of the arguments (`rollout.options`) are compared with vLLM's source, without an import. If
    vLLM is not installed, this comparison is left out, and no error says so; all other checks still run.

    Raises:
        UserError: vLLM has no such argument or the value has another type, `hf_overrides` would change the model, the
            engines cannot split the model or compute in the precision, or sequences may exceed the model's length.
    """
    arguments.check(config.rollout.options)
    kind = architecture(hf)
    decoder, cut = kind.describe(hf), EngineCut.of(config.rollout)
    engine.check(decoder, cut)
    _check_overrides(config, hf)
    _check_caches(config, decoder)
    _check_all_to_all(config, decoder)
    if fp8_weights(config.rollout):
        for block in decoder.parts:
            block.check_fp8("rollout.options")
    if config.cluster.device == "cpu":
        prefix = "model.build." if config.model.build else f"model.path = {config.model.path}: "
        for block in decoder.blocks:
            block.check_cpu_engine(prefix, config.model.dtype)
    if fp8_parameters(config.rollout):
        engine.check_blocks(decoder, cut)
    if config.cluster.device == "cpu" and decoder.experts:
        pieces = 1 if expert_parallel(config.rollout) else engine_ranks(config.rollout)
        width = decoder.experts.width // pieces
        if width % CPU_EXPERT_COLUMNS:
            raise UserError(
                f"leaves {width} columns of an expert to a worker; vLLM on a CPU needs a multiple "
                f"of {CPU_EXPERT_COLUMNS}; choose another rollout.tensor or model",
                key="rollout.tensor",
                value=config.rollout.tensor,
            )
    longest = config.model.max_length or decoder.max_length
    if length_limit(config.rollout) > longest:
        source = "model.max_length" if config.model.max_length else "max_position_embeddings"
        has_limit = config.rollout.max_length is not None
        limits = () if has_limit else ("rollout.max_prompt_tokens", "rollout.sampling.max_tokens")
        lower = " or ".join(limits) or "it, or give null"
        raise UserError(
            f"sequences of up to {length_limit(config.rollout)} tokens; the model is made for "
            f"{longest} ({source}); lower {lower}",
            key="rollout.max_length",
            settings=limits,
        )
