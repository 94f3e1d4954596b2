"""The `characters` tokenizer of models built from scratch: each printable ASCII character, and the newline, is a token.

Role marks are single tokens too, so a prompt costs its characters plus two. Every byte of a character outside the
alphabet becomes `<unk>`.

The tokenizer is a byte-level BPE without merges. For a qwen2 config.json, transformers loads any tokenizer as a
Qwen2Tokenizer, regardless of the named class, and keeps only vocabulary and merges.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PAD, UNKNOWN, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (PAD, UNKNOWN, BOS, EOS, *(f"<{role}>" for role in ROLES))
CHARACTERS = ("\n", *(chr(c) for c in range(32, 127)))
# Byte-level BPE writes a space and a newline as these letters.
_LETTERS = {" ": "Ġ", "\n": "Ċ"}
VOCABULARY = {token: i for i, token in enumerate((*SPECIAL, *(_LETTERS.get(c, c) for c in CHARACTERS)))}
"""Token → id; 104 entries."""

# Tools as name(arguments) with the call format; <role>content and calls; <eos> ends the assistant's turn.
CHAT_TEMPLATE = (
    "{%- if tools %}{{- '<system>' }}{%- for tool in tools %}{%- set function = tool['function'] %}"
    "{{- function['name'] ~ '(' ~ (function['parameters']['properties'] or {}) | join(', ') ~ ')\n' }}{%- endfor %}"
    '{{- \'<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>\' }}{%- endif %}'
    "{%- for message in messages %}"
    "{%- if message['role'] not in " + repr(list(ROLES)) + " %}"
    "{{- raise_exception('role ' ~ message['role'] ~ ' is not one of " + ", ".join(ROLES) + "') }}"
    "{%- endif %}"
    "{{- '<' ~ message['role'] ~ '>' ~ message['content'] }}"
    "{%- for call in message['tool_calls'] or [] %}{%- set function = call['function'] %}"
    "{{- '<tool_call>\n{\"name\": ' ~ (function['name'] | tojson) ~ ', \"arguments\": ' }}"
    "{{- (function['arguments'] | tojson) ~ '}\n</tool_call>' }}{%- endfor %}"
    "{%- if message['role'] == 'assistant' %}{{- '" + EOS + "' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"
)


def write_tokenizer(path: Path) -> None:
    """Writes the tokenizer, with chat template, into the existing directory `path`: tokenizer.json and
    tokenizer_config.json, over files of these names. Raises OSError if the directory is missing."""
    tokenizer = Tokenizer(models.BPE(VOCABULARY, [], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    config = {
        # Without the class, AutoTokenizer goes by config.json's model_type and loads an empty tokenizer of that model.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
