"""A server that serves other weights than it states is found by log-probs, and none of its tokens are used."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skyrl_mega.config.compose import compose
from skyrl_mega.engines.base import Completion, Facts
from skyrl_mega.engines.external.actor import ExternalEngine
from skyrl_mega.trainer import trust as trust_module
from skyrl_mega.trainer.trust import FOLLOWS, Trust
from skyrl_mega.trainer.trust import Answers as Answered
from skyrl_mega.trajectories.sequences import Sequences
from tests.engines.test_external import VOCAB, spec_of, table, update
from tests.support.sglang_server import Bigrams, SglangStandIn, sglang_server


class Policy:
    """A policy with a bigram model."""

    def __init__(self, model: Bigrams) -> None:
        self.model = model

    def hold(self, minis: list[Sequences]) -> None:
        """Keeps the sequences."""
        [self.held] = minis

    def logprobs(self, *, temperature: float) -> list[Tensor]:
        """Returns the log-prob of each token, 0 without a weight."""
        parts = self.held.tokens.split(self.held.lengths.tolist())
        values = [np.r_[0, self.model.logprobs(part.tolist())] for part in parts]
        return [torch.from_numpy(np.concatenate(values)).float() * self.held["weights"]]


@dataclass
class Engines:
    """A fleet of engines in this process; the first is the run's own."""

    engines: list[ExternalEngine | None]
    loop: asyncio.AbstractEventLoop
    facts: list[Facts] = field(init=False)
    retired: dict[int, str] = field(default_factory=dict)
    group: Any = field(default_factory=lambda: SimpleNamespace(name="engine"))

    def __post_init__(self) -> None:
        self.facts = [Facts(1, 0, foreign=engine is not None) for engine in self.engines]

    def submit(self, ranks: list[int], method: str, *args: Any) -> list[Any]:
        """Calls a method at once and returns the answers."""
        return [self.loop.run_until_complete(getattr(self.engines[rank], method)(*args)) for rank in ranks]

    def call_or_retire(self, ranks: list[int], method: str, timeout: float, *args: Any) -> dict[int, Any]:
        """Calls a method at once and returns the answers by rank."""
        return dict(zip(ranks, self.submit(ranks, method, *args), strict=True))

    def retire(self, rank: int, cause: str) -> None:
        """Remembers the cause."""
        self.retired[rank] = cause


@pytest.mark.parametrize(
    ("loads", "change", "problem"),
    [
        (True, 1.0, None),
        (False, 1.0, "differs from the policy by"),
        (False, 1e-4, "keeps old weights"),  # far less than the bound of the mean
        (True, 1e-4, None),
    ],
)
def test_a_server_that_lies_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: bool, change: float, problem: str | None
) -> None:
    monkeypatch.setattr(trust_module, "settle", lambda calls, *seconds: None)
    first, second = table(1), table(1) + change * table(2)
    policy, said = Policy(Bigrams(first)), list[Any]()
    state = SglangStandIn(Bigrams(table(1)))
    loop = asyncio.new_event_loop()
    with sglang_server(state) as url:
        config = compose(
            None, ["model.dtype=float32", f"rollout.endpoints=[{{url: '{url}', kind: sglang, max_difference: 0.05}}]"]
        )
        engine = ExternalEngine(spec_of(url))
        fleet = Engines([None, engine], loop)
        trust = Trust(config, policy, fleet, VOCAB, said.append)  # type: ignore[arg-type]
        loop.run_until_complete(engine.start())
        loop.run_until_complete(update(engine, Bigrams(first).save(tmp_path / "1"), 1, trust=False))
        assert trust.verify([0, 1], 1) == [0, 1]
        assert engine.trusted.is_set()
        state.loads = loads
        policy.model = Bigrams(second)
        loop.run_until_complete(update(engine, policy.model.save(tmp_path / "2"), 2, trust=False))
        assert state.version == "2"
        assert trust.verify([0, 1], 2) == ([0, 1] if problem is None else [0])
        assert engine.trusted.is_set() is (problem is None)
    loop.close()
    if problem is None:
        assert not said
        return
    [event] = said
    assert problem in event
    assert (event.kind, event.facts["rank"], event.facts["version"]) == ("engine_differs", 1, 2)
    assert problem in fleet.retired[1]


SIGMA = 0.01
"""Numerical difference between a server and the policy in BF16."""


def answers(tokens: np.ndarray, policy: np.ndarray, noise: np.random.Generator | None, old: np.ndarray) -> Answered:
    """Returns a server's answers: the policy's log-probs with numerical noise; or old answers, without noise."""
    logprobs = old if noise is None else policy + SIGMA * noise.standard_normal(policy.shape)
    each = [Completion("", list(t), list(p), "length", ((1, 0),)) for t, p in zip(tokens, logprobs, strict=True)]
    return Answered(each, list(policy))


def test_a_server_with_old_weights_is_told_from_numerical_differences() -> None:
    """Compares servers in random directions of change, from far below the numerical difference to far above."""
    draw, told = np.random.default_rng(0), 0
    for size in np.geomspace(SIGMA / 100, 100 * SIGMA, 400):
        tokens, before = draw.integers(0, 50, (4, 12)), -draw.exponential(2, (4, 12))
        now = before + size * draw.standard_normal(before.shape)
        earlier = answers(tokens, before, draw, before)
        honest = answers(tokens, now, draw, before).since(earlier)
        liar = answers(tokens, now, None, before + SIGMA * draw.standard_normal(before.shape)).since(earlier)
        assert honest is not None and not (honest.tells and honest.share < FOLLOWS)
        assert liar is not None and (liar.share < FOLLOWS or not liar.tells)
        told += liar.tells
        if size > 6 * SIGMA:
            assert liar.tells
    assert 100 < told < 200


def test_small_changes_add_up_until_they_tell() -> None:
    """Moves the policy by half a numerical difference in each sync; the second server never loads."""
    both = ", ".join(
        ["{url: 'http://127.0.0.1:1', max_difference: 9}", "{url: 'http://127.0.0.1:2', max_difference: 9}"]
    )
    trust = Trust(compose(None, [f"rollout.endpoints=[{both}]"]), None, None, VOCAB, print)  # type: ignore[arg-type]
    draw, first = np.random.default_rng(0), -np.ones((4, 12))
    tokens, problems = draw.integers(0, 50, (4, 12)), []
    for version in range(40):
        now = first - SIGMA / 2 * version
        assert trust._problem(1, answers(tokens, now, draw, now), 1) == ""
        stale = first + SIGMA * draw.standard_normal(first.shape)
        problems.append(trust._problem(2, answers(tokens, now, None, stale), 1))
    assert not any(problems[:6]) and all(problems[10:]) and "keeps old weights" in problems[10]


def test_other_tokens_tell_nothing() -> None:
    draw, policy = np.random.default_rng(0), -np.ones((4, 12))
    one = answers(draw.integers(0, 50, (4, 12)), policy, draw, policy)
    assert answers(draw.integers(50, 99, (4, 12)), policy, draw, policy).since(one) is None


def test_a_server_that_joined_later_has_the_default_bound() -> None:
    listed = "rollout.endpoints=[{url: 'http://127.0.0.1:1', max_difference: 0.05}]"
    for settings, bounds in (([], [None, None]), ([listed], [0.05, None])):
        config = compose(None, ["model.dtype=float32", "health.mismatch.alarm_mean=0.5", *settings])
        trust = Trust(config, None, None, VOCAB, print)  # type: ignore[arg-type]
        assert [trust._allowed(rank) for rank in (1, 2)] == [bound or 0.5 for bound in bounds]
