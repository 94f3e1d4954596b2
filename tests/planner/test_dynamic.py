"""Prompts and costs of dynamic sampling, by the planner's assumption."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyrl_mega.cli import dry_run_notes, suggest_text
from skyrl_mega.config.schema import Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import dynamic
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.times import generate_time, step_time
from skyrl_mega.planner.trajectories import assumed
from tests.weights.grids import MODELS


def settings(**sampling: object) -> Config:
    config = Config()
    config.cluster.device = "cuda"
    config.data.prompts_per_step, config.data.samples_per_prompt = 512, 4
    for name, value in sampling.items():
        setattr(config.algorithm.dynamic_sampling, name, value)
    return config


@pytest.mark.parametrize(
    "sampling, drawn",
    [
        ({}, [512]),
        ({"enabled": True}, [512, 256, 128, 64, 32, 16, 8, 4, 2, 1]),
        ({"enabled": True, "max_rounds": 2}, [512, 256]),
        ({"enabled": True, "oversample": 3.0}, [1536]),
        ({"enabled": True, "oversample": 1.5}, [768, 192, 48, 12, 3]),
        ({"enabled": True, "mode": "replace", "replace_from": 0.3}, [512]),
        ({"enabled": True, "mode": "replace", "replace_from": 0.6}, [512, 256]),
    ],
)
def test_prompts_of_each_round(sampling: dict[str, object], drawn: list[int]) -> None:
    assert dynamic.rounds(settings(**sampling)) == drawn


def test_groups_that_are_generated_all_the_time_have_no_rounds() -> None:
    config = settings(enabled=True)
    config.asynchrony.mode = "full"
    assert dynamic.rounds(config) == [1024]


@pytest.mark.parametrize(
    "sampling, signal, groups",
    [
        ({}, 0.1, 512),
        ({"enabled": True}, 0.5, 512),
        ({"enabled": True, "max_rounds": 2}, 0.5, 256 + 128),
        ({"enabled": True, "max_rounds": 1}, 0.1, 51),
        ({"enabled": True, "max_rounds": 1, "mode": "replace", "replace_from": 0.3}, 0.1, 512),
    ],
)
def test_a_step_trains_on_the_groups_that_the_rounds_find(
    sampling: dict[str, object], signal: float, groups: int
) -> None:
    config = settings(**sampling)
    assert dynamic.trained(config, signal) == groups
    hf, parallel = MODELS["qwen3_moe_mixed"], ParallelDims(8, expert=4)
    d = architecture(hf).describe(hf)
    whole, given = step_time(settings(), d, parallel), replace(assumed(config, parallel), signal=signal)
    assert step_time(config, d, parallel, 0.0, given).train == pytest.approx(whole.train * groups / 512)


def test_seconds_of_a_step_have_the_prompts_that_the_filter_needs() -> None:
    hf, parallel = MODELS["qwen3_moe_mixed"], ParallelDims(8, expert=4)
    d = architecture(hf).describe(hf)
    off, on, three = settings(), settings(enabled=True), settings(enabled=True, oversample=3.0)
    seconds = [step_time(config, d, parallel) for config in (off, on, three)]
    assert (
        len({suggestions.step for suggestions in seconds}) == 3
        and len({suggestions.train for suggestions in seconds}) == 1
    )
    generating = [generate_time(config, d, batch(config, parallel)) for config in (off, on, three)]  # of --suggest
    assert generating == [suggestions.generate for suggestions in seconds] and generating[0] < min(generating[1:])


def test_the_assumption_is_stated_by_the_dry_run_and_by_suggest() -> None:
    hf, parallel = MODELS["qwen3_moe_mixed"], ParallelDims(8, expert=4)
    d = architecture(hf).describe(hf)
    line = "50% of the groups have a signal, so that a step draws 1,536 prompts in 1 round and trains on 512 at most"
    for config, count in ((settings(), 0), (settings(enabled=True, oversample=3.0), 1)):
        for notes in (dry_run_notes.notes(config, d, parallel), suggest_text.notes(config)):
            assert sum(line in note for note in notes) == count
