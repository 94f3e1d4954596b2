"""The agent loop, with a scripted policy."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.cli.inputs import check_rewriting
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config, EnvironmentConfig, RolloutConfig
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.char_tokenizer import EOS
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trainer.run import rollout_metrics
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.trajectory import Kind, Status, Trajectory
from tests.rollout import user_envs
from tests.support.scripted import Scripted, play

NAMES = ("Calling", "Garbage", "Rewriting", "Slow", "Stuck", "Talk")
USER = EnvironmentConfig(classes={name.lower(): f"tests.rollout.user_envs:{name}" for name in NAMES})


def prompt(uid: int, env: str, **extra: Any) -> Prompt:
    return Prompt(uid, [{"role": "user", "content": "hello"}], env, {"reward_spec": {}, "extra_info": extra})


def one(chat: Renderer, env: str, lines: list[str], extra: dict[str, Any] | None = None, **limits: Any) -> Trajectory:
    return play(chat, USER, [(prompt(0, env, **(extra or {})), Scripted(chat, lines))], **limits)[0]


def tiles(t: Trajectory) -> bool:
    """Returns True if the steps' spans and messages tile the trajectory, and the mask covers exactly the responses."""
    ends = [0, *(step.end for step in t.steps)]
    is_response = [k for step in t.steps for k in [step.kind is Kind.RESPONSE] * (step.end - step.start)]
    return (
        [step.start for step in t.steps] == ends[:-1]
        and ends[-1] == len(t.tokens) == len(t.logprobs)
        and list(t.mask) == [int(k) for k in is_response]
        and sum(step.messages for step in t.steps) == len(t.messages)
    )


SAYS = {
    "none": "step gave NoneType None; allowed: a dict",
    "list": "step gave list [1]",
    "no reward": "step: reward is missing",
    "no observations": "step: observations is missing",
    "nan": "step: reward = float nan; allowed: a finite number",
    "infinite": "step: reward = float inf",
    "text reward": "step: reward = str '1'",
    "named reward": "step: reward['right'] = str 'yes'; allowed: a finite number under a text",
    "no rewards": "step: reward = dict {}; allowed: a finite number, or a dict",
    "parts": "step: rewards_at = dict {1: 0.5}; allowed: a list of (end, reward)",
    "part": "step: rewards_at[1] = tuple (2, 1.0); allowed: (end, reward), a number of characters from 1 to",
    "part of nothing": "step: rewards_at[0] = tuple (0, 0.5)",
    "yes part": "step: rewards_at[0] = tuple (True, 0.5)",
    "huge parts": "step: reward and rewards_at sum to float inf; allowed: a finite number",
    "nan part": "step: rewards_at[0] = tuple (1, nan)",
    "text done": "step: done = str 'False'",
    "observations": "step: observations = str 'go on'; allowed: a list",
    "message": "step: observations[0] = str 'go on'",
    "no content": "step: observations[0] = dict {'role': 'user'}; allowed: a dict with role and content",
    "number": "step: observations[0].content = int 7; allowed: text",
    "role": "step: observations[0].role = str 'referee'; allowed: system, developer, user, assistant, tool",
    "surrogate": "step: observations[0].content is no valid Unicode",
    "metadata": "step: metadata = list [1]",
    "keys": "step: metadata cannot be written as JSON",
    "calls": "step: metadata.tool_calls = str 'search'; allowed: a list",
    "key": "step: postprocessed_action = str 'what it should have said': there is no such key",
    "shy": "step raised ValueError('no words')",
    "rewritten": "step: messages is a new conversation; that needs rollout.step_wise",
    "both": "step: messages is the whole conversation, rewritten",
    "exit": "step raised SystemExit(3)",
    "interrupt": "step raised KeyboardInterrupt()",
    "stop": "step raised StopIteration()",
    "cancelled": "step raised CancelledError()",
    "shy error": "step raised ShyError",
    "surrogate error": r"step raised ValueError('\ud800')",
    "init": "init gave list",
    "init empty": "init: messages is empty",
}


def test_whatever_a_step_gives_ends_its_own_trajectory(
    characters_chat: Renderer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert set(SAYS) == {*user_envs.GARBAGE, "init", "init empty"}
    faults = ["", *SAYS, ""]
    scripts = [
        (prompt(uid, "garbage", fault=fault), Scripted(characters_chat, [f"a{EOS}", f"b{EOS}", f"c{EOS}"]))
        for uid, fault in enumerate(faults)
    ]
    played = play(characters_chat, USER, scripts)
    assert capfd.readouterr() == ("", ""), "one bad environment in hundreds of trajectories would flood the terminal"
    for t, fault in zip(played, faults, strict=True):
        assert tiles(t), fault
        if not fault:
            assert (t.status, t.reward, t.turns) == (Status.COMPLETED, 3.0, 3)
            continue
        assert (t.status, t.reward) == (Status.ERROR_ENV, 0.0), fault
        error = t.metadata["error"]
        assert error.startswith("environment garbage: ") and SAYS[fault] in error, (fault, error)
        assert "user_envs.py, line " in t.metadata["at"], "the place in the user's own file"
        # All generated tokens are kept: two turns, or none if `init` failed.
        assert t.turns == sum(t.mask) / 2 == (0 if fault.startswith("init") else 2)
    parquet.write(tmp_path / "t.parquet", played)
    assert [t.metadata for t in parquet.read(tmp_path / "t.parquet")] == [t.metadata for t in played]


def test_messages_that_a_template_refuses_end_one_trajectory(characters_chat: Renderer) -> None:
    """Gives a message with the role `developer`, unknown to the characters template."""
    user_envs.GARBAGE["developer"] = lambda: user_envs.good(observations=[{"role": "developer", "content": "x"}])
    try:
        t = one(characters_chat, "garbage", ["a", "b", "c"], {"fault": "developer"})
    finally:
        del user_envs.GARBAGE["developer"]
    assert t.status is Status.ERROR_ENV
    assert t.metadata["error"].startswith("environment garbage: step: observations: ")
    assert "the chat template refuses messages of user, assistant, developer" in t.metadata["error"]


def test_an_opening_that_leaves_no_room_is_a_fault(characters_chat: Renderer) -> None:
    """Expects an environment error; an answer of length 0 would count in the group."""
    whole = one(characters_chat, "talk", ["a"] * 4)
    assert one(characters_chat, "talk", ["a"], length=whole.prompt_length + 1).turns == 1
    t = one(characters_chat, "talk", [], length=whole.prompt_length)
    assert (t.status, t.turns, sum(t.mask)) == (Status.ERROR_ENV, 0, 0)
    assert f"init: messages and tools of {whole.prompt_length} tokens leave no room" in t.metadata["error"]


def test_more_environments_may_hang_than_there_are_threads(characters_chat: Renderer) -> None:
    """Hangs six environments in two threads: only these trajectories fail, the waiting ones continue, and late
    environments are closed."""
    user_envs.Stuck.closed.clear()
    user_envs.Stuck.release.clear()
    faults = ["hang"] * 6 + ["", ""]
    start = time.perf_counter()
    scripts = [(prompt(i, "stuck", fault=fault), Scripted(characters_chat, ["a"])) for i, fault in enumerate(faults)]
    played = play(characters_chat, USER, scripts, threads=2, env_timeout_s=1.5)
    assert time.perf_counter() - start < 30  # the hanging environments would take 60 s
    assert [t.status for t in played] == [Status.ERROR_ENV_TIMEOUT] * 6 + [Status.COMPLETED] * 2
    assert played[0].metadata["error"] == "environment stuck: step took longer than rollout.env_timeout_s=1.5"
    assert user_envs.Stuck.closed == ["", ""]
    user_envs.Stuck.release.set()
    end = time.monotonic() + 60
    while len(user_envs.Stuck.closed) < 8 and time.monotonic() < end:
        time.sleep(0.01)
    assert user_envs.Stuck.closed.count("hang") == 6


def test_a_program_ends_though_an_environment_hangs() -> None:
    program = (
        "import asyncio, time\nfrom skyrl_mega.rollout.agent.env_pool import Abandoned, Call, EnvPool\n"
        "async def main():\n"
        "    try: await EnvPool(1).run(Call(time.sleep, 1000), 0.1)\n"
        "    except Abandoned: print('given up')\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout) == (0, "given up\n"), ended.stderr


def test_time_ends_a_trajectory_and_what_it_has_is_kept(characters_chat: Renderer) -> None:
    """Waits for the environment's running step and counts the reward."""
    t = one(characters_chat, "slow", ["a"] * 100, {"seconds": 0.6}, turns=100, trajectory_timeout_s=1.5)
    assert t.status is Status.TRUNCATED_TIME and t.status.truncated and not t.status.failed
    assert 1 <= t.turns <= 3 and t.reward == 0.5 * t.turns == 0.5 * sum(t.mask)
    assert tiles(t) and t.steps[-1].kind is Kind.OBSERVATION and t.steps[-1].start == t.steps[-1].end
    quick = one(characters_chat, "slow", ["a"] * 4, {"seconds": 0}, trajectory_timeout_s=600.0)
    assert quick.status is Status.TRUNCATED_TURNS
    metrics = rollout_metrics([t, quick])
    assert (metrics["rollout/timed_out_fraction"], metrics["rollout/truncated_fraction"]) == (0.5, 1.0)
    assert TrajectoryLimits.of(RolloutConfig()).trajectory_timeout_s is None
    assert TrajectoryLimits.of(RolloutConfig(trajectory_timeout_s=7.0)).trajectory_timeout_s == 7.0


def test_a_response_that_time_cut_is_judged_and_an_empty_one_is_not(characters_chat: Renderer) -> None:
    cut = play(characters_chat, USER, [(prompt(0, "talk"), Scripted(characters_chat, ["half"], finish="timeout"))])[0]
    assert (cut.status, cut.reward, cut.turns, sum(cut.mask)) == (Status.TRUNCATED_TIME, 1.0, 1, 4)
    empty = play(characters_chat, USER, [(prompt(0, "talk"), Scripted(characters_chat, [""], finish="timeout"))])[0]
    assert (empty.status, empty.reward, empty.turns, sum(empty.mask)) == (Status.TRUNCATED_TIME, 0.0, 0, 0)
    assert [step.finish for step in empty.steps] == [None, "timeout"] and tiles(empty)


def test_steps_say_what_happened_when(characters_chat: Renderer, tmp_path: Path) -> None:
    t = one(characters_chat, "calling", [f"left{EOS}", f"right{EOS}"])
    kinds = [step.kind.value for step in t.steps]
    assert kinds == ["prompt", "response", "observation", "response", "observation"] and tiles(t)
    assert [step.reward for step in t.steps] == [None, 1.0, None, 2.0, None] and t.reward == 3.0
    assert [step.finish for step in t.steps] == [None, "stop", None, "stop", None]
    assert characters_chat.text(t.tokens[t.steps[1].start : t.steps[1].end]) == "left"
    assert t.steps[1].tool_calls == [{"name": "look", "arguments": {"at": "left", "turn": [1, 1]}}]
    assert all(a.at_s <= b.at_s for a, b in zip(t.steps, t.steps[1:], strict=False))
    assert sum(step.generate_s for step in t.steps) == pytest.approx(t.seconds["generate"])
    assert sum(step.env_s for step in t.steps) == pytest.approx(t.seconds["env"]) and t.seconds["env"] > 0
    parquet.write(tmp_path / "t.parquet", [t])
    assert parquet.read(tmp_path / "t.parquet") == [t]


def test_a_rewritten_conversation_begins_anew(characters_chat: Renderer) -> None:
    policy = Scripted(characters_chat, [f"line {i}{EOS}" for i in range(6)])
    t = play(characters_chat, USER, [(prompt(0, "rewriting"), policy)], turns=9, rewrites=True)[0]
    assert (t.status, t.turns, t.reward) == (Status.COMPLETED, 6, 4 * 0.5 + 2 * 0.25) and tiles(t)
    kinds = "".join(step.kind.value[0] for step in t.steps)
    assert kinds == "prprprorprpro"
    # In each conversation the policy sees the environment's messages as rendered by the template.
    go_on = {"role": "user", "content": "go on"}

    def told(i: int) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": f"so far: line {i}"},
            {"role": "assistant", "content": "yes"},
            go_on,
        ]

    message = {"role": "assistant", "content": "line 2"}
    expected = [t.prompt.messages, told(0), told(1), [*told(1), message, go_on], told(3), told(4)]
    template = characters_chat.tokenizer.apply_chat_template
    assert [characters_chat.tokenizer.decode(list(request.tokens)) for request, _ in policy.turns] == [
        template(messages, tokenize=False, add_generation_prompt=True) for messages in expected
    ]
    assert t.response_length == 6 * 7 + len("<user>go on<assistant>") - len("<user><assistant>") + 2


def test_budgets_hold_for_a_rewritten_conversation(characters_chat: Renderer) -> None:
    """Ends a trajectory if a prompt does not fit; prompts do not count as response."""
    lines = [f"line {i}{EOS}" for i in range(6)]
    full = one(characters_chat, "rewriting", lines, rewrites=True, length=27)
    assert (full.status, full.turns) == (Status.TRUNCATED_TOKENS, 1) and tiles(full)
    tight = one(characters_chat, "rewriting", lines, rewrites=True, response=15)
    assert (tight.status, tight.turns, tight.response_length) == (Status.TRUNCATED_TOKENS, 3, 15) and tiles(tight)


def test_who_rewrites_is_refused_before_the_run_where_trajectories_are_samples() -> None:
    config = replace(Config(), environment=USER)
    with pytest.raises(UserError, match=r"rollout\.step_wise = off: environment rewriting rewrites .* turns or merged"):
        check_rewriting(config)
    check_rewriting(replace(config, rollout=RolloutConfig(step_wise="turns")))
    check_rewriting(Config())
