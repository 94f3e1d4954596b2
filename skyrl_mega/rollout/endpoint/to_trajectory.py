"""The trajectory of a session: every conversation of the tree, with each token of the policy trained on once.

A conversation is a `prompt` step with everything up to the first reply not trained on in an earlier conversation,
followed by `response` and `observation` steps. So the prefix shared by two branches is context in the second.
"""

from __future__ import annotations

import numpy as np

from skyrl_mega.envs.base import Message
from skyrl_mega.rollout.agent import edits, routes
from skyrl_mega.rollout.endpoint.graph import AgentExchange, RequestTree
from skyrl_mega.trajectories.trajectory import Kind, Trajectory


def fill(t: Trajectory, tree: RequestTree) -> None:
    """Fills a trajectory without tokens with the conversations of a tree, in the order of their last replies. Replaces
    the trajectory's messages and tools; does nothing if the tree is empty.

    Args:
        t: The trajectory, changed in place; its only step is the empty first prompt.
        tree: The exchanges of the trajectory's session.
    """
    if not tree.exchanges:
        return
    t.messages, t.tools, t.steps[0].messages = [], tree.exchanges[0].tools, 0
    trained: set[AgentExchange] = set()
    parts: list[np.ndarray | int] = []
    for last in tree.conversations():
        path = last.path()
        new = next(place for place, exchange in enumerate(path) if exchange not in trained)
        trained.update(path)
        _add_context(t, path, new)
        for place, exchange in enumerate(path[new:], new):
            if place > new:
                _add_observation(t, path[place - 1], exchange)
            _add_response(t, exchange)
        parts += _routes(path)
    t.turns = len(tree.exchanges)
    routes.keep(t, parts)


def _add_context(t: Trajectory, path: list[AgentExchange], new: int) -> None:
    """Appends the step of a conversation's tokens before the reply of `path[new]`."""
    first = not t.tokens
    if not first:
        edits.begin(t, Kind.PROMPT, path[new].at_s)
    for exchange in path[:new]:
        edits.append(t, exchange.between, 0)
        edits.append(t, exchange.tokens, 0)
        edits.append_messages(t, [*_texts(exchange), exchange.reply])
    edits.append(t, path[new].between, 0)
    edits.append_messages(t, _texts(path[new]))
    if first:
        t.prompt_length = len(t.tokens)


def _add_observation(t: Trajectory, before: AgentExchange, exchange: AgentExchange) -> None:
    """Appends the step between two replies."""
    edits.begin(t, Kind.OBSERVATION, before.at_s + before.generate_s)
    edits.append(t, exchange.between, 0)
    edits.append_messages(t, _texts(exchange))


def _texts(exchange: AgentExchange) -> list[Message]:
    """Returns the request's new messages with the keys of every trajectory: `role` and `content`."""
    return [{"role": message["role"], "content": message["content"]} for message in exchange.messages]


def _add_response(t: Trajectory, exchange: AgentExchange) -> None:
    """Appends the step of a reply."""
    step = edits.add_response(t, exchange, at_s=exchange.at_s, generate_s=exchange.generate_s)
    step.tool_calls = exchange.tool_calls
    edits.append_messages(t, [exchange.reply])


def _routes(path: list[AgentExchange]) -> list[np.ndarray | int]:
    """Returns the expert routes of a conversation's tokens in parts, as in `agent.routes.filled`; the last token has no
    route."""
    parts: list[np.ndarray | int] = []
    known = end = 0
    for exchange in path:
        end += len(exchange.between) + len(exchange.tokens)
        if exchange.routes is not None:
            begins = end - 1 - len(exchange.routes)
            parts += [begins - known, exchange.routes]
            known = end - 1
    return [*parts, end - known]
