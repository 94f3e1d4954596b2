"""Budgets, versions and texts of short trajectories, counted by hand: the `characters` tokenizer has a token per letter
and per role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.char_tokenizer import EOS, VOCABULARY, write_tokenizer
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.support.scripted import Scripted, play

USER = EnvironmentConfig(classes={name: f"tests.rollout.user_envs:{name.title()}" for name in ("talk", "rewriting")})
OPENING = len(["<user>", *"hello", "<assistant>"])
ANSWER = len([*"ab", EOS])
OBSERVATION = len(["<user>", *"turn 1: 2 letters", "<assistant>"])


def played(script: Scripted, env: str = "talk", **limits: Any) -> Trajectory:
    prompt = Prompt(0, [{"role": "user", "content": "hello"}], env, {"reward_spec": {}, "extra_info": {}})
    return play(script.chat, USER, [(prompt, script)], **limits)[0]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_an_observation_that_fills_the_response_budget_is_left_out(characters_chat: Renderer, left: int) -> None:
    t = played(Scripted(characters_chat, [f"ab{EOS}", f"cd{EOS}"]), response=ANSWER + OBSERVATION + left)
    assert t.status is Status.TRUNCATED_TOKENS
    assert len(t.tokens) == OPENING + ANSWER + (OBSERVATION + left if left else 0)
    assert (t.turns, sum(t.mask)) == (2 if left else 1, ANSWER + left)


def test_the_longest_sequence_bounds_what_the_policy_sees_and_not_all_that_it_has_said(
    characters_chat: Renderer,
) -> None:
    """Computes the longest of six contexts (the fourth turn's), and allows 20 more tokens."""
    prompt_length = len(["<user>", *"so far: line 1", "<assistant>", *"yes", EOS, "<user>", *"go on", "<assistant>"])
    turn = len([*"line 2", EOS])
    longest = prompt_length + turn + len(["<user>", *"go on", "<assistant>"]) + turn
    script = Scripted(characters_chat, [f"line {i}{EOS}" for i in range(6)])
    t = played(script, "rewriting", turns=9, rewrites=True, length=longest + 20)
    assert (t.status, t.turns) == (Status.COMPLETED, 6)
    assert len(t.tokens) > 2 * (longest + 20), "all conversations together have many more"
    assert min(request.max_tokens for request, _ in script.turns) == 20 + turn


def test_a_text_ends_before_any_token_that_ends_a_turn(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    other = VOCABULARY["<tool>"]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{VOCABULARY[EOS]}, {other}]}}')
    chat = Renderer(str(tmp_path))
    ab = [VOCABULARY["a"], VOCABULARY["b"]]
    assert [chat.text([*ab, end]) for end in (VOCABULARY[EOS], other)] == ["ab", "ab"]
    assert chat.text([*ab, other, VOCABULARY["c"]]) == "ab<tool>c", "only the last token ends it"


class Synced(Scripted):
    """A policy with new weights after two tokens of the first turn."""

    async def generate(self, request: Request) -> Completion:
        completion = await super().generate(request)
        versions = ((4, 0), (5, 2)) if len(self.turns) == 1 else ((5, 0),)
        return Completion(completion.id, completion.tokens, completion.logprobs, completion.finish, versions)


def test_tokens_after_a_sync_are_of_the_new_weights(characters_chat: Renderer) -> None:
    t = played(Synced(characters_chat, [f"abc{EOS}", f"d{EOS}"]), turns=2)
    second = OPENING + len([*"abc", EOS]) + len(["<user>", *"turn 1: 3 letters", "<assistant>"])
    assert t.versions == [(4, OPENING), (5, OPENING + 2), (5, second)]
    assert t.tokens_by_version() == [len("ab"), len(["c", EOS]), len(["d", EOS])]
