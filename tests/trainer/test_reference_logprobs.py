"""The source of the log-probs in the reference column."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skyrl_mega.batch.samples import Samples, read_samples
from skyrl_mega.trainer.reference import ReferenceModel
from tests.support.batches import samples_of_tokens


class Ranks:
    """Ranks with a model giving every token the same log-prob."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob
        self.held: list[Samples] = []
        self.columns: dict[str, list[torch.Tensor]] = {}
        self.kept: list[tuple[str, dict[str, Any]]] = []

    def hold(self, minis: list[Samples]) -> None:
        self.held = minis

    def logprobs(self, *, temperature: float) -> list[torch.Tensor]:
        return [torch.full((int(mini.lengths.sum()),), self.logprob / temperature) for mini in self.held]

    def add(self, name: str, values: list[torch.Tensor]) -> None:
        self.columns[name] = values

    def keep_logprobs(self, name: str, **how: Any) -> None:
        self.kept.append((name, how))


@pytest.fixture
def minis() -> list[Samples]:
    return [samples_of_tokens([[1, 2, 3], [4, 5]]), samples_of_tokens([[6, 7]])]


def test_a_reference_of_its_own_ranks_gives_its_own(minis: list[Samples]) -> None:
    policy, reference_ranks = Ranks(-1.0), Ranks(-3.0)
    policy.hold(minis)
    ReferenceModel(policy, reference_ranks).keep_logprobs(minis, temperature=0.5)  # type: ignore[arg-type]
    assert [values.tolist() for values in policy.columns["reference_logprobs"]] == [[-6.0] * 5, [-6.0] * 2]
    assert policy.kept == [] and [m.tokens.tolist() for m in read_samples(reference_ranks.held)] == [
        [1, 2, 3, 4, 5],
        [6, 7],
    ]
    assert [mini.lengths.tolist() for mini in reference_ranks.held] == [[3, 2], [2]]


def test_a_reference_beside_the_policy_is_asked_for_by_name(minis: list[Samples]) -> None:
    policy = Ranks(-1.0)
    ReferenceModel(policy).keep_logprobs(minis, temperature=0.5)  # type: ignore[arg-type]
    assert policy.kept == [("reference_logprobs", {"temperature": 0.5, "reference": True})]
