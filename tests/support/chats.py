"""Tokenizers and chat templates without a model."""

from __future__ import annotations

import shutil
from pathlib import Path

from skyrl_mega.models.char_tokenizer import EOS, write_tokenizer
from skyrl_mega.rollout.agent.renderer import Renderer

CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>\n' + m['content'] + '" + EOS + "\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
)
"""A template that closes every turn; the newline after the end token belongs to the template."""

TOOLS = (
    "{% if tools %}{{ '<system>\n# Tools\n' }}{% for t in tools %}{{ t | tojson ~ '\n' }}{% endfor %}"
    '{{ \'Call one so: <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>' + EOS + "\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<user>' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '" + EOS + "\n' }}{% endif %}"
    "{% else %}{{ '<' + m['role'] + '>\n' + m['content'] + '" + EOS + "\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
)
"""A template like Qwen's: tools in a system message, calls in tags, and all results of a turn in a user message."""


def characters(path: Path, template: str | None = None) -> Renderer:
    """Returns the renderer of the `characters` tokenizer, with the default template or `template`."""
    path.mkdir(parents=True)
    write_tokenizer(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    chat = Renderer(str(path))
    if template is not None:
        chat.tokenizer.chat_template = template
    return chat


def qwen(real_data: Path, path: Path) -> Path:
    """Copies Qwen3's tokenizer, template and end tokens into a folder."""
    source = real_data / "data" / "qwen_tokenizer"
    path.mkdir(parents=True, exist_ok=True)
    for name, file in (
        ("vocab.json", "vocab.json"),
        ("merges.txt", "merges.txt"),
        ("qwen3_tokenizer_config.json", "tokenizer_config.json"),
        ("qwen3_generation_config.json", "generation_config.json"),
    ):
        shutil.copy(source / name, path / file)
    return path
