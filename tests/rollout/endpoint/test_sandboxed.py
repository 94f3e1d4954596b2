"""A program in the sandbox and the real server: a socket of the sandbox's network namespace, served by the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_mega.envs.agent import AgentEndpoint
from skyrl_mega.envs.harness.env import HarnessEnv
from skyrl_mega.envs.sandbox import confinements
from skyrl_mega.rollout.endpoint.requests import ChatRequest, EndpointSession
from tests.rollout.endpoint.fakes import PLAIN, ScriptedSession

PROGRAM = """
import json, os, socket, urllib.error, urllib.request
def ask(key):
    body = json.dumps({"model": "m", "messages": json.load(open(os.environ["SKYRL_TASK"]))["prompt"]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    try:
        return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code
print(ask(os.environ["OPENAI_API_KEY"]), ask(os.environ["OTHER_KEY"]))
"""
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)
"""


def test_a_sandboxed_program_reaches_its_own_session(
    opened: Callable[[EndpointSession], AgentEndpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "network namespace" not in confinements().get("network", ()):
        pytest.skip(f"this machine gives only {confinements()}")
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "agent.py").write_text(PROGRAM)
    (tmp_path / "reward.py").write_text(REWARD)
    session, other = ScriptedSession(replace(PLAIN, content="4")), ScriptedSession()
    options = {
        "command": "python -S agent.py",
        "reward": "reward.py:score",
        "timeout_s": 60,
        "variables": {"OTHER_KEY": opened(other).key},
    }
    extras = {"data_source": "sums", "reward_spec": {"method": "rule", "ground_truth": "4 401\n"}, "max_turns": 3}
    prompt = [{"role": "user", "content": "2+2"}]
    env = HarnessEnv(options, extras)
    env.init(prompt)
    try:
        output = env.run(opened(session), prompt)
    finally:
        env.close()
    assert output["reward"] == 1.0, output["metadata"]
    assert session.requests == [ChatRequest(prompt)] and other.requests == []
