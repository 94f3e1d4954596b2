"""A guard for all routes of a vLLM server: `vllm serve --middleware skyrl_mega.engines.external.guard.KeyGuard`.

vLLM's own key guards its public routes alone. The routes of its development mode load weights, and stay open.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

VARIABLE = "VLLM_API_KEY"
"""Environment variable of the server with the API key, also read by vLLM."""
OPEN = frozenset({"/health"})
"""Paths without a key."""
Scope = Mapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class KeyGuard:
    """ASGI middleware that answers 401 to requests without the server's key.

    Args:
        app: The application behind the guard.

    Raises:
        RuntimeError: The server has no key.
    """

    def __init__(self, app: App) -> None:
        self.app, key = app, os.environ.get(VARIABLE, "")
        if not key:
            raise RuntimeError(f"{VARIABLE} is not set: a guard without a key would let everybody pass")
        self.expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Passes a request on to the application if the request has the server's key, or needs no key (`OPEN`, lifespan
        events); otherwise answers 401, or closes a websocket."""
        if scope["type"] == "lifespan" or scope.get("path") in OPEN or self._has_key(scope):
            await self.app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"error": "Unauthorized"}).encode()})

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self.expected)
