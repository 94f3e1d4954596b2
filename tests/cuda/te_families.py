"""A rank's forward and backward pass through the layers of several models, started by `programs.run`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from tests.cuda import programs
from tests.cuda.programs import Case

BOTH_TYPES = ("gpt_oss",)
"""Models with passes in float32 too: their attention is this project's, and Transformer Engine's has no float32."""


@dataclass
class Pass:
    """Results of a model."""

    hidden: Any
    """Last hidden states of this rank's tokens without padding, numpy float32 [L, H]."""
    gradients: dict[str, Any]
    """Gradients of this rank's tokens by parameter name, numpy float32."""
    fused: tuple[bool, bool]
    """True if the router and the rotary positions have fused kernels."""


def go(case: Case, waits: Any) -> list[dict[tuple[str, str], Pass]]:
    """Returns the results of each policy by model directory in the case's folder, and by type of the weights."""
    programs.join(case)
    passes = [
        (path, dtype)
        for path in sorted(case.model.iterdir())
        for dtype in ("bfloat16", "float32")[: 1 + (path.name in BOTH_TYPES)]
    ]
    return [
        {(path.name, dtype): _once(replace(case, model=path), policy, waits, dtype) for path, dtype in passes}
        for policy in case.policies
    ]


def _once(case: Case, policy: Any, waits: Any, dtype: str) -> Pass:
    from tests.cuda.syncs import AsCuda
    from tests.cuda.te_layers import ready, real
    from tests.megatron import layouts

    for variable in [variable for variable in os.environ if variable.startswith("NVTE_")]:
        del os.environ[variable]  # set by megatron-core for the previous model
    batch = layouts.some_batch(90, count=6, seed=case.parallel.coordinates(case.rank).dp)
    layers = ready(case, policy, waits, batch, dtype)
    with AsCuda():
        hidden = layers.once()
    config = layers.chunk.config
    fused = config.moe_router_fusion, config.apply_rope_fusion
    return Pass(real(layers, hidden, case), layers.gradients(), fused)
