"""Replies of an endpoint under evaluation."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import httpx

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import SamplingConfig
from skyrl_mega.evaluate.endpoint import MAX_TOKENS, Endpoint, EndpointClient, EndpointFailed
from tests.fuzz.target import Target
from tests.fuzz.values import packed, real, spoilt, unpacked, value


def _endpoint(random: Random) -> Any:
    reply = {
        "choices": [{"message": {"content": "a"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }
    at: Any = reply
    for _ in range(random.randrange(1, 5)):
        key = random.choice(range(len(at)) if isinstance(at, list) else list(at))
        if not isinstance(at[key], dict | list) or random.random() < 0.3:
            at[key] = real(value(random))
            break
        at = at[key]
    data = json.dumps(reply).encode()
    status = random.choice((200, 200, 200, 400, 401, 404, 422))
    return {"status": status, "body": packed(spoilt(random, data) if random.random() < 0.4 else data)}


def _run_endpoint(case: Any, folder: Path) -> None:
    answer = httpx.MockTransport(lambda request: httpx.Response(case["status"], content=unpacked(case["body"])))

    async def ask() -> None:
        async with httpx.AsyncClient(transport=answer) as http:
            endpoint = Endpoint("http://x/v1", "m", "s3cret-key")
            client = EndpointClient(endpoint, SamplingConfig(stop=["</a>"]), 5.0, http)
            reply = await client.reply([{"role": "user", "content": "x"}], 9, 1)
            if reply is not None:
                reply.text.encode()
                assert 0 <= reply.tokens <= MAX_TOKENS and 0 <= reply.prompt_tokens <= MAX_TOKENS

    asyncio.run(ask())


TARGETS = {"endpoint": Target(_endpoint, _run_endpoint, (UserError, EndpointFailed))}
