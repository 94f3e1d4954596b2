"""Demonstrations as tokens: the same tokens as a rollout of the same words, and only the policy's tokens are
learned."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.config.schema import BuildConfig, EnvironmentConfig
from skyrl_mega.data.rows import Demonstration
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.multiply.env import MultiplyEnv
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.tiny import build
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trainer.sft_warmup import encode
from tests.support.engines import LOADING

PROMPT = [{"role": "system", "content": "Multiply."}, {"role": "user", "content": "27 * 6"}]


def chat_of(path: Path) -> Renderer:
    with LOADING:
        return Renderer(str(path))


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("warmup") / "model"
    build(BuildConfig(hidden=8, layers=1), folder)
    return chat_of(folder)


def learned(chat: Renderer, demonstration: Demonstration) -> tuple[str, list[str]]:
    """Returns the whole text of a demonstration, and the parts covered by the mask."""
    batch = encode([demonstration], chat)
    mask = batch["mask"].numpy()
    assert mask.dtype == np.float32 and len(mask) == len(batch.tokens) == batch.lengths[0]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    parts = [chat.tokenizer.decode(batch.tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return chat.tokenizer.decode(batch.tokens), parts


WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=8)


@given(st.lists(st.tuples(WORDS, st.lists(WORDS, min_size=1, max_size=2)), max_size=3), WORDS)
@settings(max_examples=50, deadline=None)
def test_only_the_assistant_is_learned(characters: Renderer, exchanges: list[tuple[str, list[str]]], last: str) -> None:
    turns = []
    for answer, replies in exchanges:
        turns += [{"role": "assistant", "content": answer}, *({"role": "user", "content": t} for t in replies)]
    turns.append({"role": "assistant", "content": last})
    text, parts = learned(characters, Demonstration(PROMPT, turns))
    assert text == characters.tokenizer.apply_chat_template([*PROMPT, *turns], tokenize=False)
    assert parts == [f"{m['content']}<eos>" for m in turns if m["role"] == "assistant"]


@pytest.mark.slow
def test_with_a_real_models_template(smollm2: Path) -> None:
    chat = chat_of(smollm2)
    answers, reply = (
        [{"role": "assistant", "content": f"It is {i}."} for i in range(2)],
        {"role": "user", "content": "No."},
    )
    text, parts = learned(chat, Demonstration(PROMPT, [answers[0], reply, answers[1]]))
    # The template ends each message with a newline; the policy does not write it.
    assert text + "\n" == chat.tokenizer.apply_chat_template([*PROMPT, answers[0], reply, answers[1]], tokenize=False)
    assert parts == ["It is 0.<|im_end|>", "It is 1.<|im_end|>"]


def test_a_rollout_of_the_same_words_has_the_same_tokens(characters: Renderer) -> None:
    answers = ["17", "\\boxed{152}", "\\boxed{162}"]

    class Scripted:
        """A policy with prepared answers."""

        async def generate(self, request: Request) -> Completion:
            tokens = [
                *characters.encode(answers[int(request.id.rpartition("/")[2])]),
                characters.tokenizer.eos_token_id,
            ]
            return Completion(request.id, tokens, [-1.0] * len(tokens), "stop", ((0, 0),))

    async def play() -> tuple[list[int], list[int]]:
        limits = TrajectoryLimits(turn=100, response=500, length=1000, turns=3, env_timeout_s=60)
        agent = Agent(Scripted(), characters, EnvironmentConfig(), limits, EnvPool(1))  # type: ignore[arg-type]
        prompt = Prompt(0, PROMPT, "multiply", {"reward_spec": {"ground_truth": "162"}})
        t = await agent.play(prompt, 0, "0")
        assert (t.turns, t.reward) == (3, 1.0)
        return list(t.tokens), list(t.mask)

    tokens, mask = asyncio.run(play())
    env = MultiplyEnv(extras={"reward_spec": {"ground_truth": "162"}, "max_turns": 3})
    turns = [m for a in answers for m in ({"role": "assistant", "content": a}, *env.step(a)["observations"])]
    batch = encode([Demonstration(PROMPT, turns)] * 2, characters)
    for start, end in pairwise([0, *np.cumsum(batch.lengths.numpy())]):
        assert batch.tokens[start:end].tolist() == tokens
        assert batch["mask"][start:end].tolist() == mask
