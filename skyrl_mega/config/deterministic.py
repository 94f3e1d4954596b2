"""Requirements of `run.deterministic`, and checks for settings that contradict it."""

from __future__ import annotations

from dataclasses import replace

from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config, PolicyConfig

POLICY_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # otherwise cuBLAS shares a workspace between streams
    "NCCL_ALGO": "Ring",  # otherwise NCCL chooses by size and load
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # backward pass of Transformer Engine's attention
}
"""Environment variables of a policy rank on a GPU, set before start."""
ENGINE_ENVIRONMENT = {"VLLM_BATCH_INVARIANT": "1"}
"""Environment variables of an engine on a GPU."""
OPTION = "deterministic_mode"
"""megatron-core's option for deterministic computation."""


def policy_settings(config: Config) -> PolicyConfig:
    """Returns the policy's settings, with Megatron's deterministic option if the run is deterministic."""
    if not config.run.deterministic:
        return config.policy
    return replace(config.policy, options={OPTION: True, **config.policy.options})


def check_deterministic(config: Config) -> None:
    """Rejects a deterministic run with a time limit on trajectories, or with Megatron's deterministic mode turned off.

    Raises:
        UserError: A setting is rejected; names key, value, allowed values and fix.
    """
    if not config.run.deterministic:
        return
    limit = config.rollout.trajectory_timeout_s
    if limit is not None:
        raise UserError(
            "the clock would end trajectories, and run.deterministic=true allows null only",
            key="rollout.trajectory_timeout_s",
            value=f"{limit:g}",
            fix="leave it out, or give run.deterministic=false",
        )
    if config.policy.options.get(OPTION, True) is not True:
        raise UserError(
            "run.deterministic=true allows true only",
            key=f"policy.options.{OPTION}",
            value=config.policy.options[OPTION],
            fix="leave it out, or give run.deterministic=false",
        )
