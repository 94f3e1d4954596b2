"""The shape of a data row: the schema of SkyRL's users."""

from __future__ import annotations

from typing import Any

from skyrl_mega.envs.base import Message


def row(
    *, data_source: str, prompt: list[Message], env_class: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Returns a row of data: `data_source`, `prompt`, `env_class`, `reward_spec` with the method `rule`, and
    `extra_info`.

    Args:
        data_source: Name of the data set, for metrics.
        prompt: The messages for the policy.
        env_class: Registered name of the environment.
        ground_truth: Right answer, in the environment's form.
        extra_info: Further values for the environment.
    """
    return {
        "data_source": data_source,
        "prompt": prompt,
        "env_class": env_class,
        "reward_spec": {"method": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }
