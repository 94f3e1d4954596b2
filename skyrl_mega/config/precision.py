"""Recipes of `policy.precision`: requirements on GPUs, widths and rows, checks of the settings, and notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import fp8_weights
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config, PrecisionConfig
from skyrl_mega.config.schema.fields import Refusals


@dataclass(frozen=True)
class Needs:
    """Requirements of an FP8 recipe (`policy.precision.recipe`)."""

    block: int
    """Number of values that share a scale, along a row; 1 stands for a single scale per tensor."""
    width: int
    """Required divisor of the hidden size, and of the widths left to a rank, for Transformer Engine's products."""
    rows: int
    """Required divisor of the activation rows of a rank."""
    capability: tuple[tuple[int, int], tuple[int, int]]
    """(Lowest supported compute capability, lowest unsupported compute capability above)."""
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables read by Transformer Engine at import."""


RECIPES = MappingProxyType(
    {
        # Float32 scales match engines and wire; Transformer Engine's default is powers of two.
        "fp8_blockwise": Needs(128, 16, 128, ((9, 0), (10, 0)), (("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1"),)),
        # With power-of-two scales, rounding does not depend on how the batch is split.
        "fp8_current": Needs(1, 16, 16, ((8, 9), (99, 0)), (("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1"),)),
        "mxfp8": Needs(32, 32, 32, ((10, 0), (12, 0))),
    }
)
"""Requirements by recipe name; `model` has none."""

BLACKWELL_GIB = 150.0
"""Memory limit to distinguish GPUs of compute capability 10.x (B200: 178 GiB) from earlier GPUs (H200: 139 GiB)."""


def needs(precision: PrecisionConfig) -> Needs | None:
    """Returns the requirements of a policy's recipe; None for a policy in `model.dtype` (recipe `model`)."""
    return RECIPES.get(precision.recipe)


def row_multiple(precision: PrecisionConfig, spec: str) -> int:
    """Returns the number to a multiple of which the tokens of a policy rank are padded; 1 for no padding.

    Args:
        precision: `policy.precision`.
        spec: Implementation of the layers, `te` or `local`.
    """
    requirements = needs(precision)
    return requirements.rows if requirements and spec == "te" else 1


def environment(precision: PrecisionConfig) -> dict[str, str]:
    """Returns the environment variables that the recipe needs in a policy rank on CUDA; empty without any."""
    requirements = needs(precision)
    return dict(requirements.environment) if requirements else {}


@raising
def check_precision(c: Config) -> Refusals:
    """Raises a UserError for settings of `policy.precision` without effect, or unsupported on the device or by other
    settings; returns nothing to a caller, because of the decorator `raising`.

    Refuses `first_layers` and `last_layers` without an FP8 recipe; FP8 `parameters` without recipe fp8_blockwise, on a
    CPU, without `weights.wire=fp8` or with a streamed optimizer; and with `cluster.device=cuda` a recipe with
    `policy.spec=local` or a `model.dtype` other than bfloat16.
    """
    p = c.policy.precision
    for name in ("first_layers", "last_layers") if p.recipe == "model" else ():
        if getattr(p, name):
            yield (
                f"policy.precision.{name}",
                "with policy.precision.recipe=model all layers compute in model.dtype; give 0, or one of "
                f"policy.precision.recipe={', '.join(RECIPES)}",
            )
    if p.parameters != "model":
        yield from _parameter_refusals(c)
    if c.cluster.device != "cuda" or p.recipe == "model":
        return
    if c.policy.spec == "local":
        yield (
            "policy.precision.recipe",
            "with policy.spec=local a GPU would only round numbers to FP8 and multiply them as before; allowed there "
            "is policy.spec=te, or policy.precision.recipe=model",
        )
    if c.model.dtype != "bfloat16":
        yield (
            "model.dtype",
            f"allowed is bfloat16 where policy.precision.recipe is {p.recipe}; give that, or "
            "policy.precision.recipe=model",
        )


def _parameter_refusals(c: Config) -> Refusals:
    """Yields refusals of FP8 parameters that the optimizer cannot step or the weight sync cannot send."""
    key, recipe = "policy.precision.parameters", c.policy.precision.recipe
    if recipe != "fp8_blockwise":
        yield (
            key,
            "only numbers of recipe fp8_blockwise can be stored, gathered and sent as they are, and "
            f"policy.precision.recipe is {recipe}",
            f"give policy.precision.recipe=fp8_blockwise, with weights.wire=fp8, or {key}=model",
        )
    if c.cluster.device == "cpu":
        why = "it needs Transformer Engine's tensors, and a CPU only rounds weights in each product"
        yield key, why, f"give {key}=model, which computes the same"
    if c.weights.wire != "fp8":
        why = f"engines get the weights in the policy's format, and weights.wire is {c.weights.wire}, not fp8"
        yield key, why, f"give weights.wire=fp8, with engines of any kind, or {key}=model"
    for name, optimizer in (("policy", c.policy.optimizer), ("critic", c.critic.optimizer)):
        if optimizer.streamed:
            yield (
                key,
                f"FP8 parameters are rounded from master weights on the GPU, and {name}.optimizer.streamed has only a "
                "piece of these there",
                f"give {name}.optimizer.streamed=false, or {key}=model",
            )


def check_gpu(precision: PrecisionConfig, capability: tuple[int, int]) -> None:
    """Rejects a GPU without hardware support for a recipe's number format; `recipe=model` accepts every GPU.

    Args:
        precision: `policy.precision`.
        capability: The GPU's compute capability.

    Raises:
        UserError: The GPU is too old or too new.
    """
    requirements = needs(precision)
    if requirements is None or requirements.capability[0] <= capability < requirements.capability[1]:
        return
    supported = [name for name, needed in RECIPES.items() if needed.capability[0] <= capability < needed.capability[1]]
    raise UserError(
        f"this GPU (compute capability {capability[0]}.{capability[1]}) cannot multiply numbers of this format; "
        f"allowed on it: {', '.join(['model', *supported])}",
        key="policy.precision.recipe",
        value=precision.recipe,
    )


def check_layers(precision: PrecisionConfig, layers: int, pipeline: int) -> None:
    """Checks the numbers of layers excluded from FP8: `first_layers` and `last_layers` are each at most `layers //
    pipeline`, megatron-core's limit, and together fewer than all layers.

    Args:
        precision: `policy.precision`, with an FP8 recipe.
        layers: Layers of the model.
        pipeline: Pipeline stages.

    Raises:
        UserError: Too many layers are excluded.
    """
    limit = layers // pipeline
    for name in ("first_layers", "last_layers"):
        if getattr(precision, name) > limit:
            raise UserError(
                f"megatron-core takes at most the layers of a pipeline stage, {layers} // "
                f"{pipeline} = {limit}, and one layer must remain in FP8; give at most "
                f"{min(limit, layers - 1)}",
                key=f"policy.precision.{name}",
                value=getattr(precision, name),
            )
    if precision.first_layers + precision.last_layers >= layers:
        raise UserError(
            f"all of the model's {layers} layers would compute in model.dtype, and none in "
            f"{precision.recipe}; give {layers - 1} together at most, or "
            "policy.precision.recipe=model with neither of them",
            key="policy.precision.first_layers",
            value=f"{precision.first_layers} and last_layers = {precision.last_layers}",
        )


def fp8_notes(config: Config) -> Iterator[str]:
    """Yields notes for the user about FP8 in training, weight sync and engines, for a run on GPUs; none without FP8."""
    recipe, wire, size = config.policy.precision.recipe, config.weights.wire, config.cluster.gpu_memory_gib
    trains, serves = recipe != "model", fp8_weights(config.rollout)
    if size is not None and recipe == "mxfp8" and size < BLACKWELL_GIB:
        yield (
            "policy.precision.recipe=mxfp8 needs a Blackwell GPU (B200), and "
            f"cluster.gpu_memory_gib={size:g} is the memory of an earlier GPU, on which a run would fail at its start; "
            "on Hopper give fp8_blockwise"
        )
    if size is not None and recipe == "fp8_blockwise" and size >= BLACKWELL_GIB:
        yield (
            f"policy.precision.recipe=fp8_blockwise needs a Hopper GPU (H100, H200), and "
            f"cluster.gpu_memory_gib={size:g} is the memory of a later GPU, on which a run would fail at its start; on "
            "Blackwell give mxfp8"
        )
    serving = "rollout.options.quantization=fp8_per_block makes them compute in FP8 too (docs/precision.md)"
    if trains and not serves:
        yield (
            f"policy.precision.recipe={recipe}: engines compute in {config.model.dtype} and round differently from the "
            f"policy, which mismatch/* will show; {serving}"
        )
    if wire == "fp8" and not serves:
        yield (
            f"weights.wire=fp8: engines compute in {config.model.dtype}, but with weights rounded to FP8 by the weight "
            f"sync; {serving}, or give weights.wire=auto"
        )
    if trains or serves:
        yield (
            "the dry run counts FP8 in memory, weight sync and padding, but estimates its matrix products at the speed "
            "of bfloat16: an FP8 run is faster than estimated"
        )
