"""The choice of a step's groups, compared with plain loops for random settings, and repeated after a resume."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from skyrl_mega.algorithms.filters import with_copies
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config, DynamicSamplingConfig, RolloutConfig
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.rollout_source import RolloutSource
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.trajectory import Group, Status, Trajectory
from tests.support.batches import make_batch, token_advantages

SAMPLES = 3
DYNAMIC = st.builds(
    DynamicSamplingConfig,
    enabled=st.just(True),
    mode=st.sampled_from(["filter", "replace"]),
    replace_from=st.sampled_from([0.0, 0.25, 0.3, 0.5, 1.0]),
    max_rounds=st.integers(1, 4),
    oversample=st.sampled_from([1.0, 1.1, 1.5, 3.0]),
    tolerance=st.sampled_from([0.0, 0.0, 0.5]),
    reward=st.sampled_from([None, "right"]),
)


def judged(seed: str, uid: int, sample: int, chance: float) -> tuple[float, float, Status]:
    """Returns a sample's reward, the part of the reward for a right answer, and the status."""
    random = Random(f"{seed}/{uid}/{sample}")
    status = random.choices([Status.COMPLETED, Status.TRUNCATED_TOKENS, Status.ERROR_ENV], [8, 1, 1])[0]
    right = float(random.random() < chance)
    return right + random.choice([0.0, 0.25]), right, status


@dataclass
class Plays:
    """A generator with rewards determined by the seed."""

    chance: float

    def generate(self, prompts: list[Prompt], samples: int, *, seed: str, **_: object) -> list[Group]:
        return [Group(p, [self.play(seed, p, i) for i in range(samples)]) for p in prompts]

    def play(self, seed: str, prompt: Prompt, sample: int) -> Trajectory:
        reward, right, status = judged(seed, prompt.uid, sample, self.chance)
        named = {} if status.failed else {"right": right}
        reward = 0.0 if status.failed else reward
        trajectory = Trajectory(
            prompt, sample, array("i", [5, 6]), array("b", [0, 1]), array("f", [0, -1]), 1, reward, status, 1
        )
        trajectory.rewards, trajectory.metadata = named, {"seed": seed}
        return trajectory


def config_of(dynamic: DynamicSamplingConfig, wanted: int) -> Config:
    config = Config()
    config.data.prompts_per_step, config.data.samples_per_prompt, config.run.seed = wanted, SAMPLES, 4
    config.algorithm.dynamic_sampling = dynamic
    return config


def source_of(config: Config, prompts: int, chance: float, *, shuffle: bool = False) -> RolloutSource:
    generator: Any = Plays(chance)
    stream = PromptStream(prompts, batch=config.data.prompts_per_step, shuffle=shuffle)
    return RolloutSource(config, [Prompt(i, [], "mine", {}) for i in range(prompts)], stream, generator)


def named(groups: list[Group]) -> list[tuple[str, int]]:
    """Returns (seed, uid) of each drawn group."""
    return [(group.trajectories[0].metadata["seed"], group.prompt.uid) for group in groups]


def reference(
    dynamic: DynamicSamplingConfig, wanted: int, prompts: int, chance: float
) -> tuple[list[tuple[str, int]], dict[str, float], int]:
    """Returns the first step's groups with a signal (without copies), the step's figures, and the number of drawn
    prompts."""
    at = rounds = out = 0
    chosen: list[tuple[str, int]] = []
    anything = False
    while rounds < dynamic.max_rounds:
        enough = wanted if dynamic.mode == "filter" else max(1.0, dynamic.replace_from * wanted)
        if len(chosen) >= enough:
            break
        missing = wanted - len(chosen)
        count = missing
        while count < dynamic.oversample * missing - 1e-6 and count < prompts - at:
            count += 1
        if missing > prompts - at:
            break
        seed = f"4/1/{rounds}"
        for uid in range(at, at + count):
            lowest = highest = None
            for i in range(SAMPLES):
                reward, right, status = judged(seed, uid, i, chance)
                if not status.failed:
                    anything = True
                    value = right if dynamic.reward else reward
                    lowest = value if lowest is None or value < lowest else lowest
                    highest = value if highest is None or value > highest else highest
            if lowest is not None and highest is not None and highest - lowest > dynamic.tolerance:
                chosen.append((seed, uid))
            else:
                out += 1
        at, rounds = at + count, rounds + 1
        if not anything:
            break
    figures = {"rounds": rounds, "groups_left_out": out, "groups_surplus": max(0, len(chosen) - wanted)}
    return chosen[:wanted], {name: float(value) for name, value in figures.items()}, at


@given(
    dynamic=DYNAMIC, wanted=st.integers(1, 5), prompts=st.integers(5, 30), chance=st.sampled_from([0.0, 0.02, 0.2, 0.5])
)
@examples(max_examples=150, deadline=None)
def test_a_step_has_what_plain_loops_choose(
    dynamic: DynamicSamplingConfig, wanted: int, prompts: int, chance: float
) -> None:
    source, step = source_of(config_of(dynamic, wanted), prompts, chance), Step(1, Console())
    groups = source.next_groups(step)
    expected, figures, drawn = reference(dynamic, wanted, prompts, chance)
    got = {name.removeprefix("rollout/"): value for name, value in step.metrics.items() if name.startswith("rollout/")}
    assert source.stream.position == drawn == len(step.trajectories) / SAMPLES
    assert {name: got.get(name, 0.0) for name in figures} == figures
    filled = dynamic.mode == "replace" and expected and len(expected) >= dynamic.replace_from * wanted
    if filled:
        assert len(groups) == wanted and got["groups_copied"] == wanted - len(expected)
        assert list(dict.fromkeys(named(groups))) == expected  # each group once, with copies next to their originals
        assert named(groups) == sorted(named(groups), key=expected.index)
    else:
        assert named(groups) == expected and not got.get("groups_copied")
    assert got["groups_missing"] == wanted - len(groups)
    assert ("groups_copied" in got) == (dynamic.mode == "replace")
    assert ("groups_surplus" in got) == (dynamic.oversample > 1)


@pytest.mark.parametrize(
    "dynamic",
    [
        DynamicSamplingConfig(enabled=True, max_rounds=3),
        DynamicSamplingConfig(enabled=True, max_rounds=3, oversample=1.7),
        DynamicSamplingConfig(enabled=True, mode="replace", oversample=1.2),
        DynamicSamplingConfig(enabled=True, mode="replace", replace_from=0.8),
    ],
)
def test_a_resumed_run_has_the_same_steps(dynamic: DynamicSamplingConfig) -> None:
    """Resumes from the position in the data alone, and expects the same steps."""
    config = config_of(dynamic, 6)

    def steps(source: RolloutSource, numbers: range) -> Iterator[list[tuple[str, int]]]:
        for number in numbers:
            yield named(source.next_groups(Step(number, Console())))

    whole = source_of(config, 600, 0.4, shuffle=True)
    done = list(steps(whole, range(1, 7)))
    state = json.loads(json.dumps(whole.stream.state()))
    after = list(steps(whole, range(7, 13)))
    resumed = source_of(config, 600, 0.4, shuffle=True)
    resumed.stream.restore(state)
    assert list(steps(resumed, range(7, 13))) == after
    assert all(after) and len({*map(tuple, done + after)}) == 12


def copied(source: RolloutSource, numbers: range) -> list[tuple[int, ...]]:
    """Returns, for each step, the position of each group among the step's distinct groups."""
    places_by_step = []
    for number in numbers:
        names = named(source.next_groups(Step(number, Console())))
        each = list(dict.fromkeys(names))
        places_by_step.append(tuple(each.index(name) for name in names))
    return places_by_step


def test_copies_are_drawn_anew_in_each_step_and_again_after_a_resume() -> None:
    """Copies groups in steps where two of four groups have a signal, for any prompts."""

    class Half(Plays):
        def play(self, seed: str, prompt: Prompt, sample: int) -> Trajectory:
            trajectory = super().play(seed, prompt, sample)
            trajectory.status, trajectory.reward = Status.COMPLETED, float(prompt.uid % 2 and sample == 0)
            return trajectory

    def source(run_seed: int) -> RolloutSource:
        config = config_of(DynamicSamplingConfig(enabled=True, mode="replace", replace_from=0.25, max_rounds=1), 8)
        config.run.seed = run_seed
        opened = source_of(config, 400, 0.0)
        opened.generator = Half(0.0)
        return opened

    whole = source(4)
    first = copied(whole, range(1, 7))
    resumed = source(4)
    resumed.stream.restore(json.loads(json.dumps(whole.stream.state())))
    after = copied(whole, range(7, 13))
    assert copied(resumed, range(7, 13)) == after
    every = first + after
    # Four groups fill eight places: two steps agree with probability 35 / 256 at most.
    assert all(set(places) == {0, 1, 2, 3} and len(places) == 8 for places in every)
    assert len(set(every)) >= 6, "a seed that the step has no part in gives every step the same"
    assert copied(source(5), range(1, 7)) != first, "the run's seed has no part in it"


@pytest.mark.parametrize("wanted", [4, 9])
def test_only_groups_with_a_signal_are_in_a_step_and_copied(wanted: int) -> None:
    """Draws many groups with few signals, and recomputes the signals from the rewards of samples that did not fail."""
    dynamic = DynamicSamplingConfig(enabled=True, mode="replace", replace_from=0.1, max_rounds=2)
    source = source_of(config_of(dynamic, wanted), 600, 0.03)
    copies = without = 0
    for number in range(1, 13):
        step = Step(number, Console())
        groups = source.next_groups(step)
        earned = [[t.reward for t in group.trajectories if not t.status.failed] for group in groups]
        assert all(min(rewards) != max(rewards) for rewards in earned)
        drawn = [step.trajectories[i : i + SAMPLES] for i in range(0, len(step.trajectories), SAMPLES)]
        differ = sum(len({t.reward for t in group if not t.status.failed}) > 1 for group in drawn)
        distinct = len(set(named(groups)))
        assert distinct == min(wanted, differ)
        assert len(groups) == (wanted if distinct else 0)
        assert step.metrics["rollout/groups_copied"] == len(groups) - distinct
        copies, without = copies + len(groups) - distinct, without + len(drawn) - differ
    assert copies > 5 and without > 10


def test_every_group_is_as_likely_to_be_copied() -> None:
    drawn: Counter[int] = Counter()
    for seed in range(500):
        places = with_copies(4, 10, [7, seed])
        assert len(places) == 10 and places == sorted(places) and set(places) == {0, 1, 2, 3}
        assert places == with_copies(4, 10, [7, seed])
        drawn.update(places)
    # 500 + Binomial(3000, 1/4) each, with standard deviation 24
    assert all(abs(count - 1250) < 5 * 24 for count in drawn.values())
    assert with_copies(3, 3, [1]) == [0, 1, 2]


def test_a_copy_has_its_originals_advantages() -> None:
    config = config_of(DynamicSamplingConfig(enabled=True, mode="replace", replace_from=0.0, max_rounds=9), 4)
    step = Step(1, Console())
    groups = source_of(config, 99, 0.1).next_groups(step)
    assert len(set(named(groups))) < len(groups) == 4
    batch = make_batch(groups, config.algorithm, RolloutConfig())
    halves = token_advantages(batch, config.algorithm).split(2 * SAMPLES)
    by_name: dict[tuple[str, int], Any] = {}
    for name, advantages in zip(named(groups), halves, strict=True):
        assert by_name.setdefault(name, advantages).equal(advantages)
        assert advantages.any()


def test_a_reward_that_an_environment_does_not_give_is_refused() -> None:
    config = config_of(DynamicSamplingConfig(enabled=True, reward="wrong"), 4)
    with pytest.raises(UserError, match=r"dynamic_sampling.reward = wrong: environment mine .* \(its rewards: right\)"):
        source_of(config, 9, 0.5).next_groups(Step(1, Console()))


def test_equal_sums_may_differ_in_the_reward_that_is_compared() -> None:
    class Trades:
        def generate(self, prompts: list[Prompt], samples: int, **_: object) -> list[Group]:
            groups = [Group(p, [Plays(0.0).play("", p, i) for i in range(samples)]) for p in prompts]
            for uid, group in enumerate(groups):
                for i, t in enumerate(group.trajectories):
                    t.status, t.reward = Status.COMPLETED, 1.0 if uid == 0 else float(i)
                    t.rewards = {"right": float(i == 0), "short": float(i > 0)} if uid == 0 else {"right": 1.0}
            return groups

    for reward, kept in (("right", [0]), (None, [1])):
        config = config_of(DynamicSamplingConfig(enabled=True, max_rounds=1, reward=reward), 2)
        source = source_of(config, 2, 0.0)
        source.generator = Trades()  # type: ignore[assignment]
        assert [group.prompt.uid for group in source.next_groups(Step(1, Console()))] == kept
