"""One server and one event loop for all tests of the endpoint, and a renderer for each file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from skyrl_mega.envs.agent import AgentEndpoint
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.endpoint.requests import EndpointSession
from skyrl_mega.rollout.endpoint.server import EndpointServer
from tests.rollout.endpoint.fakes import running_loop
from tests.support.agents import pieces_chat


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return pieces_chat(tmp_path_factory.mktemp("chats") / "pieces")


@pytest.fixture(scope="package")
def rollouts() -> Iterator[asyncio.AbstractEventLoop]:
    with running_loop() as loop:
        yield loop


@pytest.fixture(scope="package")
def endpoint_server() -> Iterator[EndpointServer]:
    server = EndpointServer()
    yield server
    server.stop()


@pytest.fixture
def opened(
    endpoint_server: EndpointServer, rollouts: asyncio.AbstractEventLoop
) -> Iterator[Callable[[EndpointSession], AgentEndpoint]]:
    """A function: session → endpoint, closed after the test."""
    with ExitStack() as stack:

        def open_session(session: EndpointSession) -> AgentEndpoint:
            endpoint = endpoint_server.open(session, rollouts)
            stack.callback(endpoint_server.close, endpoint)
            return endpoint

        yield open_session
