"""Settings that one might look for where there are none, and what there is instead."""

from __future__ import annotations

from collections.abc import Mapping

_STEPS = "telemetry.profile.steps lists the steps that are recorded, and none is recorded without"
_GATHERED = "parameters stay in model.dtype, and are gathered so (docs/precision.md)"
_AHEAD = "asynchrony.mode is one_step or full where engines generate while the policy trains (docs/asynchrony.md)"
_AGE = "asynchrony.max_staleness, with asynchrony.mode=full, counts syncs (docs/asynchrony.md)"

MEANT: Mapping[str, str] = {
    "telemetry.profile.enabled": _STEPS,
    "telemetry.profile.enable": _STEPS,
    "policy.precision.enabled": "policy.precision.recipe says what is multiplied, and model is no FP8",
    "policy.precision.param_gather": _GATHERED,
    "policy.precision.fp8_param_gather": _GATHERED,
    "policy.precision.fp8_param": _GATHERED,
    "grpo.async_grpo.enabled": _AHEAD,
    "grpo.async_grpo.max_trajectory_age_steps": _AGE,
    "rollout.max_head_offpolicyness": _AGE,
    "max_off_policy_steps": _AGE,
    "orchestrator.max_off_policy_steps": _AGE,
    "residency.enabled": "residency.keep lists what stays: [] has all take turns, null none",
    "residency.offload": "residency.keep lists what stays: [] has all take turns, null none",
}
