"""The client of the endpoint: faults, budgets, stop strings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from skyrl_mega.common import replies
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config, EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.evaluate import endpoint as module
from skyrl_mega.evaluate.endpoint import ATTEMPTS, Endpoint, EndpointFailed, EndpointSource, with_stop_string
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.evaluate.fake import Fake, serving

BUSY = (429, {"Retry-After": "0"}, '{"error": {"message": "slow down"}}')
BROKEN = (500, {}, "oh no")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    with serving() as endpoint:
        yield endpoint


def talk(fake: Fake, prompts: int = 1, env: str = "gsm8k", key: str | None = None, **rollout: Any) -> list[Trajectory]:
    """Plays `prompts` questions at once and returns the trajectories."""
    sampling = rollout.pop("sampling", SamplingConfig(max_tokens=9))
    config = Config(rollout=RolloutConfig(sampling=sampling, **rollout), environment=EnvironmentConfig())
    source = EndpointSource(Endpoint.of(fake.url, "m", "KEY", key, "{}"), config)

    async def play() -> list[Trajectory]:
        async with source.player() as player:

            async def one(n: int) -> Trajectory:
                question = [{"role": "user", "content": f"{n} times 7"}]
                prompt = Prompt(n, question, env, {"reward_spec": {"ground_truth": str(7 * n)}})
                return await player.play(prompt, 0, f"t/{n}")

            return await asyncio.gather(*map(one, range(prompts)))

    return asyncio.run(play())


def test_the_templates_options_are_in_each_request(fake: Fake) -> None:
    talk(fake, chat_template_options={"enable_thinking": False})
    talk(fake)
    assert fake.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in fake.bodies[1]


def test_faults_are_asked_again_and_change_nothing(fake: Fake) -> None:
    [whole] = talk(fake)
    assert len(fake.bodies) == 1
    fake.script.extend([BUSY, BROKEN, None, (503, {}, "")])
    [after] = talk(fake)
    assert len(fake.bodies) == 6
    assert fake.bodies[1:] == [fake.bodies[0]] * 5
    assert (after.messages, after.reward, after.status) == (whole.messages, whole.reward, Status.COMPLETED)
    assert (after.prompt_length, sum(after.mask), after.response_length) == (3, 4, 4)


def test_retries_are_bounded_and_the_last_cause_is_named(fake: Fake) -> None:
    fake.script.extend([BROKEN] * (ATTEMPTS + 1))
    with pytest.raises(EndpointFailed, match=rf"{ATTEMPTS} attempts; the last: HTTP 500: oh no"):
        talk(fake)
    assert len(fake.bodies) == ATTEMPTS


def test_an_endpoint_that_hangs_is_asked_again_in_bounded_time(fake: Fake) -> None:
    fake.delay = lambda number: 12.0 if number == 1 else 0.0
    [t] = talk(fake, request_timeout_s=2.0)
    assert t.status is Status.COMPLETED
    assert len(fake.bodies) == 2


def test_what_it_asks_for_is_waited(fake: Fake) -> None:
    fake.script.append((429, {"Retry-After": "1"}, ""))
    assert talk(fake)[0].seconds["generate"] >= 1.0


@pytest.mark.parametrize(
    "status, part", [(401, "the environment variable KEY is not set"), (404, "--served-model m"), (422, "--request")]
)
def test_a_refusal_is_the_users_to_mend_and_not_tried_again(fake: Fake, status: int, part: str) -> None:
    fake.script.append((status, {}, '{"error": {"message": "no such thing"}}'))
    with pytest.raises(UserError, match=rf"HTTP {status}: no such thing; .*{part}"):
        talk(fake)
    assert len(fake.bodies) == 1


def replied(content: object = "a", finish: object = "stop", prompt: object = 3, completion: object = 4) -> str:
    choice = {"message": {"content": content}, "finish_reason": finish}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return json.dumps({"choices": [choice], "usage": usage})


FORMS = [
    "<html>",
    "{}",
    "[]",
    "5",
    '{"choices": []}',
    '{"choices": 5}',
    '{"choices": [{"message": {"content": "a"}}]}',
    "[" * 100_000,
    *(replied(completion=n) for n in (10**9, 10**30, -1, 1.5, "4", None, True, float("nan"), float("inf"), [1])),
    *(replied(prompt=n) for n in (10**9, "x", -3)),
    *(replied(content=c) for c in (["a"], 5, {"text": "a"}, True, "\ud800")),
    *(replied(finish=f) for f in (5, ["stop"], {})),
]


def test_another_form_is_named(fake: Fake) -> None:
    for body in FORMS:
        fake.script.append((200, {}, body))
        with pytest.raises(EndpointFailed, match="did not answer as OpenAI's chat completions") as caught:
            talk(fake)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500, body[:100]


def test_a_broken_compression_is_named(fake: Fake) -> None:
    fake.script.append((200, {"Content-Encoding": "gzip"}, "no gzip"))
    with pytest.raises(EndpointFailed, match="did not answer as OpenAI's chat completions"):
        talk(fake)


def test_an_answer_without_end_is_not_read(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "MOST_BYTES", 10_000)
    fake.script.append((200, {}, replied(content="a" * 20_000)))
    with pytest.raises(EndpointFailed, match="more than 10000 bytes"):
        talk(fake)


def test_an_error_shows_neither_the_key_nor_what_steers_a_terminal(fake: Fake) -> None:
    for body in ("your key s3cret is wrong", '{"error": {"message": "s3cret\\u001b[2J"}}', "[" * 100_000):
        fake.script.append((401, {}, body))
        with pytest.raises(UserError, match="HTTP 401") as caught:
            talk(fake, key="s3cret")
        assert "s3cret" not in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:0", "http://[::1", "http://a\x1b/", "x"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UserError, match=r"^--endpoint .*allowed is http"):
        Endpoint.of(url, "m", "KEY", None, "{}")


@pytest.mark.parametrize("extra", ["[", "5", '{"a": NaN}', "[" * 100_000])
def test_fields_that_are_none(extra: str) -> None:
    with pytest.raises(UserError, match=r"^--request .*allowed is a JSON object"):
        Endpoint.of("http://x", "m", "KEY", None, extra)


def test_so_many_at_once_and_no_more(fake: Fake) -> None:
    fake.delay = lambda number: 0.02
    assert len(talk(fake, prompts=24, concurrency=3)) == 24
    assert fake.most == 3


def test_the_key_is_sent_and_never_shown(fake: Fake) -> None:
    talk(fake, key="s3cret")
    assert fake.headers[0]["Authorization"] == "Bearer s3cret"
    talk(fake)
    assert "Authorization" not in fake.headers[1]
    endpoint = Endpoint.of(fake.url, "m", "KEY", "s3cret", "{}")
    assert "s3cret" not in repr(endpoint)
    fake.script.append((401, {}, "no"))
    with pytest.raises(UserError) as error:
        talk(fake, key="s3cret")
    assert "s3cret" not in str(error.value)


def test_a_conversation_goes_on_as_messages_within_its_budget(fake: Fake) -> None:
    fake.script.extend([{"message": {"content": "I do not know"}}] * 3)
    [t] = talk(fake, env="gsm8k_multi_turn", max_turns=3)
    assert [m["role"] for m in fake.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert fake.bodies[2]["messages"] == t.messages[:-1]
    assert (t.status, t.turns, sum(t.mask)) == (Status.COMPLETED, 3, 12)
    # 3 + 4 words, then the environment's.
    heard = len(fake.bodies[1]["messages"][2]["content"].split())
    assert list(t.mask[:7]) == [0, 0, 0, 1, 1, 1, 1]
    assert list(t.mask[7 : 7 + heard]) == [0] * heard
    assert len({body["seed"] for body in fake.bodies}) == 3


def test_budgets_end_it_by_name(fake: Fake) -> None:
    fake.script.append({"finish_reason": "length"})
    assert talk(fake)[0].status is Status.TRUNCATED_TOKENS
    fake.script.extend([{"message": {"content": "one two three four five"}}] * 3)
    [t] = talk(fake, env="gsm8k_multi_turn", max_turns=3, max_response_tokens=10, sampling=SamplingConfig(max_tokens=8))
    assert [body["max_tokens"] for body in fake.bodies[1:]] == [8, 6]
    assert (t.status, t.turns) == (Status.TRUNCATED_TOKENS, 2)


def test_a_conversation_beyond_the_endpoints_context_is_truncated(fake: Fake) -> None:
    body = {"error": {"message": "This model's maximum context length is 16 tokens.", "code": 400}}
    fake.script.append((400, {}, json.dumps(body)))
    [t] = talk(fake)
    assert (t.status, t.reward, len(fake.bodies)) == (Status.TRUNCATED_TOKENS, 0.0, 1)


STOPS = ["</search>", "</answer>"]


@pytest.mark.parametrize(
    "text, choice, whole",
    [
        ("a <search>b", {"stop_reason": "</search>"}, "a <search>b</search>"),  # vLLM
        # VLLM, asked to include the stop string
        ("a <search>b</search>", {"stop_reason": "</search>"}, "a <search>b</search>"),
        ("a <search>b", {"stop_reason": None}, "a <search>b"),  # the policy ended the turn
        ("a <search>b", {"stop_reason": 2}, "a <search>b"),  # a stop token
        ("a <answer>b", {"matched_stop": "</answer>"}, "a <answer>b</answer>"),  # SGLang
        ("a <search>b</search> <answer>c", {}, "a <search>b</search> <answer>c</answer>"),
        ("<answer>a <search>b", {}, "<answer>a <search>b</search>"),
        ("a <search>b</search> c", {}, "a <search>b</search> c"),
        ("a", {}, "a"),
        ("a <search>b", {"finish_reason": "length"}, "a <search>b"),
    ],
)
def test_the_stop_string_is_put_back(text: str, choice: dict[str, Any], whole: str) -> None:
    assert with_stop_string(text, {"finish_reason": "stop", **choice}, STOPS) == whole


def test_requests_carry_the_sampling_and_what_is_added(fake: Fake) -> None:
    config = Config(
        rollout=RolloutConfig(sampling=SamplingConfig(temperature=0.6, top_p=0.9, top_k=5, max_tokens=9, stop=STOPS))
    )
    extra = '{"max_tokens": null, "max_completion_tokens": 3, "reasoning_effort": "low"}'
    source = EndpointSource(Endpoint.of(f"{fake.url}/v1/chat/completions", "m", "KEY", None, extra), config)

    async def ask() -> None:
        async with source.player() as player:
            await player.client.reply([{"role": "user", "content": "2 times 3"}], 9, 1)  # type: ignore[attr-defined]

    asyncio.run(ask())
    [body] = fake.bodies
    assert "max_tokens" not in body
    wanted = {"model": "m", "temperature": 0.6, "top_p": 0.9, "top_k": 5, "stop": STOPS, "seed": 1}
    assert wanted.items() <= body.items()
    assert (body["max_completion_tokens"], body["reasoning_effort"]) == (3, "low")


@pytest.mark.parametrize(
    "url, model, extra, part",
    [
        ("localhost:8000", "m", "{}", "allowed is http://host:port/v1"),
        ("http://localhost:8000", None, "{}", "--served-model"),
        ("http://me:s3cret@localhost:8000", "m", "{}", "the address must not contain a key or password; .* KEY"),
        ("http://localhost:8000", "m", "[1]", "JSON object"),
        ("http://localhost:8000", "m", "{", "JSON object"),
    ],
)
def test_a_wrong_address_is_one_line(url: str, model: str | None, extra: str, part: str) -> None:
    with pytest.raises(UserError, match=part) as error:
        Endpoint.of(url, model, "KEY", None, extra)
    assert "\n" not in str(error.value)
    assert "s3cret" not in str(error.value)


def test_addresses() -> None:
    for given in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions"):
        assert Endpoint.of(given, "m", "KEY", None, "{}").url == "http://h:1/v1"
    assert Endpoint.of("https://h/openai/v9", "m", "KEY", None, "{}").url == "https://h/openai/v9"
    assert Endpoint.of("http://127.0.0.5:1", "m", "KEY", None, "{}").is_local
    assert not Endpoint.of("http://10.0.0.5:1", "m", "KEY", None, "{}").is_local
