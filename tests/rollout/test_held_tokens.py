"""vLLM's CPU engine with held-back tokens and seeds drawn ahead: the results equal plain vLLM's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from skyrl_mega.engines.vllm import scheduler as held
from skyrl_mega.engines.vllm.cpu_sampler import AHEAD, SeedsAhead, reduce_work, without_ranks
from skyrl_mega.engines.vllm.plugin import MAY_HOLD
from skyrl_mega.engines.vllm.scheduler import HOLD_S, HoldingScheduler

Told = list[tuple[int, float]]
"""Tokens and log-probs of a request."""


class Story:
    """A scheduler with scripted vLLM outputs at scripted times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(held.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(Scheduler, "update_from_output", lambda _, answer, output: answer)
        monkeypatch.setattr(Scheduler, "has_requests", lambda _: False)
        monkeypatch.setattr(Scheduler, "__init__", lambda _: None)
        monkeypatch.setattr(Scheduler, "vllm_config", SimpleNamespace(additional_config={}), raising=False)
        monkeypatch.setattr(Scheduler, "finish_requests", lambda _, ended: ended)
        monkeypatch.setattr(held, "supported", lambda _: False)
        self.scheduler: Any = HoldingScheduler()
        self.scheduler.requests = {}
        self.scheduler._pause_state = PauseState.UNPAUSED
        self.told: dict[str, Told] = {}

    def begin(self, name: str, client: int, may_hold: bool) -> None:
        """Adds a request."""
        extra = {MAY_HOLD: True} if may_hold else None
        parameters = SimpleNamespace(extra_args=extra)
        self.scheduler.requests[name] = SimpleNamespace(
            request_id=name, client_index=client, sampling_params=parameters, spec_decode_metrics=None
        )
        self.told[name] = []

    def step(self, outputs: list[tuple[int, EngineCoreOutput]]) -> set[str]:
        """Handles vLLM's outputs of a step, by client; returns the requests with new output."""
        messages: dict[int, EngineCoreOutputs] = {}
        for client, output in outputs:
            messages.setdefault(client, EngineCoreOutputs()).outputs.append(output)
            if output.finish_reason is not None:
                del self.scheduler.requests[output.request_id]
        answers = self.scheduler.update_from_output(messages, None)
        seen: list[str] = []
        for message in answers.values():
            assert message.outputs, "a message that says nothing"
            for output in message.outputs:
                rows = output.new_logprobs
                rows_of_tokens = [] if rows is None else list(zip(*rows[:3], strict=True))
                assert [int(ids[0]) for ids, _, _ in rows_of_tokens] == output.new_token_ids
                assert all(rank == ids[0] % 7 for ids, _, rank in rows_of_tokens)
                self.told[output.request_id] += [(int(ids[0]), float(values[0])) for ids, values, _ in rows_of_tokens]
                seen.append(output.request_id)
        assert len(seen) == len(set(seen)), "a request is told twice in a step"
        return set(seen)


def said(name: str, token: int, finish: FinishReason | None = None, **more: Any) -> EngineCoreOutput:
    """Returns the output of one token with log-prob and rank, in the form sliced by vLLM from a step's outputs."""
    rows = LogprobsLists(np.array([[token]]), np.array([[-token / 8]], np.float32), np.array([token % 7]))
    return EngineCoreOutput(name, [token], rows, finish_reason=finish, **more)


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    return Story(monkeypatch)


@pytest.mark.parametrize("seed", range(30))
def test_every_token_is_told_once_in_order_and_in_time(story: Story, seed: int) -> None:
    draw = random.Random(seed)
    spoken: dict[str, Told] = {}
    first: dict[str, float] = {}
    client: dict[str, int] = {}
    may_hold: dict[str, bool] = {}
    for count in range(300):
        story.now += draw.choice([0.004, 0.03, 0.2])
        while len(story.scheduler.requests) < 6:
            name = f"{count} {len(spoken)}"
            client[name], may_hold[name], spoken[name] = draw.randrange(2), draw.random() < 0.8, []
            story.begin(name, client[name], may_hold[name])
        outputs = []
        for name in draw.sample(sorted(story.scheduler.requests), draw.randrange(7)):  # some wait for the cache
            token = draw.randrange(1000)
            spoken[name].append((token, -token / 8))
            first.setdefault(name, story.now)
            finish = FinishReason.LENGTH if draw.random() < 0.05 else None
            outputs.append((client[name], said(name, token, finish)))
        ended = {o.request_id for _, o in outputs if o.finish_reason is not None}
        story.scheduler._pause_state = draw.choice([PauseState.UNPAUSED] * 9 + [PauseState.PAUSED_ALL])
        paused = story.scheduler._pause_state is PauseState.PAUSED_ALL
        updated = story.step(outputs)
        for name in updated:
            assert story.told[name] == spoken[name]
            first.pop(name, None)
        assert ended <= updated
        assert {o.request_id for _, o in outputs if not may_hold[o.request_id]} <= updated
        assert not paused or (not first and not story.scheduler.has_requests())
        assert all(story.now - since < HOLD_S for since in first.values())
    assert max(len(t) for t in spoken.values()) > 10


def test_tokens_wait_for_one_another(story: Story) -> None:
    story.begin("a", 0, may_hold=True)
    times = [story.step([(0, said("a", token))]) for token in range(9)]
    assert times == [set()] * 9
    story.scheduler._pause_state = PauseState.PAUSED_ALL
    assert story.scheduler.has_requests(), "a pause would be complete before the tokens have been sent"
    assert story.step([]) == {"a"}
    assert [token for token, _ in story.told["a"]] == list(range(9))
    assert not story.scheduler.has_requests()


def test_what_has_more_than_tokens_does_not_wait(story: Story) -> None:
    story.begin("a", 0, may_hold=True)
    assert story.step([(0, said("a", 1))]) == set()
    assert story.step([(0, said("a", 2, routed_experts=np.zeros((1, 2, 3))))]) == {"a"}
    assert [token for token, _ in story.told["a"]] == [1, 2]


def test_what_a_request_held_is_forgotten_when_it_is_ended_from_outside(story: Story) -> None:
    story.begin("a", 1, may_hold=True)
    story.step([(1, said("a", 1))])
    request = story.scheduler.requests.pop("a")
    story.scheduler.finish_requests([request])
    story.scheduler._pause_state = PauseState.PAUSED_ALL
    assert not story.scheduler.has_requests()
    assert story.step([]) == set()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits", "processed_logprobs"])
@pytest.mark.parametrize("cut", [(None, None), (5, None), (None, 0.7), (5, 0.7)])
def test_seeds_drawn_ahead_draw_the_same_tokens(mode: Any, cut: tuple[int | None, float | None]) -> None:
    """Adds, removes and moves requests between rows, some without a generator, next to vLLM's own function."""
    current_platform.import_kernels()
    rows, steps = 5, AHEAD + 20
    top_k = None if cut[0] is None else torch.full((rows,), cut[0])
    top_p = None if cut[1] is None else torch.full((rows,), cut[1])
    vllm = TopKTopPSampler(mode)
    ahead = SeedsAhead(TopKTopPSampler(mode))
    pairs = [[torch.Generator().manual_seed(seed) for _ in range(2)] for seed in range(rows - 1)]
    shuffle = random.Random(0)
    order, members = list(range(rows - 1)), [*pairs]
    for step in range(steps):
        if step == 9:
            pairs[1] = [torch.Generator().manual_seed(77) for _ in range(2)]
        if step % 10:
            order, members = shuffle.sample(range(rows), len(pairs)), [*pairs]
        else:  # the same rows, in another order
            order, members = order[::-1], members[::-1]
        logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(step))
        torch.manual_seed(step)
        vllm_generators, ahead_generators = (
            {r: p[side] for r, p in zip(order, members, strict=True)} for side in (0, 1)
        )
        expected, seen = vllm.forward_cpu(logits.clone(), vllm_generators, top_k, top_p)
        torch.manual_seed(step)
        tokens, ahead_logprobs = ahead(logits.clone(), ahead_generators, top_k, top_p)
        assert torch.equal(tokens, expected), step
        assert (ahead_logprobs is None) == (seen is None)
        assert ahead_logprobs is None or torch.equal(ahead_logprobs, seen)
    assert len(ahead.streams) == len(pairs), "streams of requests that are gone are kept"


def test_a_sampler_that_needs_64_bit_noise_draws_its_own_seeds() -> None:
    plain, exact = Sampler("processed_logprobs"), Sampler("processed_logprobs", use_fp64_gumbel=True)
    for sampler in (plain, exact):
        reduce_work(SimpleNamespace(sampler=sampler))
    assert isinstance(plain.topk_topp_sampler.forward, SeedsAhead)
    assert exact.topk_topp_sampler.forward == exact.topk_topp_sampler.forward_cpu


@pytest.mark.parametrize("wanted", [0, 3])
def test_only_the_ranks_of_sampled_tokens_are_left_out(wanted: int) -> None:
    logprobs = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    tokens = torch.arange(6) * 5
    theirs = Sampler.gather_logprobs(logprobs, wanted, tokens)
    ours = without_ranks(Sampler.gather_logprobs)(logprobs, wanted, tokens)
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    assert ours[2].shape == theirs[2].shape and ours[2].dtype == theirs[2].dtype
    assert torch.equal(ours[2], theirs[2] if wanted else torch.zeros(6))
