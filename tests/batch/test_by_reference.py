"""Trajectories held by reference give the ranks the same samples as trajectories on the driver, to the bit."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import pickle
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skyrl_mega.algorithms.entropy import EntropyCoefficient
from skyrl_mega.algorithms.token_weights import token_weights
from skyrl_mega.batch.advantages import compute_advantages
from skyrl_mega.batch.make_batch import make_batch, mini_batches, needs_tokens
from skyrl_mega.batch.samples import read_local, read_samples
from skyrl_mega.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    KlConfig,
    LayoutConfig,
    OverlongConfig,
    ReferenceConfig,
    RolloutConfig,
)
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.loop import train_on
from skyrl_mega.trainer.rollouts_ahead import Versions
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.by_reference import attach_arrays, detach_arrays, fetch_arrays
from skyrl_mega.trajectories.remote_arrays import RemoteArrays, StoredTrajectory
from skyrl_mega.trajectories.sequences import Column, Sequences
from skyrl_mega.trajectories.trajectory import ARRAYS, Group, Trajectory, policy_texts
from tests.batch.test_step_wise import played
from tests.support import batches
from tests.trainer.test_loop import Notes

STORE: dict[str, StoredTrajectory] = {}


def away(groups: list[Group]) -> list[Group]:
    """Returns the same groups with the arrays in `STORE`; arrays and trajectories are pickled as between processes."""

    def moved(t: Trajectory) -> Trajectory:
        small, stored = detach_arrays(t)
        name = f"ref-{len(STORE)}"
        STORE[name] = pickle.loads(pickle.dumps(stored))
        return attach_arrays(pickle.loads(pickle.dumps(small)), name)

    return [Group(group.prompt, [moved(t) for t in group.trajectories], group.greedy) for group in groups]


@pytest.fixture
def from_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `ray.get` read from `STORE`."""
    monkeypatch.setattr("ray.get", lambda ref: [STORE[one] for one in ref] if isinstance(ref, list) else STORE[ref])


def test_a_repr_fetches_nothing(characters_chat: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the repr of groups held by reference, as asyncio.run does with a result (all trajectories of a step),
    without fetching arrays."""
    elsewhere = away(played(characters_chat, "talk").groups)
    monkeypatch.setattr("ray.get", lambda ref: pytest.fail("it was fetched"))

    async def all_of_them() -> list[Group]:
        return elsewhere

    assert asyncio.run(all_of_them()) is elsewhere
    assert "ref-" in repr(elsewhere)


def settings(step_wise: str, conversation: str = "messages", **algorithm: object) -> Config:
    rollout = RolloutConfig(max_response_tokens=1000, step_wise=step_wise, conversation=conversation)
    data = DataConfig(mini_batch_prompts=2)
    return replace(Config(), algorithm=AlgorithmConfig(**algorithm), rollout=rollout, data=data)


def by_token(groups: list[Group], config: Config) -> tuple[list[Sequences], Tensor]:
    """Returns mini-batches with weights and advantages computed from the tokens in this process, and the number of
    tokens with an advantage in each sample."""
    algorithm = config.algorithm
    batch = batches.make_batch(groups, algorithm, config.rollout)
    advantages = compute_advantages(batch, algorithm)
    batch.tokens["advantages"] = advantages.whitened
    minis = batches.mini_batches(batch, config.data.mini_batch_prompts, algorithm)
    first = sample = 0
    for mini, of_groups in zip(minis, batch.groups.split(config.data.mini_batch_prompts or len(groups)), strict=True):
        last = first + int(of_groups.sum())
        part = batch.tokens.part(sample, sample + len(mini))
        weights = token_weights(
            part["mask"],
            batch.trajectory_tokens[first:last],
            algorithm.loss_mean,
            algorithm.loss_mean_samples,
            groups_G=of_groups,
            length=algorithm.loss_mean_length,
        )
        assert torch.equal(mini["weights"], weights)
        first, sample = last, sample + len(mini)
    return minis, advantages.learning


MEANS = [
    dict(loss_mean="tokens"),
    dict(loss_mean="sequences"),
    dict(loss_mean="prompts"),
    dict(loss_mean="constant", loss_mean_length=50),
    dict(loss_mean="micro_batches", loss_mean_samples=5),
]
OTHERS = [
    dict(overlong=OverlongConfig(filter=True)),
    dict(overlong=OverlongConfig(buffer=995, penalty=1.0), normalize=False),
    dict(advantage="rloo", whiten="batch"),
    dict(kl=KlConfig(coefficient=0.1, where="loss", mean="sequences")),
    dict(advantage="reinforce++_baseline"),
    dict(loss="gspo", sequence_unit="trajectory"),
]


@pytest.mark.parametrize(
    ("env", "step_wise"),
    [("talk", "off"), ("talk", "turns"), ("talk", "merged"), ("rewriting", "turns"), ("rewriting", "merged")],
)
def test_ranks_get_the_same(characters_chat: Renderer, from_store: None, env: str, step_wise: str) -> None:
    """Compares samples by reference, with advantages from rewards and lengths alone, with samples made from tokens."""
    groups = played(characters_chat, env).groups
    for given in MEANS + OTHERS:
        config = settings(step_wise, **given)
        expected, learning = by_token(groups, config)
        batch = make_batch(away(groups), config.algorithm, config.rollout)
        minis = mini_batches(batch, config.data.mini_batch_prompts, config.algorithm)
        advantages = compute_advantages(batch, config.algorithm)
        assert not batch.by_token and torch.equal(advantages.learning, learning), given
        assert len(minis) == len(expected) == 2
        shares = advantages.whitened.split([len(mini.parts) for mini in minis])
        for mini, other, share in zip(minis, expected, shares, strict=True):
            (ours,) = read_samples([mini])
            ours["advantages"] = ours.per_token(share)
            assert torch.equal(ours.tokens, other.tokens) and torch.equal(ours.lengths, other.lengths)
            assert {*ours.columns} == {*other.columns}, given
            for name, column in other.columns.items():
                assert torch.equal(ours[name], column.values), (given, name)
            assert mini.total_weight == pytest.approx(float(other["weights"].sum()), rel=1e-5)
            counts = [int((other.take([row])["weights"] != 0).sum()) for row in range(len(other))]
            assert mini.counts.tolist() == counts
        counted = sum(int(mini.counts.sum()) for mini in minis)
        assert counted < sum(t.written for group in groups for t in group.trajectories), "one has failed"


def test_end_tokens_that_no_engine_drew(characters_chat: Renderer, from_store: None) -> None:
    groups = played(characters_chat, "talk").groups
    for t in itertools.islice((t for g in groups for t in g.trajectories), 0, None, 3):
        t.logprobs[-1] = math.nan
    config = settings("off", "one_message")
    expected, _ = by_token(groups, config)
    minis = mini_batches(make_batch(away(groups), config.algorithm, config.rollout), 2, config.algorithm)
    for ours, other in zip(read_samples(minis), expected, strict=True):
        assert torch.equal(ours["drawn"], other["drawn"]) and not ours["drawn"].all()


def test_a_rank_gets_its_rows_alone(characters_chat: Renderer, from_store: None) -> None:
    """Takes rows in any order, with a column missing from some trajectories."""
    groups = played(characters_chat, "talk").groups
    for t in groups[0].trajectories:
        values = torch.arange(3 * t.length, dtype=torch.int16).reshape(t.length, 3)
        t.columns["routes"] = Column(values, "input")
    config = replace(settings("turns"), data=DataConfig())
    (expected,), _ = by_token(groups, config)
    (mini,) = mini_batches(make_batch(away(groups), config.algorithm, config.rollout), None, config.algorithm)
    rows = torch.tensor([7, 0, 30, 4])
    (ours,), other = read_samples([mini.take(rows)]), expected.take(rows)
    del other.columns["advantages"]
    for name, column in other.columns.items():
        assert torch.equal(ours[name], column.values) and ours.columns[name].aligned == column.aligned
    assert torch.equal(ours.tokens, other.tokens) and ours["routes"].any()
    (bare,) = read_samples([mini.with_weights_only()])
    assert {*bare.columns} == {"weights"} and torch.equal(bare["weights"], expected["weights"])


def test_only_tokens_of_this_process_are_sent_to_ranks_as_arrays(characters_chat: Renderer, from_store: None) -> None:
    groups, config = played(characters_chat, "talk").groups, settings("off")
    rows = torch.tensor([7, 0, 3, 4])
    here, stored = (
        mini_batches(make_batch(given, config.algorithm, config.rollout), None, config.algorithm)[0].take(rows)
        for given in (groups, away(groups))
    )
    sent, (expected,) = read_local(here), read_samples([stored])
    assert isinstance(sent, Sequences) and torch.equal(sent.tokens, expected.tokens)
    assert {*sent.columns} == {*expected.columns}
    assert all(torch.equal(sent[name], column.values) for name, column in expected.columns.items())
    assert read_local(stored) is stored and read_local(sent) is sent
    assert isinstance(read_local(here.take(rows[:0])), Sequences), "an empty micro-batch"
    repeated = here.take(torch.tensor([1, 1]))
    assert read_local(repeated) is repeated, "two samples of one trajectory"


def test_what_stays_is_what_a_step_decides_by(characters_chat: Renderer, from_store: None, tmp_path: Path) -> None:
    groups = played(characters_chat, "talk").groups
    groups[0].trajectories[0].messages[1]["content"] = "x" * 1000 + "end"
    played_here = [t for g in groups for t in g.trajectories]
    for t in played_here:
        t.versions = [(3, t.prompt_length), (4, t.prompt_length + 2)]
    gone = [t for g in away(groups) for t in g.trajectories]
    for t, other in zip(played_here, gone, strict=True):
        assert not {*ARRAYS} & {*vars(other)}
        assert (t.length, t.written, t.response_length) == (other.length, other.written, other.response_length)
        assert t.tokens_by_version() == other.tokens_by_version()
        assert (
            len(policy_texts(t)) == len(policy_texts(other)) and policy_texts(other)[0][-3:] == policy_texts(t)[0][-3:]
        )
    assert len(policy_texts(gone[0])[0]) < 300 < len(policy_texts(played_here[0])[0])
    for all_of in (played_here, gone):
        versions = Versions(2, [3, 4, 5])
        assert versions.measure(all_of)["asynchrony/staleness_max"] == 2
    # Arrays can still be fetched, and a file written from references is the same.
    assert list(gone[1].tokens) == list(played_here[1].tokens) and gone[1].messages == played_here[1].messages
    assert fetch_arrays(gone[2]).remote_arrays is None and fetch_arrays(gone[2]).mask == played_here[2].mask
    for name, all_of in (("here", played_here), ("away", gone)):
        parquet.write(tmp_path / name / "file.parquet", all_of)
    local, remote = (parquet.read(tmp_path / name / "file.parquet") for name in ("here", "away"))
    for t, other in zip(local, remote, strict=True):
        np.testing.assert_array_equal(np.asarray(t.logprobs), np.asarray(other.logprobs))
        assert replace(t, logprobs=other.logprobs) == other


def test_the_driver_reads_tokens_only_where_the_algorithm_works_on_tokens() -> None:
    assert not needs_tokens(settings("off"))
    for given in (
        dict(advantage="gae"),
        dict(advantage="grpo_turns"),
        dict(kl=KlConfig(coefficient=0.1, where="reward")),
        dict(loss="clip_cov"),
        dict(importance_cap=2.0, importance_normalize=True),
    ):
        assert needs_tokens(settings("off", **given)), given
    replayed = settings("off")
    replayed.policy.moe.replay = "rollout"
    assert needs_tokens(replayed)
    assert not needs_tokens(replace(settings("off"), reference=ReferenceConfig(layout=LayoutConfig())))


def test_a_step_of_references_reads_no_token(characters_chat: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains on references, with a policy that records the calls; the driver never fetches."""
    elsewhere = away(played(characters_chat, "talk").groups)
    monkeypatch.setattr("ray.get", lambda ref: pytest.fail("it was fetched"))
    config, policy = settings("off"), Notes()
    run: Any = SimpleNamespace(config=config, policy=policy, reference=None, critic=None, temperature=1.0)
    run.entropy = EntropyCoefficient(config.algorithm.entropy)
    train_on(run, Step(1, Console()), elsewhere)
    assert [name for name, *_ in policy.calls] == ["hold", "old_logprobs", "advantages", "train", "train"]


def test_a_missing_attribute_is_named() -> None:
    small, _ = detach_arrays(copy.copy(_one()))
    with pytest.raises(AttributeError, match=r"Trajectory\.nothing"):
        attrgetter("nothing")(small)
    assert isinstance(small.remote_arrays, RemoteArrays)


def _one() -> Trajectory:
    from tests.batch.test_batch import trajectory

    return trajectory(1.0, 3)
