"""Templates with endless output, and texts too long for any sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.rollout.agent import chat_template
from skyrl_mega.rollout.agent.renderer import Renderer, TooLong
from tests.support.chats import characters
from tests.support.tokenizers import byte_level, directory

ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 999 }}{% endfor %}{% endfor %}",
    "{{ 'x' * 10 ** 11 }}{{ messages[0].content }}",
    "{{ 10 ** 11 * 'x' }}{{ messages[0].content }}",
)


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_that_writes_without_end(tmp_path: Path, template: str) -> None:
    path = directory(tmp_path, byte_level(), template, eos_token="<|im_end|>")
    with pytest.raises(UserError, match=r"the chat template refuses messages of user.*: it (writes more|makes a text)"):
        Renderer(str(path))


def test_a_long_message_is_none_of_the_templates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chat = characters(tmp_path / "model")
    monkeypatch.setattr(chat_template, "MOST_CHARACTERS", 100)
    chat.first([{"role": "user", "content": "x" * 1000}])


def test_a_prompt_that_cannot_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    characters(tmp_path / "model")
    chat = Renderer(str(tmp_path / "model"), RolloutConfig(max_length=100, max_prompt_tokens=50))
    fits, too_long = [[{"role": "user", "content": "x" * size}] for size in (40, 200)]
    assert chat.prompt(fits, "here", most=50) and chat.prompt(too_long, "here", most=50) is None
    encoded: list[int] = []
    monkeypatch.setattr(chat, "encode", lambda text: encoded.append(len(text)) or [])
    endless = [{"role": "user", "content": "x" * 200_000}]
    assert chat.prompt(endless, "here", most=50) is None
    for render in (lambda: chat.first(endless), lambda: chat.following(5, endless)):
        with pytest.raises(TooLong):
            render()
    assert sum(encoded) < 1000
