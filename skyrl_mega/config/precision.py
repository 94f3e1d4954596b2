"""Recipes of `policy.precision`: requirements on GPUs, widths and rows, and checks of the settings."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config, PrecisionConfig


@dataclass(frozen=True)
class Needs:
    """Requirements of a recipe."""

    block: int
    """Numbers per scale along a row; 1: a single scale per tensor."""
    width: int
    """Required divisor of the weight widths of a rank, in Transformer Engine's matrix products."""
    rows: int
    """Required divisor of the activation rows of a rank."""
    capability: tuple[tuple[int, int], tuple[int, int]]
    """Lowest supported compute capability, and the next unsupported compute capability."""
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


def needs(precision: PrecisionConfig) -> Needs | None:
    """Returns the requirements of a policy's recipe; None for a policy in `model.dtype`."""
    return RECIPES.get(precision.recipe)


def row_multiple(precision: PrecisionConfig, spec: str) -> int:
    """Returns the required divisor of a policy rank's token count, reached by padding.

    Args:
        precision: `policy.precision`.
        spec: Implementation of the layers, `te` or `local`.
    """
    requirements = needs(precision)
    return requirements.rows if requirements and spec == "te" else 1


def environment(precision: PrecisionConfig) -> dict[str, str]:
    """Returns the environment variables of a rank on CUDA."""
    requirements = needs(precision)
    return dict(requirements.environment) if requirements else {}


def check_precision(c: Config) -> None:
    """Rejects settings not supported by megatron-core or Transformer Engine.

    Raises:
        UserError: A setting of `policy.precision` is unsupported or has no effect. Names key, value and fix.
    """
    p = c.policy.precision
    if p.recipe == "model":
        for name in ("first_layers", "last_layers"):
            if getattr(p, name):
                raise UserError(
                    "with policy.precision.recipe=model all layers compute in model.dtype; give "
                    f"0, or one of policy.precision.recipe={', '.join(RECIPES)}",
                    key=f"policy.precision.{name}",
                    value=getattr(p, name),
                )
    _check_parameters(c)
    if c.cluster.device == "cuda":
        check_device(c)


def _check_parameters(c: Config) -> None:
    """Rejects FP8 parameters that the optimizer cannot step or the weight sync cannot send."""
    p, key = c.policy.precision, "policy.precision.parameters = fp8"
    if p.parameters == "model":
        return
    if p.recipe != "fp8_blockwise":
        raise UserError(
            "only what fp8_blockwise multiplies can be kept, gathered and sent as it is, and "
            f"policy.precision.recipe is {p.recipe}",
            key=key,
            fix="give policy.precision.recipe=fp8_blockwise, with weights.wire=fp8, or "
            "policy.precision.parameters=model",
        )
    if c.cluster.device == "cpu":
        raise UserError(
            "these are Transformer Engine's tensors, and a CPU rounds weights as it multiplies them",
            key=key,
            fix="give policy.precision.parameters=model, which computes the same",
        )
    if c.weights.wire != "fp8":
        raise UserError(
            f"engines get the weights as the policy has them, and weights.wire is {c.weights.wire}, as model.dtype",
            key=key,
            fix="give weights.wire=fp8, with engines of any kind, or policy.precision.parameters=model",
        )
    for name, optimizer in (("policy", c.policy.optimizer), ("critic", c.critic.optimizer)):
        if optimizer.streamed:
            raise UserError(
                f"master weights are rounded into them on the GPU, and {name}.optimizer.streamed "
                "has only a piece of them there",
                key=key,
                fix=f"give {name}.optimizer.streamed=false, or policy.precision.parameters=model",
            )


def check_device(c: Config) -> None:
    """Rejects settings of `policy.precision` not supported by a policy on GPUs.

    Raises:
        UserError: `policy.spec` or `model.dtype` cannot be combined with FP8. Names key, value and fix.
    """
    p = c.policy.precision
    if p.recipe == "model":
        return
    if c.policy.spec == "local":
        raise UserError(
            "with policy.spec=local a GPU would only round numbers to FP8 and multiply them as "
            "before; allowed there is policy.spec=te, or policy.precision.recipe=model",
            key="policy.precision.recipe",
            value=p.recipe,
        )
    if c.model.dtype != "bfloat16":
        raise UserError(
            f"allowed is bfloat16 where policy.precision.recipe is {p.recipe}; give that, or "
            "policy.precision.recipe=model",
            key="model.dtype",
            value=c.model.dtype,
        )


def check_gpu(precision: PrecisionConfig, capability: tuple[int, int]) -> None:
    """Rejects a GPU without hardware support for a recipe's number format.

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
        f"this GPU (compute capability {capability[0]}.{capability[1]}) does not multiply such "
        f"numbers; allowed on it: {', '.join(['model', *supported])}",
        key="policy.precision.recipe",
        value=precision.recipe,
    )


def check_layers(precision: PrecisionConfig, layers: int, pipeline: int) -> None:
    """Checks the number of layers excluded from FP8: at most the limit of megatron-core, and fewer than all layers.

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
                f"{pipeline} = {limit}, and one layer is to be left; give at most "
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
