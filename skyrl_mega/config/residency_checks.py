"""Checks of `residency`."""

from __future__ import annotations

from skyrl_mega.config.derived import has_critic
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.lists import check_unique
from skyrl_mega.config.residency import CRITIC, ENGINE, kept
from skyrl_mega.config.schema import Config
from skyrl_mega.config.values import shown

SLEEP_ARGUMENTS = {
    "enable_sleep_mode": "residency.keep, without the parts that sleep",
    "enable_cumem_allocator": "residency.keep, without the parts that sleep",
    "sleep_mode_backend": None,
    "sleep_mode_offload_cudagraph": None,
    "sleep_preserve_parameter_names": None,
}
"""vLLM arguments for sleep mode → the setting to use instead (None: no such setting)."""
INCOMPATIBLE_ARGUMENTS = {
    "speculative_config": "no weight sync brings the weights of a draft model",
    "enable_lora": "no weight sync brings adapters",
    "kv_transfer_config": "a connector has memory of its own for the cache",
    "kv_offloading_size": "a connector has memory of its own for the cache",
    "cpu_offload_gb": "vLLM keeps weights in host memory itself",
    "offload_group_size": "vLLM keeps weights in host memory itself",
}
"""vLLM arguments that rule out dropping engine weights or KV cache → reason."""


def check_residency(c: Config) -> None:
    """Checks the parts in `residency.keep` and the offloading.

    Raises:
        UserError: A part is given twice, `critic` is given without a critic, or a part to offload cannot leave the
            device.
    """
    check_unique("residency.keep", c.residency.keep or ())
    if "critic" in (c.residency.keep or ()) and not has_critic(c):
        raise UserError(
            f"algorithm.advantage={c.algorithm.advantage} has no critic",
            key="residency.keep",
            value=shown(c.residency.keep),
            fix="leave critic out, or give algorithm.advantage=gae",
        )
    if c.policy.optimizer.streamed and "optimizer" in (c.residency.keep or ()):
        raise UserError(
            "policy.optimizer.streamed=true has the optimizer's state in host memory in every phase",
            key="residency.keep",
            value=shown(c.residency.keep),
            fix="leave optimizer out, or give policy.optimizer.streamed=false",
        )
    dropped = [part for part in ENGINE if part not in kept(c.residency.keep)]
    for name, why in INCOMPATIBLE_ARGUMENTS.items() if dropped else ():
        if c.rollout.options.get(name):
            raise UserError(
                f"{why}, so an engine with it cannot drop {' and '.join(dropped)}",
                key=f"rollout.options.{name}",
                fix="leave it out, or let residency.keep have engine_weights and kv_cache",
            )
    buffers = ("parameters", "gradients", *CRITIC[: has_critic(c)])
    moved = [part for part in buffers if part not in kept(c.residency.keep)]
    if moved and c.policy.ddp_options.get("nccl_ub"):
        raise UserError(
            f"NCCL keeps the addresses of buffers, so {' and '.join(moved)} cannot leave the device",
            key="policy.ddp_options.nccl_ub",
            fix=f"leave it out, or let residency.keep have {', '.join(buffers)}",
        )
