"""The search environment, with a search service of random answers."""

from __future__ import annotations

import http.server
import json
import threading
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from skyrl_mega.config.schema import RetrieverConfig
from tests.fuzz.judged import case_of, play
from tests.fuzz.target import Target
from tests.fuzz.values import packed, replaced, spoilt, unpacked
from tests.fuzz.words import CHARACTERS, Pieces, said, tags, without, words

TAGS = [*tags("search", "answer", "information", "think"), "Doc 1(Title: x)"]
CLOSED = ("<answer>", "</answer>", "<search>", "</search>")
SYLLABLES = ("kal", "mar", "vex", "ojt", "quen", "bru", "zith", "lop", "drae", "fyn")
HEADERS = {
    "Retry-After": ("0", "9" * 5000, "-1", "now"),
    "Content-Encoding": ("gzip", "br", "x"),
    "Content-Type": ("text/html",),
    "Location": ("http://127.0.0.1:9/",),
    "Content-Length": ("5", "99999", "-1", "x"),
    "X": ("a" * 70_000,),
}


class _Service(http.server.BaseHTTPRequestHandler):
    """An HTTP handler that answers with the prepared replies in order and repeats the last reply."""

    replies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        body = unpacked(reply["body"])
        head = {"Content-Length": str(len(body)), **reply["headers"]}
        lines = [f"HTTP/1.0 {reply['status']} x", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        self.wfile.write("\r\n".join(lines).encode() + body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Suppresses log output."""


@cache
def _service() -> RetrieverConfig:
    server = http.server.HTTPServer(("127.0.0.1", 0), _Service)
    server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # a client that hangs up
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return RetrieverConfig(url=f"http://127.0.0.1:{server.server_port}", timeout_s=1.0, topk=2)


def _reply(random: Random) -> dict[str, Any]:
    contents = said(words(random, TAGS))[:20_000].encode(errors="replace").decode()
    whole = {"result": [[{"document": {"id": "1", "contents": f"Title\n{contents}"}, "score": 1.5}] * 2]}
    body = json.dumps(replaced(random, whole) if random.random() < 0.4 else whole).encode()
    name = random.choice(list(HEADERS))
    return {
        "status": random.choice((*[200] * 8, 204, 301, 400, 401, 404, 413, 500, 503, 99, 999)),
        "headers": {name: random.choice(HEADERS[name])} if random.random() < 0.15 else {},
        "body": packed(spoilt(random, body) if random.random() < 0.3 else body),
    }


def _name(random: Random) -> str:
    return " ".join("".join(random.choices(SYLLABLES, k=3)) for _ in range(random.choice((1, 2, 3))))


def _search(random: Random) -> Any:
    target, turns = _name(random), random.randrange(1, 4)
    wrong = random.choice((0.0, -0.5))
    score = random.choice(("exact_match", "f1"))
    case = partial(case_of, {"target": [target, "x" + target]}, low=min(wrong, 0.0), high=1.0, turns=turns)
    case = partial(case, options={"reward": score, "wrong_answer": wrong})
    texts: list[Pieces] = []
    for _ in range(random.randrange(turns)):  # no answer yet
        before, after = (without(random, CLOSED, TAGS) for _ in range(2))
        spot = random.choice(
            (
                "<search>{}</search>",
                "<search>{}</search><answer>{}</answer>",
                "<answer>{}",
                "{}</answer>",
                "<information>{}</information>",
            )
        )
        texts.append([*before, [" " + spot.format(target, target), 1], *after])
    before = [*without(random, CLOSED, TAGS), [" ", 1]]
    match random.randrange(4):
        case 0:
            form = random.choice(
                (target, target.upper(), f" the {target}!", f"{target}\n", f"“{target}"[1:], target.replace(" ", "  "))
            )
            drawn_case = case(
                say=[*texts, [*before, [f"<answer>{form}</answer>", 1], *words(random, TAGS)]], reward=1.0
            )
        case 1:
            said_wrong = random.choice(
                (
                    _name(random).replace(" ", "q ") + "q",
                    target.replace(" ", "q ") + "q",
                    "".join(random.choice(CHARACTERS) for _ in range(9)),
                    "x",
                    "1",
                )
            )
            drawn_case = case(
                say=[*texts, [*before, [f"<answer>{said_wrong}</answer><answer>{target}</answer>", 1]]], reward=wrong
            )
        case 2:
            last = [[*before, [f"{target}</answer><answer>{target}", 1]]] * (turns - len(texts))
            drawn_case = case(say=[*texts, *last], reward=0.0)
        case _:
            drawn_case = case(say=[words(random, TAGS) for _ in range(turns)], reward=None)
    return {**drawn_case, "replies": [_reply(random) for _ in range(random.randrange(1, 4))]}


def _run(case: Any, folder: Path) -> None:
    _Service.replies = list(case["replies"])
    play("search", case, _service())


def _prepare() -> None:
    _service()


TARGETS = {"search": Target(_search, _run, errors=(), prepare=_prepare)}
