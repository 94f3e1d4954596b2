"""A model's tokenizer, chat template and end tokens, as read and used by a run."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from skyrl_mega.models.char_tokenizer import VOCABULARY, write_tokenizer
from tests.fuzz.target import Target
from tests.fuzz.values import packed, replaced, spoilt, unpacked, value

TEMPLATES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "{{ messages[0]['content'] }}",
    "{{ messages }}",
    "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "{% for m in messages %}{{ m['content'][:5] }}{% endfor %}",
    "{{ messages[1].content }}",
    "{{ 1 / 0 }}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception('a\x1b[2J\nb') }}",
    "{% for m in messages %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
    "{% include 'x' %}",
    "{{ strftime_now('%Y') }}{{ messages[0].content }}",
    "{{ range(10 ** 9) | list }}",
    "{{ 'x' * 10 ** 5 }}{{ messages[0].content }}",
    "{% macro a(n) %}{{ a(n + 1) }}{% endmacro %}{{ a(0) }}",
    "{% for m in messages %}{{ m.content }}\ufdd0{% endfor %}",
    "",
)
SAID = [
    [{"role": "user", "content": "1+1"}],
    [{"role": "system", "content": "<eos>é\0"}, {"role": "user", "content": ""}],
]
SAID += [[{"role": role, "content": "a<user>b"} for role in ("user", "assistant", "tool", "user")]]
GENERATION = {"eos_token_id": [3, 2], "temperature": 0.6, "bos_token_id": 2}
MODEL = {"model_type": "qwen2", "vocab_size": len(VOCABULARY), "eos_token_id": 3}


@cache
def _files() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        written = {file.name: json.loads(file.read_text()) for file in Path(folder).iterdir()}
    return {**written, "generation_config.json": GENERATION, "config.json": MODEL}


def _tokenizer(random: Random) -> Any:
    files = {name: json.dumps(content).encode() for name, content in _files().items()}
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        name = random.choice(list(_files()))
        match random.randrange(6):
            case 0:
                files[name] = spoilt(random, files[name])
            case 1:
                files["chat_template.jinja"] = random.choice(TEMPLATES).encode()
            case 2:
                files["chat_template.jinja"] = spoilt(
                    random, _files()["tokenizer_config.json"]["chat_template"].encode()
                )
            case 3:
                files[name] = json.dumps(value(random)).encode()
            case _:
                files[name] = json.dumps(replaced(random, _files()[name])).encode()
    kept = {name: data for name, data in files.items() if random.random() < 0.97}
    return {name: packed(data) for name, data in kept.items()}


def _run_tokenizer(case: Any, folder: Path) -> None:
    from skyrl_mega.rollout.agent.renderer import Renderer

    for name, data in case.items():
        (folder / name).write_bytes(unpacked(data))
    chat = Renderer(str(folder))
    chat.check_vocabulary(len(VOCABULARY))
    for messages in SAID:
        tokens = chat.first(messages)
        assert all(type(token) is int and token >= 0 for token in tokens)
        for last in (5, *chat.stop_tokens):
            assert isinstance(chat.following(last, messages), list)
        chat.text(tokens).encode()


def _prepare() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    whole = {name: packed(json.dumps(content).encode()) for name, content in _files().items()}
    with tempfile.TemporaryDirectory() as folder:  # imports take seconds
        _run_tokenizer(whole, Path(folder))


TARGETS = {"tokenizer": Target(_tokenizer, _run_tokenizer, prepare=_prepare)}
