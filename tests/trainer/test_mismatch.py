"""A planted mismatch between engine and policy raises the alarm and ends the run in the same step."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.algorithms.mismatch import mismatch
from skyrl_mega.config.schema import BuildConfig, Config
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.megatron import objectives
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.telemetry.trackers.trackers import open_trackers
from skyrl_mega.trainer.health.mismatch import EngineDiffers, end_if_too_far, threshold
from skyrl_mega.trainer.health.watch import Health
from skyrl_mega.trainer.loop import take_step
from skyrl_mega.trainer.run import Run
from skyrl_mega.trajectories.sequences import Sequences
from skyrl_mega.trajectories.trajectory import Group
from tests.megatron import layouts
from tests.support.ranks import run_ranks
from tests.trainer.unmeasured import unmeasured


def drawn_from(path: Path) -> Sequences:
    """Returns sequences with an engine's log-probs under these weights, computed by a policy in float32."""
    batch = layouts.some_batch(100)
    values = layouts.policy_logprobs(path, batch)
    batch["rollout_logprobs"] = torch.from_numpy(values.astype(np.float32))
    batch["advantages"] = torch.ones(len(batch.tokens))
    return batch


def measured(rank: int, address: str, path: Path, parallel: ParallelDims, batch: Sequences) -> dict[str, float]:
    opened = layouts.open_rank(rank, address, path, parallel, layouts.policy_config())
    _, micros = layouts.deal(batch, opened)
    return opened.measure(micros, objectives.objective("ppo", Config().algorithm))


def test_an_engine_with_other_weights_is_noticed_in_its_step(tmp_path: Path) -> None:
    """Measures the mismatch as in a run, with an engine of the policy's weights and then of another seed."""
    build(BuildConfig(), tmp_path / "policy", seed=4)
    build(BuildConfig(), tmp_path / "other", seed=5)
    config = Config()
    config.model.dtype = "float32"
    figures = {}
    for engine in ("policy", "other"):
        batch = drawn_from(tmp_path / engine)
        sums = run_ranks(2, measured, tmp_path / "policy", layouts.layout(2), batch)
        figures[engine] = mismatch([max(sums, key=len)])
    assert figures["policy"]["mismatch/logprob_abs_p99"] < 1e-5
    for engine, kinds in (("policy", set()), ("other", {"health/mismatch_high"})):
        verdict = Health(config).check(1, figures[engine], [])
        assert {name for name in verdict.metrics if "mismatch" in name} == kinds
        assert len(verdict.lines) == len(kinds)
    config.health.mismatch.stop_p99 = 0.1
    end_if_too_far(config, 1, figures["policy"])
    with pytest.raises(EngineDiffers, match=r"step 1: .* at the 99th percentile \(stop from 0\.100, "):
        end_if_too_far(config, 1, figures["other"])


def run_of(config: Config, folder: Path, trained: dict[str, float], calls: list[str]) -> Run:
    """Returns a run with these training figures; syncs and saves are recorded in `calls`."""

    def note(name: str) -> Any:
        return lambda *_, **__: calls.append(name) or {}

    run = Run(
        config=config,
        folder=folder,
        console=Console(),
        trackers=open_trackers(config, folder, print).__enter__(),
        policy=SimpleNamespace(save=None),
        reference=None,
        critic=None,
        sync=SimpleNamespace(sync=note("sync")),
        rollouts=SimpleNamespace(
            next_groups=lambda step: [Group(Prompt(0, [], "e", {}), [])],
            before_sync=lambda step: None,
            synced=lambda version: None,
            prompts_left=lambda done: 9**9,
        ),
        evaluator=None,
        stream=SimpleNamespace(state=dict),
        checkpoints=SimpleNamespace(save=note("save")),
        measurements=unmeasured(),
    )  # type: ignore[arg-type]
    run.record_rollouts = lambda step: None  # type: ignore[method-assign]
    return run


@pytest.mark.parametrize("figure", [1.5, math.nan])
def test_the_run_ends_before_its_weights_go_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: float
) -> None:
    config, calls = Config(), list[str]()
    config.evaluation.every, config.checkpoint.every, config.telemetry.trackers = 0, 1, []
    mean = [0.001]
    monkeypatch.setattr(
        "skyrl_mega.trainer.loop.train_on",
        lambda run, step, groups: step.record({"mismatch/logprob_abs_mean": mean[0]}),
    )
    run = run_of(config, tmp_path, {}, calls)
    take_step(run)
    assert calls == ["sync", "save"]
    mean[0] = figure
    with pytest.raises(EngineDiffers, match=r"step 2: .* in the mean"):
        take_step(run)
    assert calls == ["sync", "save"]
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["health/mismatch_high"] == 1, "the row is written"


def test_bounds_follow_the_engines_precision_and_what_it_draws_from() -> None:
    config = Config()
    assert [threshold(config, "alarm", of) for of in ("mean", "p99")] == [0.05, 0.5]
    assert [threshold(config, "stop", of) for of in ("mean", "p99")] == [1.0, math.inf]
    config.rollout.options["quantization"] = "fp8_per_block"
    assert threshold(config, "alarm", "mean") == 0.1
    config.rollout.options.clear()
    config.model.dtype = "float32"
    assert threshold(config, "alarm", "mean") == 0.01
    config.rollout.sampling.top_p = 0.5
    assert threshold(config, "alarm", "mean") == pytest.approx(0.01 + math.log(2))
    assert threshold(config, "stop", "mean") == pytest.approx(1 + math.log(2))
    config.rollout.sampling.top_k = 5
    assert threshold(config, "alarm", "mean") == threshold(config, "stop", "mean") == math.inf
    config.health.mismatch.alarm_mean, config.health.mismatch.stop_mean = 0.2, 0.0
    assert (threshold(config, "alarm", "mean"), threshold(config, "stop", "mean")) == (0.2, math.inf)
