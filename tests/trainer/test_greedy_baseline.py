"""ReMax's greedy answers: drawn once per trained prompt, and used only in the baseline."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_mega.config.schema import Config, DynamicSamplingConfig, RolloutConfig, SamplingConfig
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.records import Records
from skyrl_mega.trainer.rollout_source import RolloutSource
from skyrl_mega.trainer.run import Run, rollout_metrics
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import GREEDY, Group, Status, Trajectory
from tests.support.batches import make_batch, mini_batches, token_advantages

WANTED, SAMPLES = 4, 3


class Plays:
    """A generator: greedy answers earn 0.75 except for prompt 2, whose environment fails; samples earn 0 or 1, and
    prompt 1's samples all earn 1."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int, float, str]] = []

    def generate(
        self, prompts: list[Prompt], samples: int, sampling: SamplingConfig, *, seed: str, **_: object
    ) -> list[Group]:
        self.calls.append(([p.uid for p in prompts], samples, sampling.temperature, seed))
        return [Group(p, [self.play(p, i, sampling) for i in range(samples)]) for p in prompts]

    def play(self, prompt: Prompt, sample: int, sampling: SamplingConfig) -> Trajectory:
        greedy = sampling.temperature == 0
        status = Status.ERROR_ENV if greedy and prompt.uid == 2 else Status.COMPLETED
        reward = 0.75 if greedy else 1.0 if prompt.uid == 1 else float(sample == 0)
        reward = 0.0 if status.failed else reward
        length = 9 if greedy else 2
        mask, logprobs = array("b", [0] + [1] * length), array("f", [0.0] + [-1.0] * length)
        tokens = array("i", range(length + 1))
        return Trajectory(prompt, sample, tokens, mask, logprobs, 1, reward, status, 1)


def played(dynamic: DynamicSamplingConfig, advantage: str = "remax") -> tuple[list[Group], Step, Plays, Config]:
    config = Config()
    config.data.prompts_per_step, config.data.samples_per_prompt, config.run.seed = WANTED, SAMPLES, 7
    config.algorithm.advantage, config.algorithm.dynamic_sampling = advantage, dynamic
    generator, step = Plays(), Step(3, Console())
    source: Any = RolloutSource(
        config,
        [Prompt(i, [], "m", {}) for i in range(9)],
        PromptStream(9, batch=4, shuffle=False),
        generator,  # type: ignore[arg-type]
    )
    return source.next_groups(step), step, generator, config


def test_each_prompt_has_one_greedy_answer_that_nothing_learns_from() -> None:
    groups, step, generator, config = played(DynamicSamplingConfig())
    assert generator.calls == [([0, 1, 2, 3], SAMPLES, 1.0, "7/3/0"), ([0, 1, 2, 3], 1, 0.0, "7/3/greedy")]
    assert len(step.trajectories) == WANTED * SAMPLES and [t.sample for t in step.greedy] == [GREEDY] * WANTED
    batch = make_batch(groups, config.algorithm, RolloutConfig())
    assert batch.groups.tolist() == [SAMPLES] * WANTED and len(batch.tokens.tokens) == WANTED * SAMPLES * 3
    batch.tokens["advantages"] = token_advantages(batch, config.algorithm)
    expected = []
    for group in groups:
        for t in group.trajectories:
            failed = group.prompt.uid == 2
            expected += [0.0 if failed else t.reward - 0.75] * 3
    torch.testing.assert_close(batch.tokens["advantages"], torch.tensor(expected), rtol=0, atol=1e-7)
    (mini,) = mini_batches(batch, None, config.algorithm)
    assert (mini["weights"] != 0).sum() == WANTED * SAMPLES * 2
    assert step.metrics["reward/greedy"] == 0.75 and step.metrics["rollout/greedy_tokens"] == 4 * 9
    assert step.metrics["rollout/groups_without_baseline"] == 1
    assert rollout_metrics(step.trajectories)["rollout/tokens"] == WANTED * SAMPLES * 2


def test_it_is_drawn_for_the_groups_that_are_chosen_alone() -> None:
    """Leaves out prompt 1, which lacks a signal, and gives a copied group the original's greedy answer."""
    groups, step, generator, _ = played(DynamicSamplingConfig(enabled=True))
    assert [group.prompt.uid for group in groups] == [0, 2, 3, 4]
    assert generator.calls[-1] == ([0, 2, 3, 4], 1, 0.0, "7/3/greedy") and len(generator.calls) == 3
    assert step.metrics["rollout/groups_left_out"] == 1

    groups, step, generator, _ = played(DynamicSamplingConfig(enabled=True, mode="replace"))
    assert [call[:3] for call in generator.calls] == [([0, 1, 2, 3], SAMPLES, 1.0), ([0, 2, 3], 1, 0.0)]
    assert len(groups) == WANTED and len(step.greedy) == 3 and all(group.greedy for group in groups)


def test_other_estimators_draw_none() -> None:
    groups, step, generator, _ = played(DynamicSamplingConfig(), "grpo")
    assert len(generator.calls) == 1 and not step.greedy and not any(group.greedy for group in groups)
    assert not any("greedy" in name for name in step.metrics)


def test_its_length_is_punished_as_the_samples_are() -> None:
    groups, _, _, config = played(DynamicSamplingConfig())
    config.algorithm.overlong.buffer = 5
    batch = make_batch(groups, config.algorithm, RolloutConfig(max_response_tokens=10))
    # 9 of 10 tokens: the last 5 tokens of the limit cost a fifth each, and 4 of these are used.
    assert batch.greedy[[0, 1, 3]].tolist() == pytest.approx([0.75 - 0.8] * 3) and batch.greedy[2].isnan()
    assert batch.rewards.max() == 1.0


def test_files_of_trajectories_mark_it(tmp_path: Path) -> None:
    _, step, _, config = played(DynamicSamplingConfig())
    config.telemetry.tracked_trajectories = 0
    (tmp_path / "trajectories").mkdir()
    run: Any = SimpleNamespace(config=config, folder=tmp_path, records=Records())
    Run.record_rollouts(run, step)
    run.records.wait()
    kept = parquet.read(tmp_path / "trajectories" / "step_000003.parquet")
    assert [t.sample for t in kept] == [*range(SAMPLES)] * WANTED + [GREEDY] * WANTED
    assert [t.prompt.uid for t in kept[-WANTED:]] == [0, 1, 2, 3] and kept[-1].reward == 0.75
    assert step.metrics["reward/mean"] == pytest.approx((3 * 1 + 3) / 12)
