"""Checks of settings for experts once the model is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_mega.config.derived import MOE_FUSIONS
from skyrl_mega.config.refusals import raising
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusals
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.routes import RouteShape
from skyrl_mega.parallel.dims import ParallelDims


@raising
def check_experts(config: Config, hf: Mapping[str, Any]) -> Refusals:
    """Rejects settings for experts (router replay, expert fusions, the deepep dispatcher) if the model is dense. Does
    nothing for a model with experts.

    Raises:
        UserError: Such a setting is given and the model has no experts.
    """
    moe, fusions = config.policy.moe, config.policy.fusions or []
    if RouteShape.of(architecture(hf).describe(hf)) is not None:
        return
    reason = f"{config.model.path} has no experts (model_type {hf.get('model_type')}), so"
    if moe.replay != "off":
        yield "policy.moe.replay", f"{reason} there are no routes; give off"
    if moe.dispatcher == "deepep":
        yield "policy.moe.dispatcher", f"{reason} no token is sent to any", "give policy.moe.dispatcher=alltoall"
    if unused := [name for name in fusions if name in MOE_FUSIONS]:
        why = f"{reason} {' and '.join(unused)} would do nothing"
        yield "policy.fusions", f"{why}; allowed there are rope and swiglu, or null for all that the model has"


@raising
def check_spread(config: Config, grids: Mapping[str, ParallelDims]) -> Refusals:
    """Rejects the deepep dispatcher if the experts of some model are not spread over ranks.

    Args:
        config: The settings.
        grids: Grids of policy, reference and critic, by the key of the layout.

    Raises:
        UserError: With the deepep dispatcher, a layout puts all experts on every rank.
    """
    for key, grid in grids.items() if config.policy.moe.dispatcher == "deepep" else ():
        if grid.expert * grid.expert_tensor == 1:
            why = f"{key}.expert = 1 and expert_tensor = 1 put all experts on every rank"
            fix = f"give policy.moe.dispatcher=alltoall, or {key}.expert above 1"
            yield "policy.moe.dispatcher", f"{why}, so the dispatcher has no token to send", fix
