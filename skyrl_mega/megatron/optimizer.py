"""The distributed optimizer and the learning-rate schedule, from `policy.optimizer`."""

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
from skyrl_mega.megatron.moments import AdamWithBfloat16Moments, allocate_moments, inner_optimizers


class NotFinite(ArithmeticError):
    """Error of an optimizer step for a gradient norm of NaN or infinity; no weight has changed."""


class NoGradient(ArithmeticError):
    """Error of an optimizer step for a gradient norm of 0; no weight has changed."""


_NEVER = 2**40  # decay steps never reached by a constant schedule


def build_optimizer(
    config: OptimizerConfig, chunks: list[Any], dtype: torch.dtype, key: str = "policy.optimizer"
) -> MegatronOptimizer:
    """Returns AdamW over the chunks' parameters, sharded over the data-parallel ranks; norms and biases do not decay. A
    step of the result raises `NotFinite` or `NoGradient` before changing any weight, for a gradient norm of NaN,
    infinity or 0.

    Moments are allocated here, so that a layout too large for memory fails now, and the moments do not fragment a first
    step's activations. Only a streamed optimizer leaves the allocation to `StreamedOptimizer`, which never holds all
    moments on the device.

    Args:
        config: The settings.
        chunks: Data-parallel model chunks.
        dtype: The model's dtype.
        key: The setting's name, for errors.

    Raises:
        UserError: megatron-core refuses `options` of the settings.
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
    bfloat16_moments = config.moments == "bfloat16"
    if bfloat16_moments and not USING_PYTORCH_OPTIMIZER:
        ours |= dict(use_precision_aware_optimizer=True, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
    gc.collect()  # frees the previous optimizer, kept alive by reference cycles: two do not fit
    settings = with_options(MegatronOptimizerConfig, ours, config.options, f"{key}.options")
    # Only the moments are bfloat16: master weights and gradients stay megatron-core's, as with FP8 weights.
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = False
    optimizer = get_megatron_optimizer(settings, chunks)
    if bfloat16_moments and USING_PYTORCH_OPTIMIZER:
        for part in inner_optimizers(optimizer):
            part.optimizer = AdamWithBfloat16Moments.replacing(part.optimizer)
    if not config.streamed:
        allocate_moments(optimizer)
    round_in_pieces(optimizer)
    _check_gradient_norm(optimizer)
    return optimizer


def _check_gradient_norm(optimizer: MegatronOptimizer) -> None:
    """Makes a step raise `NotFinite` or `NoGradient` before changing any weight, if the gradient norm is not finite or
    0.

    megatron-core asks for the norm before clipping and updating. Otherwise NaN would reach every weight, and with a
    zero gradient Adam's moments and weight decay would still move the weights.
    """
    norm_of = optimizer.get_grad_norm

    def checked_norm() -> float:
        value = float(norm_of())
        if not math.isfinite(value):
            raise NotFinite(f"gradient norm is {value}")
        if not value:
            raise NoGradient("gradient norm is 0")
        return value

    optimizer.get_grad_norm = checked_norm


def build_schedule(config: OptimizerConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Returns the schedule of the learning rate: linear warm-up from 0 to `lr` in `warmup_steps`, then constant, or
    linear or cosine down to `min_lr` until step `decay_steps`.

    The caller steps the schedule. Stepped before the optimizer, the first step uses lr / warmup_steps; stepped after
    (`warmup_from_zero`), 0.
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
