"""Requests to the retrieval service."""

from __future__ import annotations

import asyncio
import atexit
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import httpx

from skyrl_mega.retriever.build import build
from skyrl_mega.retriever.service import BODY_BYTES, Service
from tests.fuzz.target import Target
from tests.fuzz.values import packed, real, replaced, spoilt, unpacked, value
from tests.fuzz.words import said, words
from tests.retriever.services import write_corpus

TOKEN = "s3cret"
WHOLE = {"queries": ["Budapest", "river of Vienna"], "topk": 2, "return_scores": True, "method": "bm25"}
PATHS = ("/retrieve",) * 12 + ("/health", "/", "/openapi.json", "/docs", "/retrieve/", "/../retrieve", "/%00")
VERBS = ("POST",) * 12 + ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "XPOST")
HEADERS: tuple[dict[str, str], ...] = (
    {"Authorization": "Bearer x"},
    {"Authorization": TOKEN},
    {"Authorization": "Basic " + "x" * 5000},
    {"Authorization": f"Bearer {TOKEN}\xff"},
    {"Content-Length": "-1"},
    {"Content-Length": "x"},
    {"Content-Length": "99999999999999"},
    {"Content-Type": "text/html"},
    {"Content-Type": "application/json; charset=utf-16"},
    {"Content-Encoding": "gzip"},
    {"Transfer-Encoding": "chunked"},
)


@cache
def _index() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="skyrl-fuzz-index-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build(write_corpus(folder / "corpus.jsonl"), folder / "index", methods=("bm25",))
    return folder / "index"


def _request(random: Random) -> Any:
    asked = {**WHOLE, "queries": [said(words(random))[:30_000] for _ in range(random.choice((0, 1, 2, 50)))]}
    match random.randrange(4):
        case 0:
            body = json.dumps(asked).encode()
        case 1:
            body = json.dumps(replaced(random, WHOLE)).encode()
        case 2:
            body = json.dumps(real(value(random))).encode()
        case _:
            body = spoilt(random, json.dumps(WHOLE).encode())
    others = random.choice(HEADERS) if random.random() < 0.3 else {}
    return {
        "verb": random.choice(VERBS),
        "path": random.choice(PATHS),
        "headers": {"Authorization": f"Bearer {TOKEN}", **others},
        "body": packed(body),
        "pieces": random.choice((1, 1, 3)),
    }


def _run(case: Any, folder: Path) -> None:
    asyncio.run(_ask(case))


async def _ask(case: Any) -> None:
    service = Service(_index(), token=TOKEN)
    body = unpacked(case["body"])

    async def pieces() -> AsyncIterator[bytes]:
        step = len(body) // case["pieces"] + 1
        for start in range(0, len(body), step):
            yield body[start : start + step]

    async with service.app.router.lifespan_context(service.app):
        await service.loaded.wait()
        transport = httpx.ASGITransport(service.app)  # raises the exceptions of the service
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            headers = {name: text.encode("latin-1") for name, text in case["headers"].items()}
            content = pieces() if case["pieces"] > 1 else body
            reply = await http.request(case["verb"], case["path"], content=content, headers=headers)
    assert reply.status_code < 500, reply.text
    assert len(reply.content) < BODY_BYTES
    if reply.content and case["path"] == "/retrieve" and case["verb"] == "POST":
        answered = json.loads(reply.content)
        assert TOKEN not in reply.text
        if reply.status_code == 200:
            assert headers["Authorization"] == f"Bearer {TOKEN}".encode()
            asked = json.loads(body)
            assert len(answered["result"]) == len(asked["queries"])
            assert all(len(hits) <= (asked.get("topk") or 3) for hits in answered["result"])
    assert service.pending_passages == 0


def _prepare() -> None:
    _index()


TARGETS = {"service": Target(_request, _run, errors=(), prepare=_prepare)}
