"""The guard lets nobody without the key reach any route but `/health`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl_mega.engines.external.guard import KeyGuard

KEY = (b"authorization", b"Bearer right")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/collective_rpc", [], 401),
        ("/update_weights", [(b"authorization", b"Bearer wrong")], 401),
        ("/update_weights", [KEY, (b"authorization", b"Bearer wrong")], 401),
        ("/update_weights", [KEY], 200),
        ("/health", [], 200),
        ("//health", [], 401),
    ],
)
def test_a_request_needs_the_key(
    path: str, headers: list[tuple[bytes, bytes]], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right")
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(KeyGuard(app)({"type": "http", "path": path, "headers": headers}, None, send))
    assert sent[0]["status"] == status


def test_a_guard_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        KeyGuard(None)  # type: ignore[arg-type]
