"""A rank's forward and backward pass through the layers of several models, started by `programs.run`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from tests.cuda import programs
from tests.cuda.programs import Case


@dataclass
class Pass:
    """Results of a model."""

    hidden: Any
    """Last hidden states of this rank's tokens without padding, numpy float32 [L, H]."""
    gradients: dict[str, Any]
    """Gradients of this rank's tokens by parameter name, numpy float32."""
    fused: tuple[bool, bool]
    """True if the router and the rotary positions have fused kernels."""


def go(case: Case, waits: Any) -> list[dict[str, Pass]]:
    """Returns the results of each policy with every model directory in the case's folder."""
    programs.join(case)
    models = sorted(case.model.iterdir())
    return [{path.name: _once(replace(case, model=path), policy, waits) for path in models} for policy in case.policies]


def _once(case: Case, policy: Any, waits: Any) -> Pass:
    from tests.cuda.syncs import AsCuda
    from tests.cuda.te_layers import ready, real
    from tests.megatron import layouts

    for variable in [variable for variable in os.environ if variable.startswith("NVTE_")]:
        del os.environ[variable]  # set by megatron-core for the previous model
    batch = layouts.some_batch(90, count=6, seed=case.parallel.coordinates(case.rank).dp)
    layers = ready(case, policy, waits, batch)
    with AsCuda():
        hidden = layers.once()
    config = layers.chunk.config
    fused = config.moe_router_fusion, config.apply_rope_fusion
    return Pass(real(layers, hidden, case), layers.gradients(), fused)
