"""Draft tokens: the choice of the cheaper way, the check of drafts on a CPU, and recorded routes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from skyrl_mega.config.schema import BuildConfig, Config, RolloutConfig
from skyrl_mega.config.schema.drafts import DraftsConfig
from skyrl_mega.engines.base import Drafts
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.cpu_drafts import expand
from skyrl_mega.engines.vllm.draft_counts import request_drafts
from skyrl_mega.engines.vllm.draft_weights import PREFIX, read_draft_weights
from skyrl_mega.engines.vllm.drafts import (
    HOLD,
    PROBE,
    SUPPRESSED,
    AdaptiveScheduler,
    AsyncCountingScheduler,
    CountingScheduler,
    Suppressor,
    Trial,
    Trials,
    draft_scheduler,
)
from skyrl_mega.engines.vllm.plugin import MAY_HOLD
from skyrl_mega.engines.vllm.replicas import Replicas
from skyrl_mega.engines.vllm.routes import TokenRoutes, _Request
from skyrl_mega.engines.vllm.spec import EngineSpec, arguments
from skyrl_mega.models import tiny
from skyrl_mega.trainer.measurements import Measurements
from skyrl_mega.trainer.meters import draft_metrics

# ---- drafts only where they save time --------------------------------------------------------------------------------


def run_steps(trial: Trial, steps: int, drafted: tuple[float, float], plain: tuple[float, float]) -> int:
    """Runs steps with these (seconds, tokens) of both ways; returns the number of steps with drafts."""
    with_drafts = 0
    for _ in range(steps):
        way = trial.drafting
        with_drafts += way
        trial.add(way, *(drafted if way else plain))
    return with_drafts


def test_the_cheaper_way_is_used_and_the_other_is_measured_again() -> None:
    """Runs drafts that double the time: with 1.5 tokens a step they cost more, with 3 tokens they save time."""
    trial = Trial()
    assert run_steps(trial, 2 * PROBE, (2.0, 1.5), (1.0, 1.0)) == PROBE and not trial.best
    assert run_steps(trial, HOLD, (2.0, 1.5), (1.0, 1.0)) == 0
    assert run_steps(trial, PROBE, (2.0, 3.0), (1.0, 1.0)) == PROBE and trial.best
    assert run_steps(trial, 10 * (HOLD + PROBE), (2.0, 3.0), (1.0, 1.0)) == 10 * HOLD


def test_a_step_after_a_pause_does_not_decide() -> None:
    trial = Trial()
    trial.add(True, 1000.0, 1.0)
    run_steps(trial, 2 * PROBE, (1.0, 2.0), (1.0, 1.0))
    assert trial.best


def test_only_steps_that_decode_the_same_sequences_are_measured() -> None:
    now = [0.0]
    trials = Trials(lambda: now[0])

    def step(names: str, decodes: bool, tokens: int) -> list[tuple[float, float]]:
        trials.begin(len(names))
        now[0] += 1
        trials.end(names, decodes, tokens)
        return [entry for trial in trials.by_range.values() for way in (True, False) for entry in trial.steps[way]]

    assert step("abc", False, 3) == step("abc", True, 3) == [], "a prompt was read in the step before"
    assert step("abc", True, 9) == [(1.0, 3.0)]
    assert step("abcd", False, 4) == [(1.0, 3.0)], "a request began"
    assert step("abcd", True, 4) == [(1.0, 3.0)] and step("ab", True, 3) == [(1.0, 3.0), (1.0, 1.5)]


def test_a_worker_proposes_nothing_in_a_suppressed_step() -> None:
    runner: Any = SimpleNamespace(speculative_config=SimpleNamespace(method="ngram"))
    runner.execute_model = lambda scheduled: scheduled
    runner.drafter = SimpleNamespace(propose=lambda k, sampled, **_: [[1] * k for _ in sampled])
    suppressor = Suppressor(runner)
    scheduled = SimpleNamespace(total_num_scheduled_tokens=2)
    runner.execute_model(scheduled)
    assert runner.drafter.propose(2, [[5], [6]], slot_mappings=None) == [[1, 1], [1, 1]]
    setattr(scheduled, SUPPRESSED, True)
    runner.execute_model(scheduled)
    assert runner.drafter.propose(2, [[5], [6]], slot_mappings=None) == [[], []]
    assert suppressor.take() == (2, 1) and suppressor.take() == (0, 0)


# ---- counts of a request ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AdaptiveScheduler, AsyncCountingScheduler])
def test_a_request_that_its_caller_ends_has_counts_of_drafts(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string is found by the caller: every step of the request must carry the counts so far."""
    outputs = [SimpleNamespace(request_id=name, spec_decode_metrics=None) for name in ("stops", "held", "ended")]
    monkeypatch.setattr(Scheduler, "update_from_output", lambda *_: {0: SimpleNamespace(outputs=outputs)})
    scheduler: Any = object.__new__(kind)
    scheduler.trials = None
    scheduler.requests = {
        name: SimpleNamespace(spec_decode_metrics=name, sampling_params=SimpleNamespace(extra_args=extra))
        for name, extra in (("stops", None), ("held", {MAY_HOLD: True}))
    }
    scheduler.update_from_output(None, None)
    assert [output.spec_decode_metrics for output in outputs] == ["stops", None, None]


def test_a_gpu_engine_with_drafts_has_a_scheduler_that_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.hf_config(BuildConfig("qwen3_moe"))))
    drafts = DraftsConfig(method="eagle", path="head")
    spec = EngineSpec(str(tmp_path), "bfloat16", "cuda", RolloutConfig(drafts=drafts), 100)
    assert resolve_obj_by_qualname(arguments(spec)["scheduler_cls"]) is draft_scheduler
    for kind in (AdaptiveScheduler, AsyncCountingScheduler):
        monkeypatch.setattr(kind, "__init__", lambda self, **_: None)
    for asynchronous, kind in ((False, AdaptiveScheduler), (True, AsyncCountingScheduler)):
        config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=asynchronous))
        assert type(draft_scheduler(config)) is kind
    on_cpu = arguments(replace(spec, device="cpu"))["scheduler_cls"]
    assert issubclass(resolve_obj_by_qualname(on_cpu), CountingScheduler)


def test_accepted_drafts_behind_the_end_of_an_answer_do_not_count() -> None:
    """Steps with 3, 3 and 4 accepted drafts give 1 + 4 + 4 + 5 tokens; the answer ends after 10 of these."""
    metrics = RequestSpecDecodeMetrics(4, [0, 0, 0, 2, 1], 12)
    assert request_drafts(14, metrics) == Drafts(14, 12, 10)
    assert request_drafts(10, metrics) == Drafts(10, 12, 6), "four steps"
    assert request_drafts(0, None) == Drafts() and request_drafts(3, None) == Drafts(3)


@pytest.mark.parametrize("tensor", [1, 2])
def test_suppressed_steps_of_all_replicas_count_once(tensor: int) -> None:
    async def workers(method: str) -> list[tuple[int, int]]:
        return [(10, 4)] * tensor + [(30, 0)] * tensor

    engine: Any = VllmEngine.__new__(VllmEngine)
    engine.spec = EngineSpec("", "float32", "cpu", RolloutConfig(drafts=DraftsConfig(method="ngram"), tensor=tensor), 9)
    engine.drafted, engine.replicas, engine.workers = Drafts(written=5), Replicas(2), workers
    assert asyncio.run(engine.drafts()) == Drafts(written=5, steps=40, suppressed=4)
    assert engine.drafted == Drafts()


# ---- checking drafts -------------------------------------------------------------------------------------------------


def test_numbers_of_sequences_are_repeated_for_their_drafts() -> None:
    """Compares with vLLM's example; fractions stay, and 0 (greedy) becomes 1."""
    values, ends = torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 5, 6], dtype=torch.int32)
    assert expand(values, ends, 6, 0, 1).tolist() == pytest.approx([0.7, 0.7, 1, 1, 1, 1.3])
    assert expand(torch.tensor([3, 4]), torch.tensor([0, 2], dtype=torch.int32), 2).tolist() == [4, 4]


def test_vllm_still_needs_the_repair_of_its_cpu_kernel() -> None:
    """Fails when vLLM repeats fractions itself: the repair can then go."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    repeated = torch.full((2,), 9.0)
    _expand_kernel_impl(repeated, torch.tensor([0.7]), torch.tensor([2], dtype=torch.int32), 0, 1)
    assert repeated.tolist() == [9, 9]


# ---- routes ----------------------------------------------------------------------------------------------------------


def routes_of(tokens: list[int], version: int) -> TokenRoutes:
    numbers = np.array(tokens, np.int32)
    return TokenRoutes(numbers[:, None, None], numbers, np.full(len(tokens), version, np.int32))


def test_routes_of_rejected_drafts_are_replaced_and_of_preempted_tokens_kept() -> None:
    request = _Request([routes_of([1, 2, 3], 0), routes_of([4, 8, 9], 0)], 6)
    request.cut_rejected(4, routes_of([5, 9], 1))
    assert request.known == 4 and request.parts[0].tokens.tolist() == [1, 2, 3, 4]
    request.cut_rejected(0, routes_of([1, 2, 3, 4], 1))
    assert request.known == 4 and request.parts[0].versions.tolist() == [0] * 4, "as when they were sampled"
    request.cut_rejected(2, routes_of([3], 1))
    assert request.known == 4, "the rest is not read yet"


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_acceptance_of_all_engines() -> None:
    counts = [Drafts(60, 40, 10, 20, 5), Drafts(40, 20, 20, 20, 15)]
    assert draft_metrics(counts) == {
        "drafts/drafted": 60,
        "drafts/accepted": 30,
        "drafts/tokens_per_step": 100 / 70,
        "drafts/acceptance": 0.5,
        "drafts/suppressed": 0.5,
    }
    assert draft_metrics([Drafts(written=7)]) == {
        "drafts/drafted": 0,
        "drafts/accepted": 0,
        "drafts/tokens_per_step": 1,
    }
    assert draft_metrics([]) == draft_metrics([Drafts()]) == {}


def test_a_change_is_said_once() -> None:
    measurements = Measurements(Config(), None, None, None)  # type: ignore[arg-type]
    lines = [
        measurements.draft_change(SimpleNamespace(number=number, metrics=metrics))  # type: ignore[arg-type]
        for number, metrics in enumerate([{}, *({"drafts/suppressed": share} for share in (0.1, 0.8, 0.9, 0.2))])
    ]
    assert [line is not None for line in lines] == [False, False, True, False, True]
    assert str(lines[2]) == (
        "Step 2: 80% of the engines' steps were without draft tokens, which cost more time than they save "
        "(rollout.drafts.adaptive)"
    )


# ---- weights of a draft model ----------------------------------------------------------------------------------------


def test_only_a_draft_model_is_read_from_files_in_an_engine_of_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    loaders: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(BaseModelLoader, "load_model", lambda self, *_: loaders.append(type(self).__name__))
        patch.setattr(DummyModelLoader, "load_model", BaseModelLoader.load_model)
        read_draft_weights()
        read_draft_weights()
        random, files = LoadConfig(load_format="dummy"), LoadConfig(load_format="auto")
        for draft_load_config in (files, None):
            settings = SimpleNamespace(
                load_config=random, speculative_config=SimpleNamespace(draft_load_config=draft_load_config)
            )
            for prefix in ("", PREFIX):
                DummyModelLoader(random).load_model(settings, None, prefix)
    assert loaders == ["DummyModelLoader", "DefaultModelLoader", "DummyModelLoader", "DummyModelLoader"]
