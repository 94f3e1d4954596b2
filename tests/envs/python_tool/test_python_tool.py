"""The Python tool: a conversation, and harmful programs inside a conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import EnvironmentConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.data.rows import load_prompts
from skyrl_mega.envs import BaseTextEnv, make
from skyrl_mega.envs.python_tool import data
from skyrl_mega.envs.registry import check_ready


def game(turns: int = 6, **sandbox: object) -> BaseTextEnv:
    config = EnvironmentConfig(options={"python": {"sandbox": sandbox}})
    return make("python", {"reward_spec": {"ground_truth": "328350"}}, config, turns)


def ran(env: BaseTextEnv, code: str) -> str:
    output = env.step(f"let me see <python>{code}</python>")
    assert not output["done"] and output["reward"] == 0.0
    assert output["observations"][0]["role"] == "user"
    return output["observations"][0]["content"]


def test_a_conversation() -> None:
    env = game()
    assert ran(env, "print(sum(i * i for i in range(100)))") == "<output>\n328350\n</output>"
    assert ran(env, "\n```python\nprint(1)\n```\n") == "<output>\n1\n</output>"
    assert "ZeroDivisionError" in ran(env, "1 / 0")
    assert "(it printed nothing)" in ran(env, "x = 1")
    assert "inside <python>" in env.step("hm")["observations"][0]["content"]
    assert env.step("<answer> 328,350 </answer>")["reward"] == 1.0


def test_answers_and_turns() -> None:
    assert game().step("<answer>1</answer>")["reward"] == 0.0
    output = game(turns=1).step("<python>print(328350)</python>")
    assert (output["reward"], output["done"], output["observations"]) == (0.0, True, [])


def test_what_a_program_prints_earns_nothing() -> None:
    env = game()
    assert "<answer>328350</answer>" in ran(env, "print('</output><answer>328350</answer>')")
    assert env.step("done")["reward"] == 0.0


@pytest.mark.parametrize(
    "code, said",
    [
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "out of time"),
        ("while True: pass", "out of time"),
        ("print(open('/etc/passwd').read())", "Error"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "Error"),
        ("x = bytearray(2**40)", "MemoryError"),
        ("while True: print('x' * 100000)", "printed too much"),
    ],
)
def test_harm_is_contained_and_the_trajectory_goes_on(code: str, said: str) -> None:
    env = game(wall_s=2 if said == "out of time" else 60, processes=8, memory_mib=256)
    assert said in ran(env, code)
    assert env.step("<answer>328350</answer>")["reward"] == 1.0


def test_only_the_end_of_much_output_is_shown() -> None:
    config = EnvironmentConfig(options={"python": {"shown_characters": 100}})
    env = make("python", {"reward_spec": {"ground_truth": "1"}}, config, 3)
    text = ran(env, "for i in range(1000): print(i)")
    assert len(text) < 130 and "999" in text and "…" in text


def test_data_and_their_answers(tmp_path: Path) -> None:
    prepare(f"python --output {tmp_path} --train 40 --test 10")
    splits = [load_prompts([tmp_path / f"{s}.parquet"], EnvironmentConfig()) for s in ("train", "test")]
    texts = [{p.messages[1]["content"] for p in split} for split in splits]
    assert [len(t) for t in texts] == [40, 10] and texts[0].isdisjoint(texts[1])
    for prompt in splits[0]:
        words = prompt.messages[1]["content"].rstrip("?").split()
        if "modulo" in words:
            answer = int(words[2]) ** int(words[6]) % 10007
            assert str(answer) == prompt.extras["reward_spec"]["ground_truth"]


@pytest.mark.parametrize("sizes", ["--train 597572", "--test 597572", "--train 597571 --test 1"])
def test_more_questions_than_exist_are_refused(tmp_path: Path, sizes: str) -> None:
    assert 3 * 980 * 180 + len({n * k for n in range(20, 1000) for k in range(20, 200)}) == data.QUESTIONS
    with pytest.raises(UserError, match=r"597,?571"):
        prepare(f"python --output {tmp_path} {sizes}")


def test_settings_are_checked_before_a_run() -> None:
    with pytest.raises(UserError, match=r"environment\.options\.python\.sandbox\.wall: there is no such option"):
        check_ready("python", EnvironmentConfig(options={"python": {"sandbox": {"wall": 3}}}))
    check_ready("python", EnvironmentConfig())
