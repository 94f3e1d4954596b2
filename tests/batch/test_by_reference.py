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

import numpy as np
import pytest
import torch

from skyrl_mega.batch import make_batch as batch_module
from skyrl_mega.batch import remote_batch
from skyrl_mega.batch.sample_refs import read_samples
from skyrl_mega.batch.signal import advantage_fraction
from skyrl_mega.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    KlConfig,
    LayoutConfig,
    MoeConfig,
    OverlongConfig,
    ReferenceConfig,
    RolloutConfig,
)
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trainer.rollouts_ahead import Versions
from skyrl_mega.trainer.speed import forward_load
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.by_reference import attach_arrays, detach_arrays, fetch_arrays
from skyrl_mega.trajectories.remote_arrays import RemoteArrays, StoredTrajectory
from skyrl_mega.trajectories.sequences import Column, Sequences
from skyrl_mega.trajectories.trajectory import ARRAYS, Group, Trajectory, policy_texts
from tests.batch.test_step_wise import played

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
    monkeypatch.setattr("ray.get", lambda ref: STORE[ref])


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


def as_ever(groups: list[Group], config: Config) -> tuple[list[Sequences], float]:
    """Returns a driver's mini-batches made from tokens, and the share of tokens with an advantage."""
    algorithm = config.algorithm
    batch = batch_module.make_batch(groups, algorithm, config.rollout)
    minis = batch_module.mini_batches(batch, config.data.mini_batch_prompts, algorithm)
    batch["advantages"] = batch_module.token_advantages(batch, algorithm).whitened
    for mini, values in zip(minis, batch["advantages"].split([len(m.tokens) for m in minis]), strict=True):
        mini["advantages"] = values
    return minis, advantage_fraction(batch)


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
def test_ranks_get_the_same(characters_chat: Renderer, env: str, step_wise: str) -> None:
    groups = played(characters_chat, env).groups
    for given in MEANS + OTHERS:
        config = settings(step_wise, **given)
        expected, share = as_ever(groups, config)
        remote = remote_batch.make_remote_batch(away(groups), config)
        minis = remote_batch.mini_batches(remote, config)
        assert remote.advantage_fraction == pytest.approx(share), given
        assert len(minis) == len(expected) == 2
        for mini, other in zip(minis, expected, strict=True):
            ours = read_samples(*mini.take(torch.arange(len(mini.parts))), STORE)
            assert torch.equal(ours.tokens, other.tokens) and torch.equal(ours.lengths, other.lengths)
            assert {*ours.columns} == {*other.columns}, given
            for name, column in other.columns.items():
                assert torch.equal(ours[name], column.values), (given, name)
            assert remote_batch.total_weight(mini) == pytest.approx(remote_batch.total_weight(other), rel=1e-5)
            assert forward_load(mini) == forward_load(other)
            for moe in (MoeConfig(), MoeConfig(aux_loss=0.1)):
                assert remote_batch.has_gradient(mini, config.algorithm, moe) == remote_batch.has_gradient(
                    other, config.algorithm, moe
                )
        counted = sum(int(mini.counts.sum()) for mini in minis)
        assert counted < sum(t.written for group in groups for t in group.trajectories), "one has failed"


def test_end_tokens_that_no_engine_drew(characters_chat: Renderer) -> None:
    groups = played(characters_chat, "talk").groups
    for t in itertools.islice((t for g in groups for t in g.trajectories), 0, None, 3):
        t.logprobs[-1] = math.nan
    config = settings("off", "one_message")
    expected, _ = as_ever(groups, config)
    minis = remote_batch.mini_batches(remote_batch.make_remote_batch(away(groups), config), config)
    for mini, other in zip(minis, expected, strict=True):
        ours = read_samples(*mini.take(torch.arange(len(mini.parts))), STORE, drawn=True)
        assert torch.equal(ours["drawn"], other["drawn"]) and not ours["drawn"].all()


def test_a_rank_gets_its_rows_alone(characters_chat: Renderer) -> None:
    """Takes rows in any order, with a column missing from some trajectories."""
    groups = played(characters_chat, "talk").groups
    for t in groups[0].trajectories:
        values = torch.arange(3 * t.length, dtype=torch.int16).reshape(t.length, 3)
        t.columns["routes"] = Column(values, "input")
    config = replace(settings("turns"), data=DataConfig())
    (expected,), _ = as_ever(groups, config)
    (mini,) = remote_batch.mini_batches(remote_batch.make_remote_batch(away(groups), config), config)
    rows = torch.tensor([7, 0, 30, 4])
    ours, other = read_samples(*mini.take(rows), STORE), expected.take(rows)
    for name, column in other.columns.items():
        assert torch.equal(ours[name], column.values) and ours.columns[name].aligned == column.aligned
    assert torch.equal(ours.tokens, other.tokens) and ours["routes"].any()


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


def test_what_needs_tokens_is_not_done_by_reference(characters_chat: Renderer) -> None:
    groups = played(characters_chat, "talk").groups
    gone = away(groups)
    assert remote_batch.tokens_stay_remote(settings("off"), gone)
    assert not remote_batch.tokens_stay_remote(settings("off"), groups)
    mixed = [*gone[:1], *groups[1:]]
    assert not remote_batch.tokens_stay_remote(settings("off"), mixed)
    for given in (
        dict(advantage="gae"),
        dict(advantage="grpo_turns"),
        dict(kl=KlConfig(coefficient=0.1, where="reward")),
        dict(loss="clip_cov"),
        dict(importance_cap=2.0, importance_normalize=True),
    ):
        assert not remote_batch.tokens_stay_remote(settings("off", **given), gone), given
    replayed = settings("off")
    replayed.policy.moe.replay = "rollout"
    assert not remote_batch.tokens_stay_remote(replayed, gone)
    apart = replace(settings("off"), reference=ReferenceConfig(layout=LayoutConfig()))
    assert not remote_batch.tokens_stay_remote(apart, gone)


def test_a_missing_attribute_is_named() -> None:
    small, _ = detach_arrays(copy.copy(_one()))
    with pytest.raises(AttributeError, match=r"Trajectory\.nothing"):
        attrgetter("nothing")(small)
    assert isinstance(small.remote_arrays, RemoteArrays)


def _one() -> Trajectory:
    from tests.batch.test_batch import trajectory

    return trajectory(1.0, 3)
