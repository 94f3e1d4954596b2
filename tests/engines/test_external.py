"""Servers outside of a run: SGLang's protocol, a class of six methods, versions, silence, and servers that lie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config
from skyrl_mega.engines.base import Completion, EngineDied, Request, Sampling
from skyrl_mega.engines.external.actor import ExternalEngine
from skyrl_mega.engines.external.open import ExternalSpec, _check, check_servers, specs
from skyrl_mega.engines.external.server import NewTokens, ServerAddress, ServerFacts, ServerRefused
from skyrl_mega.engines.external.vllm import PLUGIN, VllmServer
from skyrl_mega.engines.presence import NotReady
from skyrl_mega.weights.members import DIRECTORY
from tests.support.sglang_server import Bigrams, SglangStandIn, sglang_server

VOCAB = 40


def table(seed: int) -> np.ndarray:
    """Returns random logits of the next token for each token."""
    return (2 * np.random.default_rng(seed).standard_normal((VOCAB, VOCAB))).astype(np.float32)


def spec_of(url: str, kind: str = "sglang", **changes: Any) -> ExternalSpec:
    """Returns the spec of a server."""
    address = ServerAddress(url, changes.pop("token", None), 8)
    spec = ExternalSpec("rollout.endpoints.0", kind, DIRECTORY, address, 5.0, 64, VOCAB, 1, "float32")
    return replace(spec, **changes)


async def completions(engine: ExternalEngine, requests: list[Request], sampling: Sampling) -> list[Completion]:
    """Returns all completions in the order of the requests."""
    found = [each async for some in engine.generate_many(requests, sampling) for each in some]
    return sorted(found, key=lambda each: [request.id for request in requests].index(each.id))


async def update(engine: ExternalEngine, path: Path, version: int, trust: bool = True) -> None:
    """Runs a weight sync by a directory, as the driver does."""
    await engine.fetch_weights({"path": str(path), "timeout_s": 5.0}, version)
    await engine.begin_update()
    await engine.update_weights(True)
    await engine.end_update(version)
    if trust:
        await engine.trust()


@pytest.mark.parametrize("cumulative", [True, False])
def test_tokens_of_an_sglang_server_have_their_log_probs(cumulative: bool) -> None:
    model = Bigrams(table(1))
    requests = [Request(f"t/{i}", [1, 2, i], 12, seed=i) for i in range(5)]
    with sglang_server(SglangStandIn(model, cumulative=cumulative)) as url:

        async def play() -> list[Completion]:
            engine = ExternalEngine(spec_of(url))
            facts = await engine.start()
            assert (facts.foreign, facts.weights, facts.cache_tokens) == (True, DIRECTORY, 4096)
            return await completions(engine, requests, Sampling())

        for request, completion in zip(requests, asyncio.run(play()), strict=True):
            expected = model.logprobs([*request.tokens, *completion.tokens])[len(request.tokens) - 1 :]
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
            assert (completion.finish, completion.versions, len(completion.tokens)) == ("length", ((0, 0),), 12)


def test_a_stop_token_ends_a_request_and_belongs_to_its_tokens() -> None:
    only = np.full((VOCAB, VOCAB), -30, np.float32)
    only[np.arange(VOCAB), (np.arange(VOCAB) + 1) % VOCAB] = 0
    with sglang_server(SglangStandIn(Bigrams(only))) as url:

        async def play() -> list[Completion]:
            engine = ExternalEngine(spec_of(url))
            await engine.start()
            return await completions(engine, [Request("t/0", [3], 30, 0)], Sampling(stop_tokens=(7,)))

        [completion] = asyncio.run(play())
        assert ([*completion.tokens], completion.finish) == ([4, 5, 6, 7], "stop")


def test_new_weights_arrive_in_the_middle_of_answers(tmp_path: Path) -> None:
    """The tokens of a request under way are of both versions, each with the log-probs of its weights."""
    old, new = Bigrams(table(1)), Bigrams(table(2))
    state = SglangStandIn(Bigrams(table(1)), token_s=0.02)
    with sglang_server(state) as url:

        async def play() -> Completion:
            engine = ExternalEngine(spec_of(url))
            await engine.start()
            await update(engine, old.save(tmp_path / "1"), 1)
            running = asyncio.create_task(completions(engine, [Request("t/0", [3, 4], 200, 0)], Sampling()))
            while engine.tokens < 5:
                await asyncio.sleep(0.01)
            await update(engine, new.save(tmp_path / "2"), 2)
            return (await running)[0]

        completion = asyncio.run(play())
    (first, begin), (second, middle) = completion.versions
    assert (first, begin, second) == (1, 0, 2)
    tokens = [3, 4, *completion.tokens]
    np.testing.assert_allclose(completion.logprobs[:middle], old.logprobs(tokens)[1 : 1 + middle], atol=1e-5)
    np.testing.assert_allclose(completion.logprobs[middle:], new.logprobs(tokens)[1 + middle :], atol=1e-5)
    assert "/flush_cache" in state.calls


def test_tokens_of_a_new_version_wait_until_the_driver_trusts_it(tmp_path: Path) -> None:
    with sglang_server(SglangStandIn(Bigrams(table(1)))) as url:

        async def play() -> None:
            engine = ExternalEngine(spec_of(url))
            await engine.start()
            await update(engine, Bigrams(table(1)).save(tmp_path / "1"), 1, trust=False)
            asked = asyncio.create_task(completions(engine, [Request("t/0", [3], 4, 0)], Sampling()))
            [probe] = await engine.sample_probes([Request("probe-0", [3], 4, 0)], Sampling())
            assert probe.versions == ((1, 0),)
            await asyncio.sleep(0.2)
            assert not asked.done()
            await engine.trust()
            assert len(await asked) == 1

        asyncio.run(play())


def test_a_failed_load_leaves_the_engine_without_weights(tmp_path: Path) -> None:
    with sglang_server(SglangStandIn(Bigrams(table(1)))) as url:

        async def play() -> None:
            engine = ExternalEngine(spec_of(url))
            await engine.start()
            with pytest.raises(EngineDied, match="no such folder"):
                await update(engine, tmp_path / "missing", 1)
            await engine.abandon_update()
            with pytest.raises(NotReady):
                await completions(engine, [Request("t/0", [3], 4, 0)], Sampling())

        asyncio.run(play())


def test_a_server_that_goes_silent_is_gone_within_the_limit() -> None:
    state = SglangStandIn(Bigrams(table(1)))
    with sglang_server(state) as url:

        async def play() -> None:
            engine = ExternalEngine(spec_of(url, silence_s=0.5))
            await engine.start()
            state.running.clear()  # it hangs, and still answers questions
            with pytest.raises(EngineDied, match="sent no token"):
                await completions(engine, [Request("t/0", [3], 4, 0)], Sampling())

        asyncio.run(play())


def test_a_server_updated_by_somebody_else_is_gone() -> None:
    state = SglangStandIn(Bigrams(table(1)), token_s=0.05)
    with sglang_server(state) as url:

        async def play() -> None:
            engine = ExternalEngine(spec_of(url, silence_s=2.0))
            await engine.start()
            running = asyncio.create_task(completions(engine, [Request("t/0", [3], 60, 0)], Sampling()))
            await asyncio.sleep(0.1)
            state.version = "12"
            with pytest.raises(EngineDied, match="12"):
                await running

        asyncio.run(play())


def test_the_time_of_a_request_ends_it_with_the_tokens_so_far() -> None:
    with sglang_server(SglangStandIn(Bigrams(table(1)), token_s=0.02)) as url:

        async def play() -> list[Completion]:
            engine = ExternalEngine(spec_of(url))
            await engine.start()
            return await completions(engine, [Request("t/0", [3], 600, 0, seconds=3.0)], Sampling())

        [completion] = asyncio.run(play())
        assert completion.finish == "timeout"
        assert 0 < len(completion.tokens) < 600


def test_a_key_is_sent_and_a_wrong_key_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with sglang_server(SglangStandIn(Bigrams(table(1)), token="a-long-key")) as url:
        config = config_of(f"rollout.endpoints=[{{url: '{url}', kind: sglang, token_env: SERVER_KEY}}]")
        with pytest.raises(UserError, match="token_env = SERVER_KEY: the environment variable has no API key"):
            check_servers(config, VOCAB)
        monkeypatch.setenv("SERVER_KEY", "another-key")
        with pytest.raises(UserError, match=r"endpoints.0.url.*HTTP 401"):
            check_servers(config, VOCAB)
        monkeypatch.setenv("SERVER_KEY", "a-long-key")
        check_servers(config, VOCAB)
        [spec] = specs(config, VOCAB)
        assert "a-long-key" not in repr(spec)


def test_an_address_without_a_server_is_refused_in_a_line() -> None:
    config = config_of("rollout.endpoints=[{url: 'http://127.0.0.1:9', kind: sglang}]")
    with pytest.raises(UserError, match=r"rollout.endpoints.0.url = http://127.0.0.1:9: the server does not answer"):
        check_servers(config, VOCAB)


def test_a_server_for_shorter_sequences_is_refused() -> None:
    with sglang_server(SglangStandIn(Bigrams(table(1)))) as url:
        config = config_of(f"rollout.endpoints=[{{url: '{url}', kind: sglang}}]", "rollout.max_length=4096")
        with pytest.raises(UserError, match="takes 128 tokens, and rollout's limits allow 4096"):
            check_servers(config, VOCAB)


@pytest.mark.parametrize(
    ("device", "plugin", "reloads"), [("cpu", False, False), ("cpu", True, True), ("cuda", False, True)]
)
def test_the_facts_of_a_vllm_server_are_those_of_its_configuration(
    monkeypatch: pytest.MonkeyPatch, device: str, plugin: bool, reloads: bool
) -> None:
    """Gives the answers of vLLM 0.32, in the form in which it writes its configuration as JSON."""
    answers = {
        "/v1/models": {"data": [{"max_model_len": 64}]},
        "/get_world_size": {"world_size": 2},
        "/server_info?config_format=json": {
            "vllm_config": {
                "model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"},
                "parallel_config": {"worker_extension_cls": PLUGIN if plugin else ""},
                "weight_transfer_config": {"backend": "skyrl_mega"} if plugin else None,
                "cache_config": {"kv_cache_size_tokens": 4096},
                "device_config": {"device_type": device},
            }
        },
    }

    async def get(path: str) -> Any:
        return answers[path]

    async def knows(vocab: int) -> bool:
        return vocab == VOCAB

    server = VllmServer(ServerAddress("http://127.0.0.1:1"))
    monkeypatch.setattr(server, "get", get)
    monkeypatch.setattr(server, "_knows_exactly", knows)
    facts = asyncio.run(server.describe(VOCAB))
    assert facts == ServerFacts(64, VOCAB, "float32", 4096, 2, plugin, reloads)


def test_a_server_that_computes_in_another_type_is_refused() -> None:
    spec = spec_of("http://127.0.0.1:1", "vllm")
    with pytest.raises(UserError, match=r"computes in bfloat16, and model\.dtype is float32") as error:
        _check(ServerFacts(dtype="bfloat16"), spec)
    assert error.value.fix == "start it with --dtype float32"
    _check(ServerFacts(dtype="float32"), spec)


def test_a_vllm_server_on_a_cpu_without_the_plugin_is_refused_for_experts() -> None:
    spec = spec_of("http://127.0.0.1:1", "vllm", experts=True)
    with pytest.raises(UserError, match=r"sync = directory: vLLM on a CPU serves wrong experts"):
        _check(ServerFacts(reloads_experts=False), spec)
    _check(ServerFacts(reloads_experts=False), replace(spec, experts=False))
    _check(ServerFacts(), spec)


def test_a_server_whose_cache_is_smaller_than_a_sequence_is_refused() -> None:
    with sglang_server(SglangStandIn(Bigrams(table(1)), cache=100)) as url:
        config = config_of(f"rollout.endpoints=[{{url: '{url}', kind: sglang}}]", "rollout.max_length=128")
        with pytest.raises(UserError, match="KV cache has 100 tokens, and rollout's limits allow 128"):
            check_servers(config, VOCAB)


class Echo:
    """A user's server of six methods, without HTTP: it repeats the prompt's last token."""

    def __init__(self, address: ServerAddress) -> None:
        self.path, self.stated = "", int(address.options.get("begins", 0))

    async def generate(self, request: Request, sampling: Sampling) -> AsyncIterator[NewTokens]:
        """Yields all tokens at once."""
        if request.tokens[-1] == 13:
            raise ServerRefused("no 13")
        yield NewTokens([request.tokens[-1]] * request.max_tokens, [0.0] * request.max_tokens, "length")

    async def version(self) -> int:
        """Returns the version."""
        return self.stated

    async def update(self, source: Mapping[str, Any], version: int) -> None:
        """Remembers the folder."""
        self.path, self.stated = source["path"], version

    async def pause(self) -> None:
        """Does nothing."""

    async def resume(self) -> None:
        """Does nothing."""

    async def flush(self) -> None:
        """Does nothing."""


def test_a_class_of_six_methods_is_an_engine(tmp_path: Path) -> None:
    async def play() -> None:
        engine = ExternalEngine(spec_of("http://anything", kind="tests.engines.test_external:Echo"))
        await engine.start()
        await update(engine, tmp_path, 3)
        found = await completions(engine, [Request("t/0", [3, 5], 2, 0), Request("t/1", [7], 1, 0)], Sampling())
        assert [[*each.tokens] for each in found] == [[5, 5], [7]]
        assert found[0].versions == ((3, 0),)
        with pytest.raises(ServerRefused, match="no 13"):
            await completions(engine, [Request("t/2", [13], 2, 0)], Sampling())

    asyncio.run(play())


def test_a_class_without_a_method_is_refused() -> None:
    config = config_of("rollout.endpoints=[{url: 'http://x', kind: 'types:SimpleNamespace'}]")
    with pytest.raises(UserError, match="the class has no method generate"):
        check_servers(config, VOCAB)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("[{kind: vllm}]", "the address is missing"),
        ("[{url: 'ftp://x'}]", r"endpoints.0.url = ftp://x: allowed is http"),
        ("[{url: 'http://user:pass@x'}]", "must not contain a password"),
        ("[{url: 'http://x', kind: trt}]", r"endpoints.0.kind = trt: allowed is vllm, sglang or path:Class"),
        ("[{url: 'http://x', kind: sglang, sync: group}]", "kind=sglang takes weights by directory"),
        ("[{url: 'http://x', colour: red}]", "there is no such key"),
        ("[{url: 'http://x', concurrency: 0}]", "allowed is a whole number"),
        ("[{url: 'http://x'}, {url: 'http://x/'}]", "listed twice"),
        ("[http://x]", "is no mapping"),
    ],
)
def test_an_entry_is_refused_in_a_line(setting: str, message: str) -> None:
    from skyrl_mega.config.checks.engines import check_rollout

    with pytest.raises(UserError, match=message):
        check_rollout(config_of(f"rollout.endpoints={setting}"))


def test_a_run_without_any_engine_is_refused() -> None:
    from skyrl_mega.config.checks.engines import check_rollout

    with pytest.raises(UserError, match="nothing would generate"):
        check_rollout(config_of("rollout.engines=0"))
    check_rollout(config_of("rollout.engines=0", "rollout.endpoints=[{url: 'http://x'}]"))


def config_of(*settings: str) -> Config:
    """Returns settings with short sequences."""
    short = ("rollout.max_prompt_tokens=16", "rollout.sampling.max_tokens=16")
    return compose(None, [*short, *settings])
