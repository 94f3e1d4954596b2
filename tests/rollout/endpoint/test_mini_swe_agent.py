"""mini-swe-agent as a client: the shapes of its requests, and the unmodified program where it is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.envs.agent import AgentEndpoint
from skyrl_mega.envs.harness.env import HarnessEnv, ProgramFailed
from skyrl_mega.envs.sandbox import confinements
from skyrl_mega.envs.tool_calls import ToolCall
from skyrl_mega.rollout.endpoint import openai_chat
from skyrl_mega.rollout.endpoint.requests import (
    ChatRequest,
    ContextTooLong,
    EndpointSession,
    PolicyReply,
    TokenRequest,
)
from tests.rollout.endpoint.fakes import PLAIN, ScriptedSession

ROOT = Path(__file__).parents[3]
MINI = ROOT / ".venv-mini" / "bin" / "python"
"""`python -m venv .venv-mini; .venv-mini/bin/pip install mini-swe-agent==2.4.6` makes it."""
installed = pytest.mark.skipif(not MINI.exists(), reason="mini-swe-agent is not installed in .venv-mini")
ARGUMENTS = '{"command": "ls"}'
FUNCTION = {"arguments": ARGUMENTS, "name": "bash"}
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"type": "function", "function": {"name": "bash", "description": "Run it", "parameters": PARAMETERS}}
TASK = [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Solve it."}]
RESULT = {"content": '{"returncode": 0, "output": "a"}', "tool_call_id": "call_1", "role": "tool"}
REPLY_SENT_BACK = {
    "content": None,
    "role": "assistant",
    "tool_calls": [{"function": FUNCTION, "id": "call_1", "type": "function"}],
    "function_call": None,
    "provider_specific_fields": {"refusal": None},
}
"""A reply of the policy in the form in which the agent's library (litellm) sends it back."""


class TalkingSession(ScriptedSession):
    """A session with a reply for each request, in turn."""

    def __init__(self, answers: Sequence[PolicyReply | Exception]) -> None:
        super().__init__()
        self.answers = list(answers)

    async def reply(self, request: ChatRequest | TokenRequest) -> list[PolicyReply]:
        self.answer = self.answers.pop(0)
        return await super().reply(request)


def calling(command: str) -> PolicyReply:
    call = ToolCall("call_1", "bash", {"command": command})
    return PolicyReply(**{**vars(PLAIN), "content": "I act.", "tool_calls": (call,)})


def test_its_requests_are_read_as_those_of_the_sdk() -> None:
    body = {"model": "policy", "messages": [*TASK, REPLY_SENT_BACK, RESULT], "tools": [TOOL]}
    plain = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": FUNCTION}]}
    request = openai_chat.read(body)
    assert request == openai_chat.read({**body, "messages": [*TASK, plain, RESULT]})
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "tool"]
    assert request.ignored == () and request.tools == [TOOL]


def test_a_forgotten_reply_is_a_conversation_of_its_own() -> None:
    error = {"role": "user", "content": "Tool call error: every response needs a call."}
    request = openai_chat.read({"model": "policy", "messages": [*TASK, error], "tools": [TOOL]})
    assert request.messages == [*TASK, error]


@pytest.fixture
def play(
    opened: Callable[[EndpointSession], AgentEndpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[EndpointSession], Any]:
    """Returns a function that runs the agent of `configs/` on a task with a file."""
    if "network namespace" not in confinements().get("network", ()):
        pytest.skip(f"this machine gives only {confinements()}")
    (tmp_path / "reward.py").write_text("def score(data_source, solution_str, ground_truth, extra_info):\n"
                                        "    return float(solution_str.strip() == ground_truth)\n")  # fmt: skip
    monkeypatch.chdir(ROOT)
    options = {
        "command": f"{MINI} configs/mini_swe_agent.py",
        "reward": f"{tmp_path}/reward.py:score",
        "timeout_s": 120,
    }
    info = {"files": {"numbers/a.txt": "2\n", "other.txt": None}}
    extras = {"reward_spec": {"ground_truth": "4"}, "extra_info": info, "max_turns": 4}
    prompt = [{"role": "user", "content": "Double the number in numbers/a.txt."}]

    def played(session: EndpointSession) -> Any:
        return HarnessEnv(options, extras).run(opened(session), prompt)

    return played


@installed
@pytest.mark.nightly
def test_the_unmodified_agent_solves_a_task(play: Callable[[EndpointSession], Any]) -> None:
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat b.txt"
    work = "echo $((2 * $(cat numbers/a.txt))) > b.txt; cat b.txt"
    session = TalkingSession([PLAIN, calling(work), calling(submit)])
    output = play(session)
    assert output["reward"] == 1.0, output["metadata"]["program"]
    first, second, third = session.requests
    assert isinstance(first, ChatRequest) and isinstance(second, ChatRequest) and isinstance(third, ChatRequest)
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert "Double the number" in first.messages[1]["content"] and first.tools[0]["function"]["name"] == "bash"
    assert [message["role"] for message in second.messages] == ["system", "user", "user"]  # PLAIN has no call
    assert second.messages[:2] == first.messages
    assert third.messages[:3] == second.messages
    assert third.messages[3] == openai_chat.message(
        {
            "role": "assistant",
            "content": "I act.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "bash", "arguments": json.dumps({"command": work})},
                }
            ],
        },
        "",
    )
    assert json.loads(third.messages[4]["content"]) == {"returncode": 0, "output": "4\n"}


@installed
@pytest.mark.nightly
def test_a_full_context_ends_the_unmodified_agent(play: Callable[[EndpointSession], Any]) -> None:
    session = TalkingSession([calling("ls"), ContextTooLong(900, 800), PLAIN])
    with pytest.raises(ProgramFailed, match="ended with exit code 1"):
        play(session)
    assert len(session.requests) == 2


@installed
@pytest.mark.nightly
def test_the_unmodified_agent_ends_at_the_limit_of_turns(play: Callable[[EndpointSession], Any]) -> None:
    session = TalkingSession([calling("ls")] * 9)
    assert play(session)["reward"] == 0.0 and len(session.requests) == 4
