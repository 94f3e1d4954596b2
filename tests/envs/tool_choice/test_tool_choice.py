"""The next tool call of a recorded conversation: the reward by hand, and rows from a file of NeMo-Gym's form."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.data.rows import check_files, load_prompts
from skyrl_mega.envs.tool_choice.data import tables
from skyrl_mega.envs.tool_choice.env import ToolChoiceEnv
from skyrl_mega.envs.tools import definitions

BASH = {
    "name": "bash",
    "description": "Runs a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
LOOK = {"name": "bash", "arguments": {"command": "grep -rn total shop"}}


def text_of(*calls: dict[str, Any], words: str = "I look.") -> str:
    return "\n".join([words, *(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)])


def reward(truth: list[dict[str, Any]], text: str, **options: Any) -> Any:
    row = {"reward_spec": {"ground_truth": json.dumps(truth)}, "extra_info": {"tools": json.dumps([BASH])}}
    output = ToolChoiceEnv(options, row).step(text)
    assert output["done"] and output["observations"] == []
    return output["reward"]


def call(**arguments: Any) -> dict[str, Any]:
    return {"name": "edit", "arguments": arguments}


@pytest.mark.parametrize(
    ("expected", "given", "right"),
    [
        (call(path="a.py", line=3), call(line=3, path="a.py"), True),
        (call(path="a.py"), call(path="b.py"), False),
        (call(path="a.py"), {"name": "view", "arguments": {"path": "a.py"}}, False),
        (call(path="a.py"), call(path="a.py", line=3), False),
        (call(line=3), call(line=3.0), False),
        (call(line=1), call(line=True), False),
        (call(share=0.5), call(share=0.5 + 1e-9), True),
        (call(share=0.5), call(share=0.6), False),
        (call(lines=[1, {"a": "b"}]), call(lines=[1, {"a": "b"}]), True),
        (call(lines=[1, 2]), call(lines=[2, 1]), False),
        (call(lines=[1]), call(lines=[1, 2]), False),
        (call(text="two words"), call(text="three other words"), True),
        (call(text="two words"), call(text="two"), False),
        (call(nothing=None), call(nothing=None), True),
    ],
)
def test_equal_calls_are_right(expected: dict[str, Any], given: dict[str, Any], right: bool) -> None:
    assert reward([expected], text_of(given)) == float(right)


def test_texts_may_need_common_words() -> None:
    near = {"name": "bash", "arguments": {"command": "grep -n total shop"}}
    assert reward([LOOK], text_of(near), similarity=0.75) == 1.0, "3 of 4 words on both sides"
    assert reward([LOOK], text_of(near), similarity=0.8) == 0.0


def test_several_calls_are_right_in_any_order_and_no_call_is_left() -> None:
    a, b = call(path="a.py"), call(path="b.py")
    assert reward([a, b], text_of(b, a)) == 1.0
    assert reward([a, b], text_of(a)) == reward([a, b], text_of(a, a)) == reward([a], text_of(a, b)) == 0.0


def test_a_message_is_expected_without_a_call() -> None:
    assert reward([], "Which file do you mean?") == 1.0
    assert reward([], "") == reward([], text_of(LOOK)) == 0.0


def test_thoughts_are_no_calls_and_unreadable_calls_earn_nothing() -> None:
    assert reward([LOOK], f"<think>{text_of(LOOK)}</think>") == 0.0
    assert reward([LOOK], f"<think>so</think>{text_of(LOOK)}") == 1.0
    assert reward([LOOK], '<tool_call>{"name": "bash", "arguments": </tool_call>') == 0.0


def test_wrong_rows_are_refused() -> None:
    truth = json.dumps([LOOK])
    row = {"reward_spec": {"ground_truth": truth}, "extra_info": {"tools": json.dumps([BASH])}}
    assert ToolChoiceEnv.wrong_row(row, {}) is None
    bad_schema = json.dumps([{**BASH, "parameters": {"type": "array"}}])
    for info in ({}, {"tools": "{"}, {"tools": '{"a": 1}'}, {"tools": bad_schema}):
        assert "extra_info.tools" in str(ToolChoiceEnv.wrong_row({**row, "extra_info": info}, {}))
    for wrong in ("{}", "no json", '[{"name": "bash"}]', '[{"name": 1, "arguments": {}}]', json.dumps([LOOK] * 17)):
        assert ToolChoiceEnv.wrong_ground_truth(wrong)
    with pytest.raises(UserError, match=r"tool_choice cannot use a row: column extra_info\.tools: it is missing"):
        ToolChoiceEnv({}, {**row, "extra_info": {}})
    for spec in ({"ground_truth": "{}"}, {}):
        with pytest.raises(UserError, match=r"tool_choice cannot use a row: column reward_spec\.ground_truth\b.*not a"):
            ToolChoiceEnv({}, {**row, "reward_spec": spec})


def record(action: dict[str, Any]) -> dict[str, Any]:
    asked = {
        "instructions": "You fix bugs.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "The total is wrong."}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Where is it?"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": json.dumps(LOOK["arguments"])},
            {"type": "function_call_output", "call_id": "c1", "output": "shop/cart.py:3"},
        ],
        "tools": [{"type": "function", "strict": True, **BASH}],
    }
    return {"responses_create_params": asked, "expected_action": action, "agent_ref": {"name": "other"}}


def test_rows_come_from_recorded_conversations(tmp_path: Path) -> None:
    source = tmp_path / "swe1.jsonl"
    action = {"type": "function_call", "name": "bash", "arguments": '{"command": "sed -n 3p shop/cart.py"}'}
    batch = {"type": "function_call_batch", "calls": [action, action]}
    records = [record(each) for each in (action, batch, {"type": "message", "content": "Done."})]
    source.write_text("\n".join(map(json.dumps, records)))
    files = prepare(["tool_choice", "--output", str(tmp_path / "data"), "--source", str(source), "--test", "1"])
    assert [file.name for file in files] == ["train.parquet", "test.parquet"]
    config = EnvironmentConfig()
    assert check_files(files, config) == 3
    first, second = load_prompts(files[:1], config)
    assert [message["role"] for message in first.messages] == ["system", "user", "assistant", "tool"]
    _, asked, looked, seen = first.messages
    assert asked["content"] == "The total is wrong." and seen["content"] == "shop/cart.py:3"
    assert looked["reasoning_content"] == "Where is it?" and looked["content"] == "I look."
    assert json.loads(looked["tool_calls"])[0]["function"] == LOOK
    env = ToolChoiceEnv({}, first.extras)
    assert env.expected == [{"name": "bash", "arguments": {"command": "sed -n 3p shop/cart.py"}}]
    assert definitions(env) == [{"type": "function", "function": BASH}]
    assert len(ToolChoiceEnv({}, second.extras).expected) == 2
    [held_out] = load_prompts(files[1:], config)
    assert ToolChoiceEnv({}, held_out.extras).expected == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"expected_action": {"type": "dance"}}, "expected_action.type"),
        ({"expected_action": {"type": "function_call", "name": "a", "arguments": "[]"}}, "arguments"),
        ({"responses_create_params": {"input": [], "tools": None}}, "tools"),
        ({"responses_create_params": {"input": [{"type": "image"}], "tools": []}}, "an item of type image"),
    ],
)
def test_a_line_of_another_form_is_told(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({**record({"type": "message"}), **change}))
    with pytest.raises(UserError, match="the line at byte 0: ") as raised:
        list(tables(Namespace(source=source, test=0, name="swe"))["train.parquet"])
    assert reason in str(raised.value)


def test_more_held_out_rows_than_lines_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(record({"type": "message"})))
    with pytest.raises(UserError, match="--test"):
        tables(Namespace(source=source, test=1, name="swe"))
