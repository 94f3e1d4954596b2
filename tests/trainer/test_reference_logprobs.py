"""The source of the log-probs in the reference column."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyrl_mega.trainer.reference import ReferenceModel
from skyrl_mega.trajectories.sequences import Sequences


class Ranks:
    """Ranks with a model giving every token the same log-prob."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob
        self.held: list[Sequences] = []
        self.columns: dict[str, list[torch.Tensor]] = {}
        self.kept: list[tuple[str, dict[str, Any]]] = []

    def hold(self, minis: list[Sequences]) -> None:
        self.held = minis

    def logprobs(self, *, temperature: float) -> list[torch.Tensor]:
        return [torch.full((len(mini.tokens),), self.logprob / temperature) for mini in self.held]

    def add(self, name: str, values: list[torch.Tensor]) -> None:
        self.columns[name] = values

    def keep_logprobs(self, name: str, **how: Any) -> None:
        self.kept.append((name, how))


@pytest.fixture
def minis() -> list[Sequences]:
    mini_batches = [Sequences.of([[1, 2, 3], [4, 5]]), Sequences.of([[6, 7]])]
    for mini in mini_batches:
        mini["weights"] = torch.ones(len(mini.tokens))
        mini["advantages"] = torch.ones(len(mini.tokens))
    return mini_batches


def test_a_reference_of_its_own_ranks_gives_its_own(minis: list[Sequences]) -> None:
    policy, reference_ranks = Ranks(-1.0), Ranks(-3.0)
    policy.hold(minis)
    ReferenceModel(policy, reference_ranks).keep_logprobs(minis, temperature=0.5)  # type: ignore[arg-type]
    assert [values.tolist() for values in policy.columns["reference_logprobs"]] == [[-6.0] * 5, [-6.0] * 2]
    assert policy.kept == [] and [mini.tokens.tolist() for mini in reference_ranks.held] == [[1, 2, 3, 4, 5], [6, 7]]
    assert [mini.lengths.tolist() for mini in reference_ranks.held] == [[3, 2], [2]]


def test_a_reference_beside_the_policy_is_asked_for_by_name(minis: list[Sequences]) -> None:
    policy = Ranks(-1.0)
    ReferenceModel(policy).keep_logprobs(minis, temperature=0.5)  # type: ignore[arg-type]
    assert policy.kept == [("reference_logprobs", {"temperature": 0.5, "reference": True})]
