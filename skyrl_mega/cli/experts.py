"""Checks of settings for experts once the model is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config.derived import MOE_FUSIONS
from skyrl_mega.config.schema import Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.routes import RouteShape
from skyrl_mega.parallel.dims import ParallelDims


def check_experts(config: Config, hf: Mapping[str, Any]) -> None:
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
        raise UserError(f"{reason} there are no routes; give off", key="policy.moe.replay", value=moe.replay)
    if moe.dispatcher == "deepep":
        raise UserError(
            f"{reason} no token is sent to any",
            key="policy.moe.dispatcher",
            value="deepep",
            fix="give policy.moe.dispatcher=alltoall",
        )
    if unused := [name for name in fusions if name in MOE_FUSIONS]:
        raise UserError(
            f"{reason} {' and '.join(unused)} would do nothing; allowed there are rope and "
            "swiglu, or null for all that the model has",
            key="policy.fusions",
            value=shown(fusions),
        )


def check_spread(config: Config, grids: Mapping[str, ParallelDims]) -> None:
    """Rejects the deepep dispatcher if the experts of some model are not spread over ranks.

    Args:
        config: The settings.
        grids: Grids of policy, reference and critic, by the key of the layout.

    Raises:
        UserError: With the deepep dispatcher, a layout puts all experts on every rank.
    """
    for key, grid in grids.items() if config.policy.moe.dispatcher == "deepep" else ():
        if grid.expert * grid.expert_tensor == 1:
            raise UserError(
                f"{key}.expert = 1 and expert_tensor = 1 put all experts on every rank, so the dispatcher has no token "
                "to send",
                key="policy.moe.dispatcher",
                value="deepep",
                fix=f"give policy.moe.dispatcher=alltoall, or {key}.expert above 1",
            )
