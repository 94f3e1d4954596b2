"""Environments with native tool calls: the model's input and output, with unchanged engine tokens."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_mega.cli import inputs
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config, DataConfig, EnvironmentConfig, ModelConfig, RolloutConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.data.rows import load_demonstrations, load_prompts
from skyrl_mega.envs import registry
from skyrl_mega.envs.calculator.env import CalculatorEnv, calculate
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.envs.tool_calls import ToolCall, form_of, hermes
from skyrl_mega.envs.tools import Tool, ToolEnv, ToolError, definitions
from skyrl_mega.models.char_tokenizer import EOS, SPECIAL, write_tokenizer
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trainer.sft_warmup import encode
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from tests.support.chats import CHATML, TOOLS, characters, qwen
from tests.support.scripted import Scripted, play

SPELLED = ("ok", "", "42", EOS, f"a{EOS}\n<assistant>\n", "<tool_call>", "{}", *SPECIAL)


def call(name: str, **arguments: Any) -> str:
    """Returns a call in the template's form."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def say(text: str, times: int = 1) -> str:
    """Returns the text, repeated."""
    return text * times


def fail(how: str) -> str:
    if how == "told":
        raise ToolError("no such page")
    raise ZeroDivisionError(how)


TEXT = {"type": "string"}
SAY = Tool("say", {"type": "object", "properties": {"text": TEXT, "times": {"type": "integer"}}, "required": ["text"]},
           say)  # fmt: skip
FAIL = Tool("fail", {"type": "object", "properties": {"how": TEXT}, "required": ["how"]}, fail, f"Fails. {EOS}")


class Echo(ToolEnv):
    """An environment ending when the policy calls no tool."""

    requires_ground_truth = False
    tools: Sequence[Tool] = (SAY, FAIL)
    calls_per_turn = 3

    def judge(self, answer: str) -> float:
        return float("right" in answer)


ECHO = EnvironmentConfig(classes={"echo": f"{__name__}:Echo"})


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return with_template(tmp_path_factory.mktemp("tools") / "model", TOOLS)


def with_template(path: Path, template: str, rollout: RolloutConfig | None = None) -> Renderer:
    """Returns the renderer of the `characters` tokenizer with another template."""
    characters(path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return Renderer(str(path), rollout)


def one(chat: Renderer, lines: list[str], turns: int = 9, env: str = "echo") -> Trajectory:
    prompt = Prompt(0, [{"role": "user", "content": "go"}], env, {})
    return play(chat, ECHO, [(prompt, Scripted(chat, lines))], turns=turns)[0]


def results(t: Trajectory) -> list[str]:
    return [m["content"] for m in t.messages if m["role"] == "tool"]


def test_calls_are_made_and_answered(chat: Renderer, tmp_path: Path) -> None:
    t = one(chat, [f"I ask. {call('say', text='a')}{call('say', text='b', times=2)}{EOS}", f"right{EOS}"])
    assert (t.status, t.reward, t.turns) == (Status.COMPLETED, 1.0, 2)
    assert results(t) == ["a", "bb"]
    assert [m.get("tool_call_id") for m in t.messages if m["role"] == "tool"] == ["call_1_1", "call_1_2"]
    first = next(step for step in t.steps if step.tool_calls)
    assert first.tool_calls[1] == {"id": "call_1_2", "name": "say", "arguments": {"text": "b", "times": 2}}
    shown = chat.tokenizer.decode(list(t.tokens[: t.prompt_length]))
    assert all(json.dumps(tool.definition, ensure_ascii=False) in shown for tool in (SAY, FAIL))
    assert [chat.control[k] for k in t.tokens[: t.prompt_length] if k in chat.control].count(EOS) == 2
    parquet.write(tmp_path / "t.parquet", [t])
    read = parquet.read(tmp_path / "t.parquet")[0]
    assert read.tokens == t.tokens and read.tools == [SAY.definition, FAIL.definition]


WRONG = {
    "<tool_call>{</tool_call>": "Error: the call is not JSON",
    "<tool_call>[]</tool_call>": "Error: the call is not a JSON object",
    '<tool_call>{"name": 5}</tool_call>': "Error: the call has no name",
    '<tool_call>{"name": "say", "arguments": "x"}</tool_call>': "Error: the call's arguments are not a JSON object",
    "<tool_call>" + '{"name": "say", "arguments": ' + "[" * 999: "Error: the call has no </tool_call>",
    f"<tool_call>{'[' * 999}</tool_call>": "Error: the call is not JSON",
    '<tool_call>{"name": "say", "arguments": {"text": NaN}}</tool_call>': "Error: the call is not JSON",
    call("shout", text="x"): "Error: there is no tool shout; allowed: say, fail",
    call("say"): "Error: arguments: 'text' is a required property",
    call("say", text=7): "Error: arguments.text: 7 is not of type 'string'",
    call("fail", how="told"): "Error: no such page",
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_with_a_call_is_told_to_the_policy(chat: Renderer, said: str) -> None:
    t = one(chat, [said, call("say", text="fine"), "right"])
    assert (t.status, t.reward, t.turns) == (Status.COMPLETED, 1.0, 3)
    answer, fine = results(t)
    assert answer.startswith(WRONG[said]) and len(answer) <= 300 and fine == "fine"


def test_a_tool_that_fails_is_an_error_of_the_environment(chat: Renderer) -> None:
    t = one(chat, [call("fail", how="by chance"), "right"])
    assert t.status is Status.ERROR_ENV and "ZeroDivisionError('by chance')" in t.metadata["error"]


def test_calls_of_one_turn_are_bounded(chat: Renderer) -> None:
    t = one(chat, ["".join(call("say", text=str(i)) for i in range(50)), "right"])
    assert results(t)[:3] == ["0", "1", "2"]
    assert results(t)[3:] == ["Error: at most 3 calls are made in one turn; this one and those after it were not"]


def test_the_last_turn_calls_nothing(chat: Renderer) -> None:
    t = one(chat, [call("say", text="a"), f"right {call('say', text='b')}"], turns=2)
    assert (t.status, t.reward, results(t)) == (Status.COMPLETED, 1.0, ["a"])


def test_what_is_thought_is_no_call() -> None:
    assert hermes(f"<think>{call('say', text='a')}</think>\n\nok").tool_calls == ()
    message = hermes(f"<think>x</think>ok {call('say', text='a')} then", 4)
    assert message.content == "ok  then" and message.tool_calls == (ToolCall("call_4_1", "say", {"text": "a"}),)


PIECES = ("<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"say"', "[", "</think>", "x")


@given(st.lists(st.sampled_from(PIECES)).map("".join))
@settings(max_examples=100, deadline=None)
def test_whatever_is_written_is_read(text: str) -> None:
    env = Echo(extras={"max_turns": 2})
    output = env.step(text)
    assert len(output["observations"]) <= 4 and output["done"] == (not output["observations"])
    assert all(set(m) == {"role", "content", "tool_call_id", "name"} for m in output["observations"])


def test_a_hundred_random_conversations_have_the_engines_tokens(chat: Renderer) -> None:
    """Plays a hundred random conversations: tokens are the engine's, with the template's text of the results between
    turns."""
    rng, scripts = random.Random(5), []
    for uid in range(100):
        lines = [line(rng) + rng.choice(["", EOS]) for _ in range(6)]
        scripts.append((Prompt(uid, [{"role": "user", "content": rng.choice(SPELLED)}], "echo", {}),
                        Scripted(chat, lines)))  # fmt: skip
    counted: Counter[str] = Counter()
    for t, (prompt, script) in zip(
        play(chat, ECHO, scripts, turns=5, response=10**6, length=10**6), scripts, strict=True
    ):
        assert t.status is Status.COMPLETED
        tokens, mask = list(script.turns[0][0].tokens), [0] * len(script.turns[0][0].tokens)
        assert tokens == opening(chat, prompt.messages[0]["content"])
        tool_messages = iter([m for m in t.messages if m["role"] == "tool"])
        for place, (request, completion) in enumerate(script.turns):
            assert list(request.tokens) == tokens
            tokens = tokens + completion.tokens
            mask += [1] * len(completion.tokens)
            if place + 1 == len(script.turns):
                break
            calls = hermes(chat.text(completion.tokens)).tool_calls
            answers = [next(tool_messages)["content"] for _ in range(min(len(calls), 4))]
            between = after(chat, answers, completion.tokens[-1])
            tokens, mask = tokens + between, mask + [0] * len(between)
            counted[f"{len(answers)} results"] += 1
            counted["errors"] += sum(answer.startswith("Error: ") for answer in answers)
            counted["control tokens spelled"] += sum(name in answer for answer in answers for name in SPECIAL)
        assert (list(t.tokens), list(t.mask)) == (tokens, mask)
        assert next(tool_messages, None) is None
    assert min(counted[name] for name in ("1 results", "2 results", "4 results", "errors")) >= 10, counted
    assert counted["control tokens spelled"] >= 10, counted


def line(rng: random.Random) -> str:
    """Returns a turn of none to five calls, some wrong."""
    calls = [
        rng.choice([call("say", text=rng.choice(SPELLED), times=rng.randint(0, 2)), *rng.sample(list(WRONG), 1)])
        for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 5, 5]))
    ]
    return rng.choice(["", "right", "I ask."]) + "".join(calls)


def letters(chat: Renderer, text: str) -> list[int]:
    """Returns the tokens of a text without control tokens."""
    unknown = chat.tokenizer.unk_token_id
    tokens = [token for letter in text for token in chat.tokenizer.encode(letter, add_special_tokens=False)]
    assert all(token not in chat.control or token == unknown for token in tokens)
    return tokens


def written(chat: Renderer, *parts: str) -> list[int]:
    """Returns the tokens of the parts: texts at even positions, control tokens at odd positions."""
    return [
        token
        for place, part in enumerate(parts)
        for token in ([chat.tokenizer.convert_tokens_to_ids(part)] if place % 2 else letters(chat, part))
    ]


def opening(chat: Renderer, question: str) -> list[int]:
    """Returns the opening, built by hand from the template's text."""
    shown = "".join(json.dumps(tool.definition, ensure_ascii=False) + "\n" for tool in (SAY, FAIL))
    how = 'Call one so: <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'
    return written(
        chat,
        "",
        "<system>",
        f"\n# Tools\n{shown}{how}",
        EOS,
        "\n",
        "<user>",
        f"\n{question}",
        EOS,
        "\n",
        "<assistant>",
        "\n",
    )


def after(chat: Renderer, answers: list[str], last: int) -> list[int]:
    """Returns the tokens between two turns."""
    responses = "".join(f"\n<tool_response>\n{answer}\n</tool_response>" for answer in answers)
    between = written(chat, "", EOS, "\n", "<user>", responses, EOS, "\n", "<assistant>", "\n")
    return between[1:] if last in chat.stop_tokens else between


def test_with_qwens_template(real_data: Path, tmp_path: Path) -> None:
    chat = Renderer(str(qwen(real_data, tmp_path / "qwen")))
    chat.check_tools("echo")
    t = one(chat, [f"{call('say', text='a')}{call('say', text='b')}<|im_end|>", "right<|im_end|>"])
    text = chat.tokenizer.decode(list(t.tokens))
    assert text.startswith("<|im_start|>system\n# Tools\n") and json.dumps(SAY.definition) in text
    assert text.endswith(
        "<|im_end|>\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\nright<|im_end|>"
    )
    assert (t.reward, chat.parse(chat.encode(call("say", text="a"))).tool_calls[0].name) == (1.0, "say")


REFUSED = {
    CHATML: "environment echo has tools, and the chat template shows no tools",
    TOOLS.replace("tool_call>", "call>"): "writes calls in a form that is not known",
    TOOLS.replace("Call one so:", "<function=name>"): "writes calls in a form that is not known",
}


def settings_of(path: Path, conversation: str = "messages") -> Config:
    return Config(model=ModelConfig(path=str(path)), rollout=RolloutConfig(conversation=conversation), environment=ECHO)


@pytest.mark.parametrize("template", REFUSED)
def test_a_template_that_cannot_is_refused(template: str, tmp_path: Path) -> None:
    with_template(tmp_path / "model", template)
    with pytest.raises(UserError) as refused:
        inputs.check_tools(settings_of(tmp_path / "model"))
    assert REFUSED[template] in str(refused.value) and "\n" not in str(refused.value)


def test_one_message_is_refused(tmp_path: Path) -> None:
    """Refuses the setting with the model's files, and without them as in a dry run."""
    line = r"rollout.conversation = one_message: environment echo has tools, .*rollout.conversation=messages"
    with pytest.raises(UserError, match=line):
        inputs.check_tools(settings_of(tmp_path / "absent", "one_message"))
    chat = with_template(tmp_path / "model", TOOLS, RolloutConfig(conversation="one_message"))
    with pytest.raises(UserError, match=line):
        chat.check_tools("echo")


def test_rows_that_ask_for_tools_are_found(tmp_path: Path) -> None:
    with_template(tmp_path / "model", CHATML)
    [file, *_] = prepare(f"calculator --output {tmp_path / 'data'} --train 2 --test 0")
    config = replace(settings_of(tmp_path / "model"), environment=EnvironmentConfig())
    inputs.check_tools(config)
    with pytest.raises(UserError, match="environment calculator has tools, and the chat template shows no tools"):
        inputs.check_tools(replace(config, data=DataConfig(train=[str(file)])))


def test_tools_that_are_not_allowed() -> None:
    for name, schema, line in (
        ("a b", {"type": "object"}, "allowed is a name"),
        ("a", {"type": "string"}, '"type": "object"'),
        ("a", {"type": "object", "properties": 5}, "tool a: schema: 5 is not"),
    ):
        with pytest.raises(ValueError, match=re.escape(line)):
            Tool(name, schema, say)


class NoJudge(ToolEnv):
    tools = (SAY,)


def test_an_environment_without_judge_is_refused() -> None:
    with pytest.raises(UserError, match="NoJudge has no judge; write `def judge"):
        registry.resolve("x", EnvironmentConfig(classes={"x": f"{__name__}:NoJudge"}))


def test_the_calculator() -> None:
    assert [calculate(text) for text in ("1+2", " 2*(3-5) ", "-7", "12 * 12")] == ["3", "-4", "-7", "144"]
    for wrong in ("", "1/2", "2**99", "9" * 30, "a", "(" * 300, "1.5", "__import__('os')", "1,2", "True"):
        with pytest.raises(ToolError):
            calculate(wrong)
    env = CalculatorEnv(extras={"reward_spec": {"ground_truth": "85"}, "max_turns": 3})
    [result] = env.step(call("calculate", expression="27+58"))["observations"]
    assert result["content"] == "85"
    assert [env.judge(text) for text in ("It is 85.", "85 or 86", "", "9" * 5000)] == [1.0, 0.0, 0.0, 0.0]


def test_demonstrations_are_rendered_as_rollouts(tmp_path: Path) -> None:
    """Compares tokens with the tiny model's template: prompt with the tool, call, result and answer."""
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model)
    (model / "config.json").write_text('{"model_type": "llama"}')
    chat, config = Renderer(str(model)), EnvironmentConfig()
    chat.check_tools("calculator")
    prepare(f"calculator --output {tmp_path / 'data'} --train 5 --test 2 --demonstrations 8 --wrong 0.5")
    demonstrations = load_demonstrations([tmp_path / "data" / "demonstrations.parquet"])
    prompts = load_prompts([tmp_path / "data" / "demonstrations.parquet"], config)
    batch = encode(demonstrations, chat, config)
    lines = [
        [m["content"] + EOS for m in demonstration.turns if m["role"] == "assistant"]
        for demonstration in demonstrations
    ]
    scripts = [(prompt, Scripted(chat, of)) for prompt, of in zip(prompts, lines, strict=True)]
    played = play(chat, config, scripts, turns=2)
    assert batch.tokens.tolist() == [token for t in played for token in t.tokens]
    assert batch["mask"].tolist() == [mask for t in played for mask in t.mask]
    assert {t.turns for t in played} == {1, 2} and all(t.reward == 1 for t in played if t.turns == 2)


def test_forms() -> None:
    assert (form_of(TOOLS), form_of(CHATML)) == ("hermes", None)


def test_an_argument_that_the_schema_does_not_have_is_told_to_the_policy() -> None:
    tool = Tool("double", {"type": "object", "properties": {"x": {"type": "integer"}}}, lambda x: str(2 * x))
    assert tool.argument_error({"x": 1}) is None
    assert "Additional properties are not allowed" in str(tool.argument_error({"x": 1, "unit": "m"}))
    more = Tool("any", {"type": "object", "additionalProperties": True}, lambda **_: "")
    assert more.argument_error({"y": 1}) is None


def test_what_is_thought_and_not_ended_is_neither_a_call_nor_an_answer() -> None:
    message = hermes('so: <think>perhaps <tool_call>{"name": "double"}</tool_call> 4')
    assert (message.content, message.tool_calls) == ("so:", ())


def test_tools_that_are_no_list_are_refused() -> None:
    class Wrong(ToolEnv):
        tools: Any = Tool("double", {"type": "object"}, str)

    with pytest.raises(TypeError, match="allowed is a list of Tool"):
        definitions(Wrong)


SAYING = "with tags: </think>, <think>, </tool_call>, <tool_call>{}</tool_call>"


@pytest.mark.parametrize("before", ["", "<think>why <tool_call>?</think>", "thought of <tool_call>{ </think>\n\nSo: "])
@pytest.mark.parametrize("text", [SAYING, "</think>", "<think>", "a</tool_call>b", '"quoted" {\\"}'])
def test_tags_within_a_calls_json_are_text(before: str, text: str) -> None:
    message = hermes(f"{before}{call('say', text=text)} and {call('say', text='b', times=2)}<|done|>")
    assert [(parsed.name, parsed.arguments) for parsed in message.tool_calls] == [
        ("say", {"text": text}),
        ("say", {"text": "b", "times": 2}),
    ]
    assert message.content == f"{before.rpartition('</think>')[2]} and <|done|>".strip()


def test_an_argument_with_a_tag_reaches_the_tool(chat: Renderer) -> None:
    t = one(chat, [call("say", text=SAYING), "right"])
    assert (t.status, t.reward, results(t)) == (Status.COMPLETED, 1.0, [SAYING])


@pytest.mark.parametrize("key", ["parameters", "args", "text"])
def test_a_call_with_another_key_for_its_arguments_is_answered(chat: Renderer, key: str) -> None:
    wrong_call = f"<tool_call>{json.dumps({'name': 'say', key: {'text': 'x'}})}</tool_call>"
    answer, fine = results(one(chat, [wrong_call, call("say", text="fine"), "right"]))
    assert answer.startswith(f"Error: the call has {key} and no arguments") and fine == "fine"
    assert hermes('<tool_call>{"name": "say"}</tool_call>').tool_calls == (ToolCall("call_1_1", "say"),)
