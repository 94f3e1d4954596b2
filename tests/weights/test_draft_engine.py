"""A real CPU engine with draft tokens: tokens, log-probs and routes are the policy's, also after a sleep.

Every token of the vocabulary is in the prompts, and a single equal token starts a draft: nearly all tokens are checked
against a draft.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema.drafts import DraftsConfig
from skyrl_mega.engines.base import Completion, Request, Sampling
from tests.support.engines import LOADING, complete
from tests.weights.test_sleeping_engine import Place, place_of

DRAFTS = DraftsConfig(method="ngram", max_tokens=3, shortest=1, longest=3, adaptive=False)
CUT = Sampling(temperature=0.7, top_p=0.9, top_k=20)
SAMPLES = 1500


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with session(actors=8), place_of(tmp_path_factory.mktemp("drafts"), "qwen3_moe", drafts=DRAFTS, routes=True) as new:
        yield new


@pytest.fixture(scope="module")
def model(place: Place) -> Any:
    """The policy in transformers."""
    with LOADING:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.float32)


def prompt(model: Any, seed: int = 0) -> list[int]:
    """Returns all tokens of the vocabulary in a random order."""
    return torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(seed)).tolist()


def logprobs(model: Any, tokens: list[int], sampling: Sampling) -> torch.Tensor:
    """Returns the log-probs [tokens, vocabulary] of the next token at each position, after temperature, top-k and
    top-p."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0] / (sampling.temperature or 1.0)
    if sampling.top_k > 0:
        smallest = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probs, order = logits.softmax(-1).sort(descending=True)
    cut = probs.cumsum(-1) - probs >= sampling.top_p
    return logits.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), -torch.inf).log_softmax(-1)


def ask(place: Place, requests: list[Request], sampling: Sampling) -> list[Completion]:
    completions = complete(place.engines, requests, sampling)
    return [completions[request.id] for request in requests]


def accepted(place: Place) -> tuple[int, int]:
    """Returns the draft tokens that were checked, and accepted, since the last call."""
    counts = place.call("drafts")
    return counts.drafted, counts.accepted


def requests_of(model: Any, count: int, tokens: int, name: str) -> list[Request]:
    return [Request(f"{name} {i}/0", prompt(model, i)[:60], tokens, seed=i) for i in range(count)]


def test_greedy_tokens_are_the_likeliest(place: Place, model: Any) -> None:
    accepted(place)
    requests = requests_of(model, 8, 60, "greedy")
    for request, answer in zip(requests, ask(place, requests, Sampling(temperature=0)), strict=True):
        expected = logprobs(model, [*request.tokens, *answer.tokens], Sampling(temperature=0))[59:-1]
        assert list(answer.tokens) == expected.argmax(-1).tolist()
        assert np.abs(expected.max(-1).values.numpy() - np.array(answer.logprobs)).max() < 1e-5
    drafted, taken = accepted(place)
    assert drafted > 300 and taken > 30


@pytest.mark.parametrize("sampling", [Sampling(), CUT])
def test_log_probs_are_the_policys(place: Place, model: Any, sampling: Sampling) -> None:
    requests = requests_of(model, 8, 60, f"sampled {sampling.top_k}")
    for request, answer in zip(requests, ask(place, requests, sampling), strict=True):
        expected = logprobs(model, [*request.tokens, *answer.tokens], sampling)[59:-1]
        chosen = expected.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert np.abs(chosen.numpy() - np.array(answer.logprobs)).max() < 1e-5
    drafted, taken = accepted(place)
    assert drafted > 300 and taken > 0


def chi_squared(model: Any, start: list[int], answers: list[Completion], sampling: Sampling) -> float:
    """Returns the probability of a larger χ², of the second tokens given each first token."""
    seconds: dict[int, Counter[int]] = defaultdict(Counter)
    for answer in answers:
        if len(answer.tokens) == 2:  # the first token did not end the sequence
            seconds[answer.tokens[0]][answer.tokens[1]] += 1
    statistic, freedom = 0.0, 0
    for first, counts in seconds.items():
        expected = logprobs(model, [*start, first], sampling)[-1].exp().double() * counts.total()
        counted = torch.zeros_like(expected)
        counted[list(counts)] = torch.tensor(list(counts.values()), dtype=torch.float64)
        large = expected >= 5  # the others form one class
        expected = torch.cat([expected[large], expected[~large].sum()[None]])
        counted = torch.cat([counted[large], counted[~large].sum()[None]])
        if expected[-1] < 5:
            assert expected[-1] > 1e-6 or counted[-1] == 0
            expected, counted = expected[:-1], counted[:-1]
        if len(expected) > 1:
            statistic += float(((counted - expected) ** 2 / expected).sum())
            freedom += len(expected) - 1
    assert freedom > 10
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.nightly
@pytest.mark.parametrize("sampling", [Sampling(), CUT])
def test_samples_have_the_policys_distribution(place: Place, model: Any, sampling: Sampling) -> None:
    """Compares the second token of many answers, which is checked against a draft, with exact probabilities."""
    start = prompt(model)
    requests = [Request(f"χ² {sampling.top_k} {i}/0", start, 2, seed=i) for i in range(SAMPLES)]
    assert chi_squared(model, start, ask(place, requests, sampling), sampling) > 1e-3
    drafted, _ = accepted(place)
    assert drafted > 0.9 * SAMPLES


@pytest.mark.nightly
def test_routes_are_those_of_the_accepted_tokens(place: Place, model: Any) -> None:
    """Compares with the routes of the whole answer read as a prompt."""
    requests = requests_of(model, 4, 40, "routed")
    answers = ask(place, requests, CUT)
    place.fleet.ask("forget", timeout=60)
    again = [
        Request(f"again {i}/0", [*r.tokens, *a.tokens[:-1]], 1, 0)
        for i, (r, a) in enumerate(zip(requests, answers, strict=True))
    ]
    for answer, read in zip(answers, ask(place, again, CUT), strict=True):
        assert answer.routes is not None and read.routes is not None
        assert (answer.routes == read.routes).mean() > 0.99, "rounding may change a close choice"


@pytest.mark.nightly
def test_an_engine_with_drafts_sleeps_and_wakes(place: Place, model: Any) -> None:
    requests = requests_of(model, 4, 60, "sleep")
    before = ask(place, requests, Sampling(temperature=0))
    place.rest_and_return()
    place.fleet.ask("forget", timeout=60)
    assert [list(a.tokens) for a in ask(place, requests, Sampling(temperature=0))] == [list(a.tokens) for a in before]
