"""A repair of vLLM 0.32's router on a CPU: sigmoid scores without groups of experts (MiniMax-M2)."""

from __future__ import annotations

from functools import wraps
from typing import Any


def allow_sigmoid_without_groups() -> None:
    """Makes the CPU router compute sigmoid scores over a single group of experts, which is the same function.

    Without groups the router supports softmax scores only, and fails at the first token. Call this before the model is
    built: only routers created later are changed. May be called again in the same process.
    """
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    initialise = CPURouter.__init__
    if hasattr(initialise, "__wrapped__"):
        return

    @wraps(initialise)
    def with_one_group(router: Any, *args: Any, **kwargs: Any) -> None:
        initialise(router, *args, **kwargs)
        if router.scoring_func == "sigmoid" and not router.use_grouped_topk:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    CPURouter.__init__ = with_one_group
