"""Answers of servers outside of a run that are wrong, or nonsense: none reaches training, none ends the run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.cluster.calls import Outcomes, PendingCall
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.elastic import check_elastic
from skyrl_mega.config.checks.engines import check_endpoints, check_rollout
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.endpoints import CONTROLLED
from skyrl_mega.engines.base import Completion, EngineDied, Request, Sampling
from skyrl_mega.engines.external.actor import ExternalEngine
from skyrl_mega.engines.external.open import ExternalSpec, open_server
from skyrl_mega.engines.external.server import NewTokens, ServerAddress, ServerGone
from skyrl_mega.engines.external.sglang import SglangServer
from skyrl_mega.engines.external.vllm import VllmServer
from skyrl_mega.weights import sync as weight_sync
from skyrl_mega.weights.members import GROUP

DELIVERED = 5
"""Version that the run delivered last."""
SPEC = ExternalSpec("rollout.endpoints.0", "vllm", GROUP, ServerAddress("http://x"), 60.0, 64, 50, 1, "bfloat16")


class Chunks:
    """A server that answers every request with the same chunks."""

    def __init__(self, chunks: list[NewTokens]) -> None:
        self.chunks = chunks

    async def generate(self, request: Request, sampling: Sampling) -> AsyncIterator[NewTokens]:
        """Yields the chunks."""
        for chunk in self.chunks:
            yield chunk

    async def version(self) -> int:
        """Returns the version of a server that was started again."""
        return 0


def answered(*chunks: NewTokens, delivered_before: int = DELIVERED) -> Completion:
    """Returns the completion of a request for 10 tokens; `delivered_before` was the version when it was sent."""

    async def play() -> Completion:
        engine = ExternalEngine(SPEC)
        server = Chunks(list(chunks))
        engine.server, engine.version = server, delivered_before  # type: ignore[assignment]
        generate = server.generate

        async def later(request: Request, sampling: Sampling) -> AsyncIterator[NewTokens]:
            engine.version = DELIVERED
            async for chunk in generate(request, sampling):
                yield chunk

        server.generate = later  # type: ignore[method-assign]
        engine.places = asyncio.Semaphore(1)
        request = Request("t/0", [1, 2], 10, 0)
        [completion] = [each async for some in engine.generate_many([request], Sampling()) for each in some]
        return completion

    return asyncio.run(play())


def tokens(*versions: tuple[Any, Any], count: int = 4, finish: str | None = "stop", logprob: Any = -0.5) -> NewTokens:
    """Returns a chunk of tokens."""
    return NewTokens([3] * count, [logprob] * count, finish, versions)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([tokens((0, 0))], "states version 0, not 5"),
        ([tokens((6, 0))], "states version 6, not 5"),
        ([tokens((5, 0), finish=None), tokens()], "serves version 0, not 5"),
        ([tokens((5, 3))], "for 4 tokens"),
        ([tokens((5, -4), (5, 1))], "for 4 tokens"),
        ([tokens((5, 0), (5, 4))], "for 4 tokens"),
        ([tokens((5, 0), (5, 2), (5, 2))], "for 4 tokens"),
        ([tokens((5, 0), *[(5, 1)] * 100_000)], "for 4 tokens"),
        ([tokens(("5", 0))], "no numbers"),
        ([tokens((5, 0), logprob=-1e39)], "is no log-prob"),
        ([tokens((5, 0), logprob=-1e30)], "is no log-prob"),
        ([tokens((5, 0), logprob=math.nan)], "is no log-prob"),
        ([tokens((5, 0), logprob=-math.inf)], "is no log-prob"),
        ([tokens((5, 0), logprob="x" * 100_000)], "is no log-prob"),
        ([tokens((5, 0), count=0)], "with stop and no token"),
        ([tokens((5, 0), finish="length")], "with length after 4 of 10 tokens"),
        ([tokens((5, 0)), tokens((5, 0))], "after the end"),
        ([NewTokens(["x" * 100_000], [-1.0], "stop")], "is not in the vocabulary"),  # type: ignore[list-item]
        ([tokens((5, 0), finish="x" * 100_000)], "ended with"),
    ],
)
def test_a_wrong_answer_means_that_the_server_is_gone(chunks: list[NewTokens], message: str) -> None:
    with pytest.raises(EngineDied, match=message) as caught:
        answered(*chunks)
    assert len(str(caught.value)) < 300


def test_tokens_may_be_of_the_versions_delivered_since_the_request_was_sent() -> None:
    completion = answered(tokens((4, 0), (5, 2)), delivered_before=4)
    assert completion.versions == ((4, 0), (5, 2))
    with pytest.raises(EngineDied, match="states version 3, not 4 to 5"):
        answered(tokens((3, 0), (5, 2)), delivered_before=4)
    with pytest.raises(EngineDied, match="for 4 tokens"):
        answered(tokens((5, 0), (4, 2)), delivered_before=4)


def test_a_request_may_end_with_length_at_the_maximum_length() -> None:
    assert len(answered(tokens((5, 0), count=10, finish="length")).tokens) == 10


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        (VllmServer, {"choices": [{"index": 1, "token_ids": [3], "logprobs": None}]}),
        (SglangServer, {"index": 1, "meta_info": {"completion_tokens": 1}}),
    ],
)
def test_options_change_nothing_that_the_run_sets_and_a_second_answer_is_refused(kind: Any, event: Any) -> None:
    """Every sampling parameter that a client sends is refused as an option."""
    sent: dict[str, Any] = {}
    server = kind(ServerAddress("http://127.0.0.1:1", options={"max_tokens": 1, "temperature": 9, "min_p": 0.1}))

    async def stream(path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        sent.update(body["sampling_params"])
        yield event

    server.stream = stream

    async def play() -> None:
        async for _ in server.generate(Request("t/0", [1], 10, 0), Sampling(stop=("x",))):
            pass

    with pytest.raises(ServerGone, match="second answer"):
        asyncio.run(play())
    assert sent["temperature"] == Sampling().temperature
    name = "vllm" if kind is VllmServer else "sglang"
    assert set(sent) - {"min_p", "max_tokens"} <= {*CONTROLLED[name]}


@pytest.mark.parametrize(
    "results", [[], [5], [{"made_up": 1.0}], [{"wire_s": "1"}], [{"wire_s": math.nan}], [{"sent": -1}], [{}, {}], {}]
)
def test_nonsense_reports_of_a_server_mean_that_the_server_is_gone(results: Any) -> None:
    server = VllmServer(ServerAddress("http://127.0.0.1:1"))
    server.workers = 1

    async def post(path: str, body: Any, seconds: float) -> Any:
        return {"results": results}

    server.post = post  # type: ignore[method-assign]
    for call in (server.end(1), server.probe(), server.compare()):
        with pytest.raises(ServerGone):
            asyncio.run(call)


def test_a_report_of_a_server_arrives() -> None:
    server = VllmServer(ServerAddress("http://127.0.0.1:1"))
    answers: dict[str, Any] = {
        "transfer_report": {"wire_s": 1.5, "sent": 3},
        "check_weights": {"parameters": 2, "bytes": 8, "different": ["a"]},
    }

    async def post(path: str, body: Any, seconds: float) -> Any:
        return {"results": [answers[body["method"]]]} if path == "/collective_rpc" else None

    server.post = post  # type: ignore[method-assign]
    assert asyncio.run(server.end(1)) == [answers["transfer_report"]]
    assert asyncio.run(server.compare()) == [answers["check_weights"]]


def test_a_server_that_fails_at_the_end_of_an_update_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers may still answer; nobody else took part in that call."""
    monkeypatch.setattr(weight_sync, "settle", lambda *_, **__: SimpleNamespace(causes={}))
    sync = object.__new__(weight_sync.WeightSync)
    sync.policy, sync.fetchers = SimpleNamespace(name="policy"), []  # type: ignore[assignment]
    facts = [SimpleNamespace(foreign=False), SimpleNamespace(foreign=True)]
    sync.fleet = SimpleNamespace(facts=facts, submit=lambda *_: [])  # type: ignore[assignment]

    def blamed(rank: int, method: str) -> dict[int, str]:
        failures: list[tuple[PendingCall, BaseException]] = [
            (PendingCall("engines", rank, method, None), ServerGone("nonsense"))
        ]
        outcomes = Outcomes(1.0, {}, failures, [])
        return sync._blame(weight_sync._Failed(outcomes), [0, 1])

    assert list(blamed(1, "end_update")) == [1]
    assert blamed(1, "update_weights") == blamed(0, "end_update") == {}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[{url: 'http://x', options: {n: 2}}]", "endpoints.0.options.n.*the run decides it"),
        ("[{url: 'http://x', kind: sglang, options: {max_new_tokens: 2}}]", "options.max_new_tokens"),
        ('[{url: "http://h\\n:80"}]', "printable ASCII"),
        ('[{url: "http://h:80/\\0"}]', "printable ASCII"),
        ("[{url: 'http://a b:80'}]", "printable ASCII"),
        ("[{url: 'http://localhost:8000'}, {url: 'HTTP://127.0.0.1:8000/'}]", "listed twice"),
        ("[{url: 'http://x'}, {url: 'http://X:80'}]", "listed twice"),
    ],
)
def test_an_entry_is_refused_before_a_run(entries: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_rollout(settings(f"rollout.endpoints={entries}"))
    assert str(caught.value).isprintable()


def test_an_address_that_no_client_takes_is_refused() -> None:
    with pytest.raises(UserError, match=r"rollout.endpoints.0.url"):
        open_server(
            ExternalSpec(
                "rollout.endpoints.0", "vllm", GROUP, ServerAddress("http://xn--a:1"), 1, 64, 50, 1, "bfloat16"
            )
        )


def test_a_direct_sync_to_a_server_beside_colocated_engines_on_gpus_is_refused() -> None:
    shared = ("cluster.shared=true", "cluster.device=cuda")
    server = "rollout.endpoints=[{url: 'http://x', sync: files}, {url: 'http://y'}]"
    with pytest.raises(UserError, match=r"rollout.endpoints.1.sync = group: .*cluster.shared"):
        check_endpoints(settings(server, *shared))
    with pytest.raises(UserError, match=r"rollout.elastic.most.*cluster.shared"):
        check_elastic(settings("rollout.elastic.most=1", *shared))
    check_endpoints(settings(server, "cluster.shared=true", "cluster.device=cpu"))
    check_endpoints(settings("rollout.endpoints=[{url: 'http://x', sync: files}]", *shared))


def settings(*given: str) -> Config:
    """Returns settings with short sequences."""
    return compose(None, ["rollout.max_prompt_tokens=16", "rollout.sampling.max_tokens=16", *given])
