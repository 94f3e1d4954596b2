"""What `run.deterministic` asks of the parts of a run, and where it cannot hold."""

from __future__ import annotations

from dataclasses import replace

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config, PolicyConfig

POLICY_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else cuBLAS shares a workspace between streams
    "NCCL_ALGO": "Ring",  # else NCCL chooses by size and load
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine's attention, backward
}
"""Variables of a policy rank on a GPU, set before it starts."""
ENGINE_ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1"}
"""Variables of an engine on a GPU."""
OPTION = "deterministic_mode"
"""Megatron's own."""


def policy_of(config: Config) -> PolicyConfig:
    """The policy's settings, with Megatron's own option where the run is deterministic."""
    if not config.run.deterministic:
        return config.policy
    return replace(config.policy, options={OPTION: True, **config.policy.options})


def check_deterministic(config: Config) -> None:
    """Refuses a deterministic run with what depends on the clock, or turns it off again.

    Raises:
        UserError: key, value, what is allowed, the fix.
    """
    if not config.run.deterministic:
        return
    limit = config.rollout.trajectory_timeout_s
    if limit is not None:
        raise UserError(
            f"rollout.trajectory_timeout_s = {limit:g}: the clock would end trajectories, and run.deterministic=true "
            "allows null only; leave it out, or give run.deterministic=false"
        )
    if config.policy.options.get(OPTION, True) is not True:
        raise UserError(
            f"policy.options.{OPTION} = {config.policy.options[OPTION]}: run.deterministic=true allows true only; "
            "leave it out, or give run.deterministic=false"
        )
