"""The token inputs of an estimator, compared with a walk through the trajectories, and the placement of the
advantages."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
import torch

from skyrl_mega.algorithms.advantages import AdvantageInputs, TokenInputs, advantages, per_token
from skyrl_mega.batch.make_batch import Batch
from skyrl_mega.batch.rewards import UNNAMED
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import AlgorithmConfig, OverlongConfig, RolloutConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.trajectories.trajectory import Group, Kind, Status, Trajectory, TrajectoryStep
from tests.support.batches import make_batch, token_advantages

OWN = """
from skyrl_mega.algorithms.advantages import per_token

seen = []

@per_token("old_logprobs")
def mine(inputs, algorithm):
    seen.append(inputs)
    return inputs.token.old_T

@per_token()
def short(inputs, algorithm):
    return inputs.token.rewards_T[1:]
"""


def played(rng: random.Random, number: int, sample: int, rewrites: bool) -> Trajectory:
    """Returns a trajectory of up to four answers, some empty, with observations between; each token equals its
    position."""
    prompt = Prompt(number, [], "mine", {})
    tokens, mask, steps = 3, [0] * 3, [TrajectoryStep(Kind.PROMPT, 0, 3)]
    for turn in range(rng.randint(0, 4)):
        length = rng.choice([0, 1, 2, 5])
        reward = rng.choice([None, -1.0, 0.25, 2.0])
        steps.append(TrajectoryStep(Kind.RESPONSE, tokens, tokens + length, reward=reward))
        seen = rng.randint(1, 3)
        kind = Kind.PROMPT if rewrites and turn % 2 else Kind.OBSERVATION
        steps.append(TrajectoryStep(kind, tokens + length, tokens + length + seen))
        mask += [1] * length + [0] * seen
        tokens += length + seen
    status = rng.choice([Status.COMPLETED, Status.COMPLETED, Status.TRUNCATED_TOKENS, Status.ERROR_ENV])
    reward = 0.0 if status.failed else sum(s.reward or 0.0 for s in steps)
    parts = array("i", range(tokens)), array("b", mask), array("f", [0.0] * tokens)
    return Trajectory(prompt, sample, *parts, 3, reward, status, 1, steps=steps)


def expected(groups: list[Group], shaped: list[float]) -> list[tuple[int, int, float]]:
    """Returns (trajectory among the judged, answer, reward) of each policy token."""
    rows: list[tuple[int, int, float]] = []
    judged = 0
    for t, total in zip([t for group in groups for t in group.trajectories], shaped, strict=True):
        if t.status.failed:
            continue
        answer, paid = -1, 0.0
        responses = [s for s in t.steps if s.kind is Kind.RESPONSE]
        spoken = [i for i, s in enumerate(responses) if s.end > s.start]
        for i, until in zip(spoken, [*spoken[1:], len(responses)], strict=bool(spoken)):
            answer += 1
            # Includes the rewards of neighbouring empty answers
            given = sum(s.reward or 0.0 for s in responses[:until]) - paid
            paid += given
            length = responses[i].end - responses[i].start
            rows += [(judged, answer, 0.0)] * (length - 1) + [(judged, answer, given)]
        if answer >= 0:
            rows[-1] = (judged, answer, rows[-1][2] + total - paid)
        judged += 1
    return rows


def batch_of(seed: int, step_wise: str, algorithm: AlgorithmConfig) -> tuple[list[Group], Batch]:
    rng = random.Random(seed)
    groups = []
    for number in range(3):
        trajectories = [played(rng, number, sample, step_wise != "off") for sample in range(rng.randint(1, 4))]
        groups.append(Group(trajectories[0].prompt, trajectories))
    return groups, make_batch(groups, algorithm, RolloutConfig(max_response_tokens=12, step_wise=step_wise))


@pytest.mark.parametrize("step_wise", ["off", "turns", "merged"])
def test_each_token_of_the_policy_is_there_once(tmp_path: Path, step_wise: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    overlong = OverlongConfig(filter=True, buffer=6)
    algorithm = AlgorithmConfig(advantage=f"{tmp_path / 'own.py'}:mine", overlong=overlong)
    tokens = 0
    for seed in range(20):
        groups, batch = batch_of(seed, step_wise, algorithm)
        batch.tokens["old_logprobs"] = torch.arange(len(batch.tokens.tokens)).float() + 1
        advantages = token_advantages(batch, algorithm)
        from_inside = algorithm_inputs(algorithm)
        token_inputs = from_inside.token
        rewards = [t.reward for group in groups for t in group.trajectories]
        punished = zip(rewards, batch.punishment.tolist(), strict=True)
        walked = expected(groups, [reward + punishment for reward, punishment in punished])
        assert token_inputs.trajectory_T.tolist() == [t for t, _, _ in walked]
        assert token_inputs.turn_T.tolist() == [turn for _, turn, _ in walked]
        assert token_inputs.rewards_T.tolist() == pytest.approx(
            [reward for _, _, reward in walked], rel=1e-12, abs=1e-12
        )
        judged = [t for g in groups for t in g.trajectories if not t.status.failed]
        assert token_inputs.known_T is not None, "what is filtered has no log-probs of the policy"
        assert token_inputs.known_T.tolist() == [
            not t.status.truncated for t in judged for is_policy in t.mask if is_policy
        ]
        # Advantages lie at their own tokens: every position equals its token.
        assert token_inputs.old_T is not None
        at = token_inputs.old_T.long() - 1
        assert advantages[at].equal(token_inputs.old_T) and advantages.count_nonzero() == len(at)
        positions_by_trajectory = [[p for p, m in enumerate(t.mask) if m] for t in judged]
        assert batch.tokens.tokens[at].tolist() == [
            position for positions in positions_by_trajectory for position in positions
        ]
        tokens += len(at)
    assert tokens > 100


def algorithm_inputs(algorithm: AlgorithmConfig) -> AdvantageInputs:
    """Returns the last inputs of the user's estimator."""
    from skyrl_mega.algorithms.advantages import find

    inputs: AdvantageInputs = find(algorithm.advantage).estimate.__globals__["seen"][-1]  # type: ignore[union-attr]
    return inputs


def test_what_is_wrong_with_an_estimator_of_tokens_is_said(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    short = AlgorithmConfig(advantage=f"{tmp_path / 'own.py'}:short")
    _, batch = batch_of(1, "off", short)
    with pytest.raises(UserError, match=r"it gives \(\d+,\) for \(\d+,\) tokens"):
        token_advantages(batch, short)
    with pytest.raises(ValueError, match=r"per_token\('value'\): allowed are old_logprobs, .*, reference_logprobs$"):
        per_token("value")
    with pytest.raises(ValueError, match=r"per_token is called first: write @per_token\(\), or"):
        per_token(lambda inputs, algorithm: inputs.rewards_N)
    with pytest.raises(ValueError, match=r"must all be \[T\]"):
        TokenInputs(trajectory_T=torch.zeros(2), turn_T=torch.zeros(2), rewards_T=torch.zeros(3))
    with pytest.raises(UserError, match=r"reads inputs.token and is not marked with @per_token"):
        advantages(AdvantageInputs(torch.zeros(2), torch.zeros(2)), short)


def test_a_mask_that_is_not_the_answers_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    algorithm = AlgorithmConfig(advantage=f"{tmp_path / 'own.py'}:short")
    t = Trajectory(Prompt(0, [], "m", {}), 0, array("i", [1, 2]), array("b", [0, 1]), array("f", [0.0, 0.0]), 1, 1.0,
                   Status.COMPLETED, 1,
                   steps=[TrajectoryStep(Kind.PROMPT, 0, 0), TrajectoryStep(Kind.RESPONSE, 0, 2)])  # fmt: skip
    batch = make_batch([Group(t.prompt, [t])], algorithm, RolloutConfig())
    with pytest.raises(ValueError, match="not as many tokens as its mask"):
        token_advantages(batch, algorithm)


def test_equal_answers_of_any_reward_are_no_signal() -> None:
    """Sums rewards of 0.1, inexact in binary; rounding leaves no learning signal."""
    prompt = Prompt(0, [], "mine", {})
    for turns in (2, 3, 7):
        steps = [TrajectoryStep(Kind.PROMPT, 0, 1)]
        steps += [TrajectoryStep(Kind.RESPONSE, 1 + 2 * i, 2 + 2 * i, reward=0.1) for i in range(turns)]
        mask = [0] + [1, 0] * turns
        parts = array("i", range(len(mask))), array("b", mask), array("f", [0.0] * len(mask))
        total = 0.1 * turns  # rounds differently from the sum
        same = [Trajectory(prompt, i, *parts, 1, total, Status.COMPLETED, 1, steps=steps) for i in range(2)]
        algorithm = AlgorithmConfig(advantage="grpo_turns")
        advantages = token_advantages(make_batch([Group(prompt, same)], algorithm, RolloutConfig()), algorithm)
        assert not advantages.any(), advantages


def test_a_plain_reward_beside_named_ones_is_one_of_its_own() -> None:
    prompt = Prompt(0, [], "mine", {})
    parts = array("i", range(2)), array("b", [0, 1]), array("f", [0.0, 0.0])
    plain = [Trajectory(prompt, i, *parts, 1, float(i), Status.COMPLETED, 1) for i in range(2)]
    named = Trajectory(prompt, 2, *parts, 1, 1.0, Status.COMPLETED, 1, rewards={"right": 1.0})
    batch = make_batch([Group(prompt, [*plain, named])], AlgorithmConfig(advantage="gdpo"), RolloutConfig())
    assert {name: values.tolist() for name, values in batch.named.items()} == {UNNAMED: [0, 1, 0], "right": [0, 0, 1]}
