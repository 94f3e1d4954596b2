"""An environment with rewards for parts of an answer: the tokens with these rewards."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from skyrl_mega.algorithms.advantages import AdvantageInputs, per_token
from skyrl_mega.config.schema import AlgorithmConfig, EnvironmentConfig, RolloutConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.char_tokenizer import EOS
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.agent.token_rewards import characters
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.sequences import Column
from skyrl_mega.trajectories.trajectory import TOKEN_REWARDS, Group, Kind, Status
from tests.batch import test_token_inputs as walks
from tests.support.batches import make_batch, token_advantages
from tests.support.machine import within
from tests.support.scripted import Scripted, play

ENVIRONMENT = EnvironmentConfig(classes={"parts": "tests.rollout.user_envs:Parts"})
PROMPT = Prompt(0, [{"role": "user", "content": "hello"}], "parts", {"extra_info": {}})


@pytest.fixture(scope="module")
def bytes_and_more() -> Tokenizer:
    """Returns a byte-level tokenizer: a token per byte, and merges of some pairs."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a, b in zip("abcdĠ", "bcdea", strict=True)]
    tokens = [*letters, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@given(answer=st.text(alphabet="abcde 😀漢€\u0301ñ", min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_character_is_complete_with_its_last_byte(bytes_and_more: Tokenizer, answer: str) -> None:
    tokens = bytes_and_more.encode(answer).ids
    ends = characters(tokens, lambda some: str(bytes_and_more.decode(list(some))))
    length, expected = 0, []
    for token in tokens:
        length += len(bytes_and_more.id_to_token(token))  # a character of a byte-level token is a byte
        expected.append(len(answer.encode()[:length].decode(errors="ignore")))
    assert ends == expected


def test_bytes_that_are_no_character_lose_none_of_the_text(bytes_and_more: Tokenizer) -> None:
    """Decodes random tokens with invalid bytes: broken characters count with the following text."""
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randrange(bytes_and_more.get_vocab_size()) for _ in range(rng.randint(1, 30))]
        ends = characters(tokens, lambda some: str(bytes_and_more.decode(list(some))))
        assert ends == sorted(ends) and ends[-1] == len(bytes_and_more.decode(tokens)), tokens
    # No token alone is a character; decoding must not start over for each
    broken = [bytes_and_more.token_to_id("Ģ")] * 3000
    began = time.process_time()
    assert characters(broken, lambda some: str(bytes_and_more.decode(list(some))))[-1] == 3000
    assert within(time.process_time() - began, 0.3)


def test_a_special_token_has_no_character() -> None:
    pieces = ["", "a", "bc", "", "def", ""]
    assert characters(range(6), lambda some: "".join(pieces[i] for i in some)) == [0, 1, 3, 3, 6, 6]


def test_they_are_in_the_reward_and_at_their_tokens(characters_chat: Renderer, tmp_path: Path) -> None:
    script = Scripted(characters_chat, [f"abc{EOS}", f"de{EOS}"])
    (t,) = play(characters_chat, ENVIRONMENT, [(PROMPT, script)])
    # Parts: 0.5 for "a" and 0.25 for "abc" of the first answer, -1 for "d" of the second; each answer earns 1 besides.
    assert [step.reward for step in t.steps if step.kind is Kind.RESPONSE] == [1.75, 0.0] and t.reward == 1.75
    policy_positions = [i for i, is_policy in enumerate(t.mask) if is_policy]
    assert t.columns[TOKEN_REWARDS].values[policy_positions].tolist() == [0.5, 0.0, 0.25, 0.0, -1.0, 0.0, 0.0]
    parquet.write(tmp_path / "t.parquet", [t], columns=True)
    (back,) = parquet.read(tmp_path / "t.parquet")
    assert torch.equal(back.columns[TOKEN_REWARDS].values, t.columns[TOKEN_REWARDS].values)

    algorithm = AlgorithmConfig(advantage="tests.rollout.test_token_rewards:returns")
    batch = make_batch([Group(PROMPT, [t])], algorithm, RolloutConfig())
    assert TOKEN_REWARDS not in batch.tokens, "nothing that ranks have to be sent"
    advantages = token_advantages(batch, algorithm)[policy_positions]
    assert advantages.tolist() == [1.75, 1.25, 1.25, 1.0, 0.0, 1.0, 1.0]


@per_token()
def returns(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> torch.Tensor:
    """Returns the sum of rewards from each token on."""
    return inputs.token.returns(1.0)


@per_token()
def rewards(inputs: AdvantageInputs, algorithm: AlgorithmConfig) -> torch.Tensor:
    """Returns the reward of each token."""
    return inputs.token.rewards_T


@pytest.mark.parametrize("step_wise", ["off", "turns", "merged"])
def test_however_a_trajectory_is_cut_they_stay_where_they_are(step_wise: str) -> None:
    """Compares token rewards with a walk: some trajectories have parts, and the last token of an answer gets the
    remaining reward."""
    algorithm = AlgorithmConfig(advantage="tests.rollout.test_token_rewards:rewards")
    rollout = RolloutConfig(step_wise=step_wise)
    counted = 0
    for seed in range(20):
        rng = random.Random(seed)
        played = [walks.played(rng, 0, sample, step_wise != "off") for sample in range(4)]
        walk = iter(walks.expected([Group(PROMPT, played)], [t.reward for t in played]))
        wanted = []
        for t in played:
            policy_positions = [i for i, is_policy in enumerate(t.mask) if is_policy]
            parts = {i: rng.choice([0.0, 0.5, -2.0]) for i in policy_positions} if rng.random() < 0.7 else {}
            if parts:
                values = [parts.get(i, 0.0) for i in range(len(t.tokens))]
                t.columns[TOKEN_REWARDS] = Column(torch.tensor(values, dtype=torch.float64))
            if t.status.failed:
                continue
            walked = [(turn, reward) for _, turn, reward in (next(walk) for _ in policy_positions)]
            for place, (turn, reward) in enumerate(walked):
                last = place + 1 == len(walked) or walked[place + 1][0] != turn
                of_answer = [
                    parts.get(i, 0.0) for i, (other, _) in zip(policy_positions, walked, strict=True) if other == turn
                ]
                wanted.append(reward + parts.get(policy_positions[place], 0.0) - (sum(of_answer) if last else 0.0))
        batch = make_batch([Group(PROMPT, played)], algorithm, rollout)
        advantages = token_advantages(batch, algorithm)
        judged = batch.judged.repeat_interleave(batch.trajectory_tokens)
        assert advantages[batch.trained_here & judged].tolist() == pytest.approx(wanted)
        assert not advantages[~(batch.trained_here & judged)].any()
        counted += len(wanted)
    assert counted > 100


def test_what_fails_has_none(characters_chat: Renderer) -> None:
    script = Scripted(characters_chat, [f"abc{EOS}", f"{EOS}"])  # an empty answer cannot have parts
    (t,) = play(characters_chat, ENVIRONMENT, [(PROMPT, script)])
    assert t.status is Status.ERROR_ENV and t.reward == 0.0 and not t.columns
    assert "rewards_at[0] = tuple (1, -1.0); allowed: (end, reward), a number of characters" in t.metadata["error"]
