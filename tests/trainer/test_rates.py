"""What a completed step says of its speed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.config.schema import Config, LayoutConfig
from skyrl_mega.trainer.run import Run, Step


def rates(config: Config) -> tuple[float, float]:
    """Tokens a second, and those of one GPU, of a step of 12,000 tokens."""
    silent: Any = SimpleNamespace(step=lambda *_: None, write=lambda *_: None, state=dict)
    policy: Any = SimpleNamespace(parallel=SimpleNamespace(ranks=config.policy.ranks))
    nothing: Any = None
    run = Run(
        config=config, folder=nothing, console=silent, metrics=silent, policy=policy, reference=None, sync=nothing,
        sampler=nothing, evaluator=nothing, stream=silent, checkpoints=nothing, response_limit=1,
    )  # fmt: skip
    step = Step(1, silent, {"rollout/tokens": 12_000.0})
    run.complete(step)
    return step.metrics["perf/tokens_per_s"], step.metrics["perf/tokens_per_s_per_rank"]


@pytest.mark.parametrize(
    ("shared", "reference", "gpus"),
    [(True, False, 32), (False, False, 64), (True, True, 40)],
    ids=["shared GPUs count once", "GPUs of their own", "with a reference of its own"],
)
def test_the_rate_of_one_gpu(shared: bool, reference: bool, gpus: int) -> None:
    config = Config()
    config.cluster.nodes, config.cluster.shared = 4, shared
    config.policy.ranks = 32
    config.rollout.engines, config.rollout.tensor = 4, 4
    config.rollout.options = {"data_parallel_size": 2}
    if reference:
        config.reference.layout, config.reference.ranks = LayoutConfig(), 8
    total, one = rates(config)
    assert total / one == pytest.approx(gpus)
