"""What follows from the settings: defaults that depend on other keys."""

from __future__ import annotations

from skyrl_mega.config.schema import Config, RolloutConfig


def policy_ranks(config: Config) -> int:
    """Processes of the policy."""
    return config.policy.ranks or config.cluster.nodes * config.cluster.gpus_per_node


def reference_ranks(config: Config) -> int:
    """Processes of a reference with a layout of its own; 0 without one."""
    return (config.reference.ranks or policy_ranks(config)) if config.reference.layout else 0


def response_limit(rollout: RolloutConfig) -> int:
    """Tokens after the prompt at most."""
    return rollout.max_response_tokens or rollout.max_turns * rollout.sampling.max_tokens


def length_limit(rollout: RolloutConfig) -> int:
    """Tokens of a whole sequence at most."""
    return rollout.max_length or rollout.max_prompt_tokens + response_limit(rollout)
