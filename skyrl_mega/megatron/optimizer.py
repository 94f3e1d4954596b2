"""The distributed optimizer and its learning-rate schedule, from `policy.optimizer`."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from skyrl_mega.config.schema import OptimizerConfig
from skyrl_mega.megatron.fp8_parameters import round_in_pieces
from skyrl_mega.megatron.model import with_options
from skyrl_mega.megatron.moments import SmallMoments, allocate_moments, parts


class NotFinite(ArithmeticError):
    """The norm of a gradient is NaN or infinite."""


class NoGradient(ArithmeticError):
    """The norm of a gradient is 0."""


_NEVER = 2**40  # a decay that a constant schedule does not reach


def build_optimizer(
    config: OptimizerConfig, chunks: list[Any], dtype: torch.dtype, key: str = "policy.optimizer"
) -> MegatronOptimizer:
    """AdamW over the chunks' parameters, sharded over the data-parallel ranks; norms and biases do not decay.

    Its moments are there: a layout that does not fit fails now, and they do not lie between a first step's activations.
    Only those of a streamed optimizer are left to `StreamedOptimizer`, which never has all of them on the device.

    Args:
        config: Its settings.
        chunks: Data-parallel model chunks.
        dtype: Of the model.
        key: Where the settings are, for errors.
    """
    ours = dict(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    small = config.moments == "bfloat16"
    if small and not USING_PYTORCH_OPTIMIZER:
        ours |= dict(use_precision_aware_optimizer=True, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
    gc.collect()  # one before this is held by what was put into it, and there is no room for two
    settings = with_options(MegatronOptimizerConfig, ours, config.options, f"{key}.options")
    # Moments alone are small: masters stay megatron-core's, and gradients where they are, as beside FP8 weights.
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
    optimizer = get_megatron_optimizer(settings, chunks)
    if small and USING_PYTORCH_OPTIMIZER:
        for part in parts(optimizer):
            part.optimizer = SmallMoments.instead_of(part.optimizer)
    if not config.streamed:
        allocate_moments(optimizer)
    round_in_pieces(optimizer)
    _look_at_the_norm(optimizer)
    return optimizer


def _look_at_the_norm(optimizer: MegatronOptimizer) -> None:
    """Ends a step whose gradient is not finite, or 0, with `NotFinite` or `NoGradient` while the weights are as they
    were: megatron-core asks for the norm before it clips and updates. It would write NaN into every weight, and Adam's
    moments and weight decay would move them without a gradient."""
    norm_of = optimizer.get_grad_norm

    def norm() -> float:
        found = float(norm_of())
        if not math.isfinite(found):
            raise NotFinite(f"gradient norm is {found}")
        if not found:
            raise NoGradient("gradient norm is 0")
        return found

    optimizer.get_grad_norm = norm


def build_schedule(config: OptimizerConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Linear warm-up, then constant, linear or cosine.

    Stepped before the optimizer, the first step has lr / warmup_steps; after it (`warmup_from_zero`), 0.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps or _NEVER,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
