"""The tree of exchanges: which conversation a request continues."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from skyrl_mega.common.safe_read import Malformed
from skyrl_mega.rollout.endpoint.graph import AgentExchange, RequestTree

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def assistant(text: str, *calls: tuple[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    functions = [{"id": f"{i}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
    return {"role": "assistant", "content": text, "tool_calls": functions, **more}


def exchange(parent: AgentExchange | None, between: int, tokens: int) -> AgentExchange:
    reply = {"role": "assistant", "content": ""}
    values = array("i", range(between)), array("i", range(100, 100 + tokens)), array("f", [0.0] * tokens)
    return AgentExchange(parent, [], *values, [(0, 0)], reply, "stop")


def answered(
    tree: RequestTree, messages: list[dict[str, Any]], reply: dict[str, Any], tools: Any = ()
) -> AgentExchange:
    """Adds an exchange for a request and a reply as seen by the agent."""
    parent, _, request = tree.find(messages, tools)
    new = exchange(parent, 3, 2)
    tree.add(new, request, reply)
    return new


def test_a_request_continues_the_longest_conversation_that_it_repeats() -> None:
    tree = RequestTree()
    first = answered(tree, [user("a")], assistant("b"))
    second = answered(tree, [user("a"), assistant("b"), user("c")], assistant("d"))
    assert (second.parent, first.continued, second.continued) == (first, True, False)
    longest = [user("a"), assistant("b"), user("c"), assistant("d"), user("e"), user("f")]
    assert tree.find(longest, [])[:2] == (second, 4)
    assert tree.find([user("a"), assistant("b"), user("other")], [])[:2] == (first, 2)
    assert tree.find([user("a"), assistant("changed"), user("c")], [])[:2] == (None, 0)
    assert tree.find([user("A"), assistant("b"), user("c")], [])[:2] == (None, 0)
    assert tree.find([user("a"), assistant("b")], [])[:2] == (None, 0), "a reply alone continues nothing"
    assert tree.find(longest, [TOOL])[:2] == (None, 0), "other tools are another prompt"
    assert (second.path(), second.length, second.opening) == ([first, second], 10, 3)
    assert list(second.sequence()) == [0, 1, 2, 100, 101, 0, 1, 2, 100, 101]


@pytest.mark.parametrize(
    "repeated",
    [
        assistant("b") | {"tool_calls": [{"function": {"name": "f", "arguments": '{"y": 2, "x": 1}'}}]},
        assistant("b", ("f", {"x": 1, "y": 2}), reasoning_content="hm"),
        assistant("\n b ", ("f", {"x": 1, "y": 2}), name="bot"),
    ],
)
def test_what_does_not_matter_in_a_repeated_reply(repeated: dict[str, Any]) -> None:
    tree = RequestTree()
    first = answered(tree, [user("a")], assistant("b", ("f", {"x": 1, "y": 2})))
    result = {"role": "tool", "content": "3", "tool_call_id": "anything"}
    assert tree.find([user("a", name="me"), repeated, result], []).exchange is first


@pytest.mark.parametrize(
    "changed",
    [assistant("b"), assistant("b", ("f", {"x": 2})), assistant("b", ("g", {"x": 1})), user("b"), assistant("")],
)
def test_what_matters_in_a_repeated_reply(changed: dict[str, Any]) -> None:
    tree = RequestTree()
    answered(tree, [user("a")], assistant("b", ("f", {"x": 1})))
    assert tree.find([user("a"), changed, user("c")], []).exchange is None


@pytest.mark.parametrize(
    ("sampled", "javascript"),
    [(1.0, 1), (1e2, 100), (12345678901234567890, 12345678901234567000), (-0.0, 0), ([{"y": 1.0}], [{"y": 1}])],
)
def test_numbers_of_a_javascript_client_are_the_same_numbers(sampled: Any, javascript: Any) -> None:
    tree = RequestTree()
    first = answered(tree, [user("a")], assistant("", ("f", {"x": sampled})))
    assert tree.find([user("a"), assistant("", ("f", {"x": javascript})), user("c")], []).exchange is first
    for other in (2, True, "1", None):
        assert tree.find([user("a"), assistant("", ("f", {"x": other})), user("c")], []).exchange is None


def test_an_empty_text_is_no_text() -> None:
    tree = RequestTree()
    first = answered(tree, [user("a")], assistant("", ("f", {})))
    repeated = assistant("", ("f", {})) | {"content": None}
    assert tree.find([user("a"), repeated, user("c")], []).exchange is first


def test_of_equal_conversations_the_latest_counts() -> None:
    tree = RequestTree()
    replies = [answered(tree, [user("a")], assistant("b")) for _ in range(3)]
    assert tree.find([user("a"), assistant("b"), user("c")], []).exchange is replies[2]
    assert tree.conversations() == replies


def test_wrong_tool_calls_are_said_so() -> None:
    with pytest.raises(Malformed):
        RequestTree().find([assistant("") | {"tool_calls": [{"name": 3}]}], [])


def test_tokens_continue_the_longest_sequence_that_they_begin_with() -> None:
    tree = RequestTree()
    first = exchange(None, 3, 2)
    tree.add(first, None, {})
    second = exchange(first, 1, 1)
    tree.add(second, None, {})
    again = exchange(first, 1, 1)
    tree.add(again, None, {})
    assert tree.find_tokens(array("i", [0, 1, 2, 100, 101, 0, 100])) is again, "the latest of two"
    assert tree.find_tokens(array("i", [0, 1, 2, 100, 101, 0])) is first
    assert tree.find_tokens(array("i", [0, 1, 2, 100])) is None
    assert tree.find_tokens(array("i", [1, 1, 2, 100, 101])) is None
