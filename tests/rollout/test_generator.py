"""The agent loop on a real engine and real environments."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from skyrl_mega.cluster import reaper
from skyrl_mega.cluster.calls import gather
from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema import EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.engines.base import Completion, Request, Sampling
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.char_tokenizer import EOS, VOCABULARY
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.support.engines import (
    build_model,
    complete,
    difference_from_transformers,
    serving,
    spec_of,
    start_engine,
    vllm_process,
)

END = VOCABULARY[EOS]
ROLLOUT = RolloutConfig(
    kv_cache_gib=0.1,
    max_prompt_tokens=40,
    max_length=120,
    env_timeout_s=3.0,
    request_timeout_s=60.0,
    # A stop string makes the engine load a tokenizer; most tests do not need it.
    sampling=SamplingConfig(max_tokens=12, stop=["Z"]),
)
FREE = SamplingConfig(max_tokens=12)
USER = EnvironmentConfig(classes={"talk": "tests.rollout.user_envs:Talk", "faulty": "tests.rollout.user_envs:Faulty"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe", seed=3)


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[ActorGroup]:
    with session(actors=1):
        group = start_engine("engine", spec_of(model, ROLLOUT, weights="auto"), model.parent)
        yield group
        group.shutdown()


@pytest.fixture(scope="module")
def chat(model: Path) -> Renderer:
    return Renderer(str(model))


def products(n: int) -> list[Prompt]:
    return [
        Prompt(
            i,
            [{"role": "user", "content": f"{i} * 3 = "}],
            "multiply",
            {"reward_spec": {"ground_truth": str(3 * i)}, "extra_info": {}},
        )
        for i in range(n)
    ]


def talk(uid: int = 0, env: str = "talk", **extra: str) -> Prompt:
    return Prompt(uid, [{"role": "user", "content": "hello"}], env, {"reward_spec": {}, "extra_info": extra})


def play(
    engines: ActorGroup, chat: Renderer, prompts: list[Prompt], samples: int = 1, seed: str = "0/1", **changes: object
) -> list[Trajectory]:
    rollout = replace(ROLLOUT, **changes)  # type: ignore[arg-type]
    sampling = SamplingConfig(max_tokens=rollout.sampling.max_tokens)
    with Generator(serving(engines), chat, rollout, USER) as generator:
        groups = generator.generate(prompts, samples, sampling, seed=seed)
    return [t for group in groups for t in group.trajectories]


def test_logprobs_are_those_of_the_distribution_that_is_drawn_from(engines: ActorGroup, model: Path) -> None:
    request = Request("warm", [5, 30, 31, 32, 7], 24, seed=1)
    completion = complete(engines, [request], Sampling(temperature=0.6))["warm"]
    assert difference_from_transformers(model, request, completion, temperature=0.6) < 1e-4
    # Only the two most likely tokens: their probabilities add up to one.
    first = [Request(f"top {i}", [5, 30, 31, 32, 7], 1, seed=i) for i in range(40)]
    drawn = complete(engines, first, Sampling(top_k=2))
    probabilities = {c.tokens[0]: math.exp(c.logprobs[0]) for c in drawn.values()}
    assert len(probabilities) == 2
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)


def test_a_wave_of_prompts_may_exceed_one_prefill(engines: ActorGroup, model: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(8, len(VOCABULARY), (100, 100), generator=generator).tolist()  # 10,000 tokens > 8192
    requests = [Request(f"wave-{i}", tokens, 3, i) for i, tokens in enumerate(prompts)]
    completions = complete(engines, requests)
    for request in (requests[0], requests[81], requests[82], requests[-1]):
        assert difference_from_transformers(model, request, completions[request.id]) < 1e-4


def test_a_stop_string_ends_a_turn_and_stays_in_it(engines: ActorGroup, chat: Renderer) -> None:
    requests = [Request(f"stop {i}", [5, 30, 31, 7], 60, seed=i) for i in range(16)]
    ended = complete(engines, requests, Sampling(stop=("Z",), stop_tokens=(END,))).values()
    texts = [chat.text(c.tokens) for c in ended if c.finish == "stop" and c.tokens[-1] != END]
    assert texts
    assert all(text.endswith("Z") and text.count("Z") == 1 for text in texts)


def test_trajectories_come_in_order_and_repeat_to_the_last_bit(engines: ActorGroup, chat: Renderer) -> None:
    progress: list[tuple[int, int]] = []
    with Generator(serving(engines), chat, ROLLOUT, USER) as generator:
        groups = generator.generate(products(8), 4, FREE, seed="0/1", progress=lambda *done: progress.append(done))
        second = generator.generate(products(8), 4, FREE, seed="0/1")
    assert [group.prompt.uid for group in groups] == list(range(8))
    first = [t for group in groups for t in group.trajectories]
    assert [(t.prompt.uid, t.sample) for t in first] == [(p, s) for p in range(8) for s in range(4)]
    assert progress == [(i, 32) for i in range(1, 33)]
    of_second = [t for group in second for t in group.trajectories]
    for again in (of_second, play(engines, chat, products(8), 4)):  # in the same event loop, and in a new one
        assert [(t.tokens, t.logprobs, t.reward) for t in again] == [(t.tokens, t.logprobs, t.reward) for t in first]
    other = play(engines, chat, products(8), 4, seed="0/2")
    assert [t.tokens for t in other] != [t.tokens for t in first]
    # Samples of a prompt are independent draws.
    assert len({tuple(t.tokens) for t in first[:4]}) > 1


def test_a_prompt_may_be_played_twice_in_one_phase(engines: ActorGroup, chat: Renderer) -> None:
    """Plays a prompt twice in a phase, as at the end of an epoch, and expects different samples."""
    prompt = products(1)[0]
    played = play(engines, chat, [prompt, *products(2), prompt], 4)
    assert len(played) == 16
    assert len({tuple(t.tokens) for t in played if t.prompt.uid == 0}) > 8


def test_a_trajectory_is_what_the_engine_was_given_and_gave(engines: ActorGroup, chat: Renderer, model: Path) -> None:
    for t in play(engines, chat, products(4), 2):
        assert t.tokens[: t.prompt_length].tolist() == chat.first(t.prompt.messages)
        assert t.mask.tolist() == [0] * t.prompt_length + [1] * t.response_length
        assert len(t.logprobs) == len(t.tokens)
        assert t.logprobs[: t.prompt_length].tolist() == [0.0] * t.prompt_length
        assert t.messages[1] == {"role": "assistant", "content": chat.text(t.tokens[t.prompt_length :])}
        assert (t.status is Status.COMPLETED) == (t.tokens[-1] == END)
        assert (t.status is Status.TRUNCATED_TOKENS) == (t.response_length == 12 and t.tokens[-1] != END)
        request = Request("", t.tokens[: t.prompt_length], 12, 0)
        response = Completion("", t.tokens[t.prompt_length :], t.logprobs[t.prompt_length :], "", 0)
        assert difference_from_transformers(model, request, response) < 1e-4


def test_turns_are_those_of_the_chat_template_and_the_policys_tokens_stay(engines: ActorGroup, chat: Renderer) -> None:
    """Tries seeds until the policy ends enough turns itself, and compares the tokens with the template's rendering."""
    trajectories = [
        t
        for seed in range(6)
        for t in play(engines, chat, [talk()], 16, seed=str(seed), max_turns=2, sampling=SamplingConfig(max_tokens=30))
        if t.status is Status.TRUNCATED_TURNS
    ]
    assert trajectories
    for t in trajectories:
        assert t.turns == 2
        assert t.reward == 2.0
        assert t.metadata == {"turns": 2}
        policy = [token for token, is_policy in zip(t.tokens, t.mask, strict=True) if is_policy]
        assert policy.count(END) == 2
        assert all((logprob != 0.0) == bool(is_policy) for logprob, is_policy in zip(t.logprobs, t.mask, strict=True))
        # The last message is an unread observation, and not part of the tokens.
        rendered = chat.tokenizer.apply_chat_template(t.messages[:-1], tokenize=False)
        assert chat.tokenizer.decode(list(t.tokens)) == rendered


def test_budgets_end_a_conversation_by_name(engines: ActorGroup, chat: Renderer) -> None:
    for t in play(engines, chat, [talk()], 16, max_turns=3, max_response_tokens=20):
        assert t.status is Status.TRUNCATED_TOKENS
        assert t.response_length <= 20
        assert t.mask[-1] == 1


def test_time_ends_a_trajectory_with_the_tokens_that_it_has(engines: ActorGroup, chat: Renderer, model: Path) -> None:
    """Tries time limits until some limit ends a response in the middle, because the engine's speed is unknown."""
    limit, cut = 0.02, []
    while not cut and limit < 20:
        limit *= 1.5
        played = play(
            engines, chat, products(16), 2, trajectory_timeout_s=limit, sampling=SamplingConfig(max_tokens=110)
        )
        timed = [t for t in played if t.status is Status.TRUNCATED_TIME]
        assert all(t.steps[1].finish == "timeout" and t.turns == (sum(t.mask) > 0) for t in timed)
        cut = [t for t in timed if sum(t.mask) > 1]
    for t in cut[:3]:
        request = Request("", t.tokens[: t.prompt_length], 12, 0)
        response = Completion("", t.tokens[t.prompt_length :], t.logprobs[t.prompt_length :], "", 0)
        assert len(response.tokens) < 110
        assert difference_from_transformers(model, request, response) < 1e-4
    assert cut


def test_time_is_over_for_those_who_wait_too(engines: ActorGroup, chat: Renderer) -> None:
    """Computes one request at a time; most requests time out while waiting."""
    start = time.perf_counter()
    played = play(engines, chat, products(200), 4, concurrency=1, trajectory_timeout_s=0.05)
    assert time.perf_counter() - start < 60
    waited = [t for t in played if t.status is Status.TRUNCATED_TIME and not sum(t.mask)]
    assert waited
    assert all((t.turns, t.reward, len(t.tokens)) == (0, 0.0, t.prompt_length) for t in waited)
    # The engine still works.
    assert not any(t.status is Status.TRUNCATED_TIME for t in play(engines, chat, products(4), 2))


def test_one_bad_environment_ends_one_trajectory(engines: ActorGroup, chat: Renderer) -> None:
    faults = ["none", "init", "raise", "hang", "timeout", "close"]
    ended = play(engines, chat, [talk(i, "faulty", fault=fault) for i, fault in enumerate(faults)])
    status = {fault: t.status for fault, t in zip(faults, ended, strict=True)}
    assert status["init"] is status["raise"] is status["timeout"] is Status.ERROR_ENV
    assert status["hang"] is Status.ERROR_ENV_TIMEOUT
    assert not status["none"].failed
    assert not status["close"].failed  # judged before closing
    assert [t.reward for t in ended] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert "RuntimeError('no database')" in ended[1].metadata["error"]
    assert "rollout.env_timeout_s=3" in ended[3].metadata["error"]
    assert ended[1].response_length == 0
    assert len(ended[1].tokens) == len(ended[1].mask) == ended[1].prompt_length
    assert all("user_envs.py, line " in ended[i].metadata["at"] for i in (1, 2, 3, 4))
    assert "close" in ended[5].metadata["close_error"]


def test_a_killed_engine_is_named_and_leaves_nothing(model: Path, chat: Renderer, engines: ActorGroup) -> None:
    """Kills the module's engine; must be the last test."""
    group = engines.where[0].pid
    children = [pid for pid in reaper.members(group) if pid != group]
    assert children
    os.kill(group, signal.SIGKILL)
    with pytest.raises(ActorFailed, match=r"engine-0 \(rank 0\) failed in .*died"):
        play(engines, chat, products(4), 4)
    engines.shutdown()
    assert not reaper.members(group)


def a_call_under_way_fails_with_its_engine(engines: ActorGroup, rank: int) -> None:
    """Checks that a running call fails if the core process is killed; vLLM itself would never answer."""
    core = vllm_process(engines, rank)
    os.kill(core, signal.SIGSTOP)
    call = engines.submit(rank, "probe")
    time.sleep(1)
    os.kill(core, signal.SIGKILL)
    with pytest.raises(ActorFailed, match="EngineDied"):
        gather([call], 60)


@pytest.mark.slow
def test_what_a_dead_engine_had_is_answered_by_the_others(engines: ActorGroup, model: Path, chat: Renderer) -> None:
    """Compares tokens with and without the fault; if the last engine dies, the phase is played again."""
    pair = start_engine("pair", spec_of(model, ROLLOUT, weights="auto"), model.parent, engines=2)
    fleet = serving(pair, restarts=2)
    refilled: list[list[int]] = []

    def refill() -> None:
        refilled.append(fleet.ensure_running())
        fleet.serve(refilled[-1])

    def tokens() -> list[list[int]]:
        groups = generator.generate(products(64), 8, FREE, seed="0/1")
        return [t.tokens for group in groups for t in group.trajectories]

    try:
        with Generator(fleet, chat, ROLLOUT, USER) as generator:
            expected = tokens()
            # A whole actor, then only vLLM's process of the other engine.
            for rank, victim in ((1, pair.where[1].pid), (0, vllm_process(pair, 0))):
                timer = threading.Timer(0.15, os.kill, [victim, signal.SIGKILL])
                timer.start()
                generator.refill = refill
                assert tokens() == expected
                timer.join()
                assert rank not in fleet.serving or refilled
            assert len(refilled) == 1
            a_call_under_way_fails_with_its_engine(pair, fleet.serving[0])
    finally:
        fleet.close()
        pair.shutdown()
