"""vLLM finds this through the entry point `vllm.general_plugins` and calls it in each of its processes."""

from __future__ import annotations

BACKEND = "skyrl_mega"
"""Name of our weight-transfer backend in vLLM's `WeightTransferConfig`."""
MAY_HOLD = "skyrl_mega_may_hold"
"""In the `extra_args` of a request's sampling parameters: its tokens may wait for one another (`scheduler`)."""


def register() -> None:
    """Makes our weight-transfer engine known to vLLM. vLLM may call it more than once in a process."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "skyrl_mega.engines.vllm.transfer", "ShardTransferEngine")
