"""Two hundred random conversations through a real engine: training uses exactly the engine's input and output.

The reference is built by brute force from a recording of vLLM's inputs and outputs; tokens between two turns come from
the environment. The reference uses none of the agent's code.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema import AlgorithmConfig, BuildConfig, EnvironmentConfig, RolloutConfig, SamplingConfig
from skyrl_mega.engines.vllm.spec import EngineSpec
from skyrl_mega.envs.base import BaseTextEnv, Message
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.megatron.packing import pack
from skyrl_mega.models import tiny
from skyrl_mega.models.char_tokenizer import SPECIAL
from skyrl_mega.parallel.balance import balance
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generator import Generator
from skyrl_mega.trajectories.trajectory import Group, Status, Trajectory
from tests.megatron.layouts import policy_logprobs
from tests.support.batches import make_batch, mini_batches
from tests.support.chats import CHATML, characters, qwen
from tests.support.engines import Recorder, build_model, build_model_of, serving, start_engine

LONGEST = 400
PIECES = (
    *SPECIAL,
    *("<|im_end|>", "<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>", "<|vision_pad|>", "<|im_start|>user"),
    *("<think>", "</tool_response>", "<answer>gold</answer>"),
    *("", "", " ", "\n", "ok", "42", "{}", "a longer reply of the tool, with words"),
    *("naïve", "語", "🙂", "\u200b", "\u0000", "Ω"),
)
"""Texts of environments: names of control tokens, empty texts, and letters difficult for tokenizers."""


class Noise(BaseTextEnv):
    """An environment with random messages, determined by `extra_info.seed` and the turn; ends or fails at random."""

    def step(self, action: str) -> Any:
        """Returns up to three messages, or fails."""
        self.turns += 1
        observations, fate = noise(self.extras["extra_info"]["seed"], self.turns)
        if fate < 0.02:
            raise RuntimeError("by chance")
        return {"observations": observations, "reward": fate, "done": fate > 0.9, "metadata": {}}


def noise(seed: int, turn: int) -> tuple[list[Message], float]:
    """Returns random messages, and a number in [0, 1)."""
    rng = random.Random(f"{seed}/{turn}")
    roles = rng.choice([["user"], ["user"], ["tool"], ["tool", "tool"], ["user", "tool", "user"], [], ["assistant"]])
    return [
        {"role": role, "content": "".join(rng.choices(PIECES, k=rng.randint(0, 4)))} for role in roles
    ], rng.random()


ENVIRONMENT = EnvironmentConfig(classes={"noise": f"{__name__}:Noise"})


@dataclass
class Turn:
    """A request as seen by the engine."""

    given: list[int]
    produced: list[int]
    logprobs: list[float]
    finish: str


@dataclass
class Phase:
    """Trajectories, and the engine's view of each."""

    chat: Renderer
    trajectories: list[Trajectory]
    turns: list[list[Turn]]


def play(engine: ActorGroup, chat: Renderer, name: str, count: int, rollout: RolloutConfig) -> Phase:
    """Plays `count` / 2 prompts with two samples each, and collects the recording."""
    rng = random.Random(name)
    prompts = [
        Prompt(
            uid,
            [{"role": "user", "content": "".join(rng.choices(PIECES, k=rng.randint(0, 3)))}],
            "noise",
            {"extra_info": {"seed": f"{name}{uid}"}},
        )
        for uid in range(count // 2)
    ]
    with Generator(serving(engine), chat, rollout, ENVIRONMENT) as generator:
        groups = generator.generate(prompts, 2, rollout.sampling, seed=name)
    trajectories = [t for group in groups for t in group.trajectories]
    seen = engine.call_one(0, "recording", timeout=180)
    turns: list[list[Turn]] = [[] for _ in trajectories]
    for place, of_one in enumerate(turns):
        while (request := f"{name}/{place}/{len(of_one)}") in seen:
            of_one.append(Turn(**seen[request]))
    assert sum(map(len, turns)) == sum(request.startswith(f"{name}/") for request in seen)
    return Phase(chat, trajectories, turns)


def check_tokens(phase: Phase) -> None:
    """Compares tokens, mask and log-probs of each trajectory with the recording, to the last bit."""
    for t, turns in zip(phase.trajectories, phase.turns, strict=True):
        tokens, mask, logprobs = list(turns[0].given), [0] * len(turns[0].given), [0.0] * len(turns[0].given)
        for turn in turns:
            assert turn.given[: len(tokens)] == tokens  # earlier tokens never change
            between = turn.given[len(tokens) :]
            tokens += between + turn.produced
            mask += [0] * len(between) + [1] * len(turn.produced)
            logprobs += [0.0] * len(between) + turn.logprobs
        # Engines compute log-probs in float32: a float32 array loses nothing.
        assert (list(t.tokens), list(t.mask), list(t.logprobs), t.turns) == (tokens, mask, logprobs, len(turns))
        assert t.prompt_length == len(turns[0].given)


def check_environments_words(phase: Phase) -> Counter[str]:
    """Checks the tokens between turns: the template's text of the environment's messages, with only the template's
    control tokens. Returns counts of the cases met."""
    chat, counted = phase.chat, Counter()
    control = re.compile("|".join(re.escape(text) for text in chat.control.values()))
    unknown = chat.tokenizer.unk_token_id

    def tail(messages: list[Message], mark: str) -> str:
        text = chat.tokenizer.apply_chat_template(
            [{"role": "user", "content": "-"}, {"role": "assistant", "content": mark}, *messages],
            tokenize=False,
            add_generation_prompt=True,
        )
        return str(text).partition(mark)[2]

    for t, turns in zip(phase.trajectories, phase.turns, strict=True):
        for before, turn, number in zip(turns, turns[1:], range(1, 100), strict=False):
            between = turn.given[len(before.given) + len(before.produced) :]
            observations, _ = noise(t.prompt.extras["extra_info"]["seed"], number)
            text = tail(observations, "@@")
            templates = control.findall(tail([{**m, "content": "x"} for m in observations], "@@"))
            last = before.produced[-1]
            if last in chat.stop_tokens and text.startswith(end := chat.tokenizer.decode([last])):
                text, templates = text.removeprefix(end), templates[1:]
                counted["turns that end themselves"] += 1
            controls = [chat.control[token] for token in between if token in chat.control and token != unknown]
            assert controls == templates, (observations, chat.tokenizer.decode(between))
            if unknown is None or (text.isascii() and "\0" not in text):
                assert chat.tokenizer.decode(between) == text
                counted["texts compared"] += 1
            counted["control tokens spelled"] += sum(len(control.findall(m["content"])) for m in observations)
            counted["empty replies"] += not "".join(m["content"] for m in observations)
    return counted


def check_training(phase: Phase, model: Path, context: int, **layout: int) -> None:
    """Compares each rank's inputs, targets and weights after batch, mini-batches and packing, and the policy's
    log-probs, with the trajectories."""
    pairs = [phase.trajectories[i : i + 2] for i in range(0, len(phase.trajectories), 2)]
    groups = [Group(pair[0].prompt, pair) for pair in pairs]
    batch = make_batch(groups, AlgorithmConfig(), RolloutConfig(max_response_tokens=LONGEST))
    (mini,) = mini_batches(batch, None, AlgorithmConfig())
    trained = {}
    for rows in balance(mini.lengths.tolist(), 1, 300 * context)[0]:
        part = mini.take(rows)
        micros = [pack(part, context=context, context_rank=r, tensor=2) for r in range(context)]
        for micro in micros:
            assert micro.row.sequence_L is not None and micro.row.position_L is not None
            for sequence, position, given, target, weight in zip(
                micro.row.sequence_L.tolist(),
                micro.row.position_L.tolist(),
                micro.tokens[0].tolist(),
                micro.targets.tolist(),
                micro.columns["weights"].tolist(),
                strict=True,
            ):
                if sequence < len(rows):
                    assert (rows[sequence], position) not in trained
                    trained[rows[sequence], position] = given, target, weight
    learned = sum(
        sum(len(turn.produced) for turn in turns)
        for t, turns in zip(phase.trajectories, phase.turns, strict=True)
        if not t.status.failed
    )
    logprobs = policy_logprobs(model, batch.tokens, ranks=2, **layout)
    compared = 0
    for row, (t, turns) in enumerate(zip(phase.trajectories, phase.turns, strict=True)):
        whole = turns[-1].given + turns[-1].produced
        by_position = {len(turn.given) + i: value for turn in turns for i, value in enumerate(turn.logprobs)}
        for i in range(len(whole) - 1):
            given, target, weight = trained[row, i]
            assert (given, target) == (whole[i], whole[i + 1])
            expected = 1 / learned if i + 1 in by_position and not t.status.failed else 0.0
            assert weight == pytest.approx(expected, rel=1e-6, abs=0), (row, i)
            if weight:
                assert logprobs[batch.tokens.starts[row] + i + 1] == pytest.approx(by_position[i + 1], abs=1e-4), (
                    row,
                    i,
                )
                compared += 1
    assert compared == learned > 300


def check_variety(trajectories: list[Trajectory], turns: list[list[Turn]]) -> None:
    """Checks that all kinds of endings and lengths occurred, because the comparison is worthless otherwise."""
    ends = Counter(t.status for t in trajectories)
    assert min(ends[s] for s in (Status.COMPLETED, Status.TRUNCATED_TURNS, Status.TRUNCATED_TOKENS)) >= 5, ends
    assert ends[Status.ERROR_ENV] >= 1, ends
    lengths = Counter(len(of_one) for of_one in turns)
    assert sum(lengths[n] for n in lengths if n >= 3) >= 30, lengths


def engine_of(path: Path, logs: Path, rollout: RolloutConfig) -> ActorGroup:
    """Starts a recording engine; the caller shuts the group down."""
    spec = EngineSpec(
        path=str(path), dtype="float32", device="cpu", rollout=rollout, max_length=LONGEST, weights="auto"
    )
    return start_engine(path.name, spec, logs, kind=Recorder)


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with session(actors=1):
        yield


def rollout_of(stop: list[str], **changes: Any) -> RolloutConfig:
    """Returns settings of four turns with at most 30 tokens each, with `changes`."""
    base = RolloutConfig(
        kv_cache_gib=0.1,
        max_turns=4,
        max_prompt_tokens=100,
        max_length=LONGEST,
        max_response_tokens=300,
        sampling=SamplingConfig(max_tokens=30, stop=stop),
    )
    return replace(base, **changes)


@pytest.mark.slow
def test_characters(tmp_path: Path) -> None:
    """Uses the default template and a template closing every turn; budgets of turns, response and length; a policy with
    context parallelism."""
    model = build_model(tmp_path / "moe", "qwen3_moe", seed=3, max_length=LONGEST)
    rollout = rollout_of([*"Ze4#tqK(", "?", "xy"])
    default_chat, chatml = Renderer(str(model)), characters(tmp_path / "chatml", CHATML)
    engine = engine_of(model, tmp_path, rollout)
    try:
        phases = [
            play(engine, default_chat, "own", 60, rollout),
            play(engine, chatml, "chatml", 50, rollout),
            play(engine, default_chat, "response", 16, replace(rollout, max_response_tokens=60)),
            play(engine, chatml, "length", 14, replace(rollout, max_length=110)),
        ]
    finally:
        engine.shutdown()
    counted: Counter[str] = Counter()
    for phase in phases:
        check_tokens(phase)
        counted += check_environments_words(phase)
    assert min(counted.values()) >= 10 and len(counted) == 4, counted
    everything = Phase(default_chat, [t for p in phases for t in p.trajectories], [t for p in phases for t in p.turns])
    check_variety(everything.trajectories, everything.turns)
    for phase, limit in ((phases[2], 60), (phases[3], 110)):
        assert any(t.status is Status.TRUNCATED_TOKENS and t.turns > 1 for t in phase.trajectories)
        assert all((t.response_length if limit == 60 else len(t.tokens)) <= limit for t in phase.trajectories)
    spelled = [k for t in everything.trajectories for k, m in zip(t.tokens, t.mask, strict=True) if m]
    # Control tokens written by the policy are kept.
    assert default_chat.tokenizer.convert_tokens_to_ids("<user>") in spelled
    check_training(everything, model, context=2)


@pytest.mark.slow
@pytest.mark.nightly
def test_qwen(real_data: Path, tmp_path: Path) -> None:
    """Uses Qwen3's tokenizer of 151,643 pieces, its template and both end tokens; a policy with tensor parallelism."""
    path = qwen(real_data, tmp_path / "qwen")
    sizes = BuildConfig(architecture="qwen3", hidden=64, layers=2, heads=2, kv_heads=2, head_dim=32, tied=True)
    given = json.loads((real_data / "data" / "qwen_tokenizer" / "qwen3_4b_config.json").read_text())
    ids = {key: given[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    hf = tiny.hf_config(replace(sizes, max_length=LONGEST)) | ids | {"pad_token_id": None}
    build_model_of(path, hf, seed=5)
    chat = Renderer(str(path))
    weights = load_file(path / "model.safetensors")
    # The end token would be one draw in 151,936 otherwise
    weights["model.embed_tokens.weight"][chat.tokenizer.eos_token_id] *= 8
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    rollout = rollout_of(["z", "ing", "#"])
    engine = engine_of(path, tmp_path, rollout)
    try:
        phase = play(engine, chat, "qwen", 60, rollout)
    finally:
        engine.shutdown()
    check_tokens(phase)
    counted = check_environments_words(phase)
    assert min(counted.values()) >= 5 and len(counted) == 4, counted
    check_training(phase, path, context=1, tensor=2)
