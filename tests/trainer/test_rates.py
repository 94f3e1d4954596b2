"""Metrics of a completed step: tokens per second, and sandboxed programs ended for memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.config.schema import Config, LayoutConfig
from skyrl_mega.envs.sandbox import budget
from skyrl_mega.trainer.run import Run, Step
from tests.trainer.unmeasured import unmeasured

SILENT: Any = SimpleNamespace(
    step=lambda *_: None, log=lambda *_: None, write=lambda *_: None, say=lambda *_: None, state=dict
)


def run_of(config: Config) -> Run:
    """Returns a run able only to complete steps."""
    policy: Any = SimpleNamespace(parallel=SimpleNamespace(ranks=config.policy.ranks))
    nothing: Any = None
    return Run(
        config=config, folder=nothing, console=SILENT, trackers=SILENT, policy=policy, reference=None, critic=None,
        sync=nothing, rollouts=nothing, evaluator=nothing, stream=SILENT, checkpoints=nothing,
        measurements=unmeasured(),
    )  # fmt: skip


def rates(config: Config) -> tuple[float, float]:
    """Returns tokens per second, in total and per GPU, of a step of 12,000 tokens."""
    step = Step(1, SILENT, {"rollout/tokens": 12_000.0})
    run_of(config).complete(step)
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


def test_programs_that_were_ended_for_memory_are_a_figure_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config()
    config.policy.ranks = 1
    run, figures = run_of(config), []
    for number, so_far in enumerate((None, 0, 2, 5, 5), start=1):  # None: the run used no sandbox
        monkeypatch.setattr(budget, "ended", lambda so_far=so_far: so_far)
        run.complete(step := Step(number, SILENT))
        figures.append((step.metrics.get("environment/ended_for_memory"), step.metrics.get("health/ended_for_memory")))
    assert figures == [(None, None), (0, None), (2, 1), (3, 1), (0, None)]
