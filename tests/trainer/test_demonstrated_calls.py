"""Tool calls in demonstrations: text written by the chat template is learned; other templates are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.rows import load_demonstrations, load_prompts
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trainer.sft_warmup import encode
from tests.support.chats import CHATML, characters, qwen

ASKED = [{"role": "user", "content": "27+58"}]
CALLS = [
    {"id": "1", "type": "function", "function": {"name": "calculate", "arguments": {"expression": "27+58"}}},
    {"id": "2", "type": "function", "function": {"name": "look", "arguments": {"at": "</think> <|im_end|> ü\n"}}},
]
RESULTS = [{"role": "tool", "content": "85"}, {"role": "tool", "content": "nothing"}]
ANSWER = {"role": "assistant", "content": "It is 85."}


def written(path: Path, turns: list[dict[str, Any]]) -> Path:
    rows = [{"prompt": ASKED, "extra_info": {"demonstration": turns}}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def learned(chat: Renderer, file: Path) -> tuple[str, str]:
    """Returns the text of the single demonstration, and the learned parts."""
    batch = encode(load_demonstrations([file]), chat)
    return chat.tokenizer.decode(batch.tokens), chat.tokenizer.decode(batch.tokens[batch["mask"] == 1])


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("words", ["", "I calculate."])
def test_calls_are_learned_as_the_template_writes_them(
    real_data: Path, tmp_path: Path, words: str, as_text: bool
) -> None:
    """Encodes calls with arguments as a mapping or, as in OpenAI's format, as a JSON text."""
    chat = Renderer(str(qwen(real_data, tmp_path / "qwen")))
    calls = json.loads(json.dumps(CALLS))
    for call in calls if as_text else []:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    turns = [{"role": "assistant", "content": words, "tool_calls": calls}, *RESULTS, ANSWER]
    text, parts = learned(chat, written(tmp_path / "d.parquet", turns))
    mapped = [{"role": "assistant", "content": words, "tool_calls": CALLS}, *RESULTS, ANSWER]
    expected = chat.tokenizer.apply_chat_template([*ASKED, *mapped], tokenize=False)
    # Qwen3's template adds empty thoughts to a last turn without thoughts; the demonstration has none.
    assert text + "\n" == expected.replace("<think>\n\n</think>\n\n", "")
    first = expected.partition("<|im_start|>assistant\n")[2].partition("\n<|im_start|>user")[0]
    assert parts == first.replace("<think>\n\n</think>\n\n", "") + "It is 85.<|im_end|>"
    batch = encode(load_demonstrations([tmp_path / "d.parquet"]), chat)
    ends = [token for token in batch.tokens[batch["mask"] == 1].tolist() if token in chat.stop_tokens]
    assert len(ends) == 2  # no argument contains an end token
    assert [(call.name, call.arguments) for call in chat.parse(parts).tool_calls] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in CALLS
    ]


def test_a_template_that_writes_no_calls_is_refused(tmp_path: Path) -> None:
    chat = characters(tmp_path / "model", CHATML)
    [demonstration] = load_demonstrations(
        [written(tmp_path / "d.parquet", [{"role": "assistant", "content": "x", "tool_calls": CALLS[:1]}])]
    )
    with pytest.raises(UserError, match="does not write the tool_calls of a demonstration") as refused:
        encode([demonstration], chat)
    assert "\n" not in str(refused.value)


def test_with_the_tiny_models_template(tmp_path: Path) -> None:
    chat = characters(tmp_path / "model")
    turns = [{"role": "assistant", "content": "", "tool_calls": CALLS[:1]}, RESULTS[0], ANSWER]
    _, parts = learned(chat, written(tmp_path / "d.parquet", turns))
    assert parts.startswith("<tool_call>\n{") and "27+58" in parts and parts.count("<eos>") == 2


WRONG = {
    "tool_calls: 5: allowed is": [5],
    "tool_calls: {name: ''}: allowed is {\"function\"": [{"name": ""}],
    "tool_calls: the arguments of say are not a JSON object": [{"function": {"name": "say", "arguments": "[1]"}}],
    "tool_calls: Expecting value": [{"function": {"name": "say", "arguments": "x"}}],
}


@pytest.mark.parametrize("line", WRONG)
def test_calls_that_nobody_can_read_are_refused_by_row(tmp_path: Path, line: str) -> None:
    file = written(tmp_path / "d.parquet", [{"role": "assistant", "content": "", "tool_calls": WRONG[line]}])
    with pytest.raises(UserError) as refused:
        load_demonstrations([file])
    assert f"row 0, column extra_info.demonstration: {line}" in str(refused.value)
    rows = [{"prompt": [*ASKED, {"role": "assistant", "content": "", "tool_calls": WRONG[line]}, *ASKED]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    with pytest.raises(UserError) as refused:
        load_prompts([tmp_path / "p.parquet"], EnvironmentConfig(default="calculator"))
    assert "row 0, column prompt: tool_calls" in str(refused.value)


def test_thoughts_in_a_field_of_their_own_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "d.parquet", [{"role": "assistant", "content": "5", "reasoning_content": "easy"}])
    with pytest.raises(UserError, match=r"row 0, .*: reasoning_content of an assistant's message is not trained on"):
        load_demonstrations([file])
