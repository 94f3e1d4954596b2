"""Requests to a running run for further or fewer engines, as files in the run's folder.

`python -m skyrl_mega.engines` writes `engines/request-<id>.json`; the driver removes the file and puts the answer into
`engines/state.json`, beside the list of engines. Both files appear complete, by renaming. The driver treats the folder
as hostile: it opens regular files of its own user only, reads at most `MOST_BYTES`, and removes only files that this
module wrote, by name and content.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.temporary_files import write_whole
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed, parse_json, read_json
from skyrl_mega.common.terminal import one_line

FOLDER = "engines"
"""Subfolder of a run's folder."""
STATE = "state.json"
FORMAT = "skyrl_mega engine request 1"
"""Mark of a request, and of the state."""
NAME = re.compile(r"request-([0-9a-f]{16})\.json")
"""Names of requests."""
MOST_BYTES = 2**16
"""Largest request in bytes."""
MOST_FILES = 64
"""Most requests read at once."""
MOST_ENGINES = 1024
"""Most engines of a request."""
ANSWERS = 64
"""Number of answers kept in the state."""
LOOK_EVERY_S = 0.2
"""Seconds between two looks for an answer."""


@dataclass(frozen=True)
class EngineRequest:
    """A request for further or fewer engines."""

    id: str
    """Sixteen hexadecimal digits."""
    action: str
    """`add` or `remove`."""
    count: int = 1
    """Number of engines to add."""
    node: str = ""
    """Address of the node of the engines to add or remove; empty means any node, or the engines of `engines`."""
    endpoint: str = ""
    """URL of a server to add as an engine; empty starts an engine of the run."""
    kind: str = ""
    """Kind of the server (`EndpointConfig.kind`); empty takes the default."""
    sync: str = ""
    """How the server takes new weights (`EndpointConfig.sync`); empty takes the default."""
    token_env: str = ""
    """Name of the run's environment variable with the server's API key; empty sends no key."""
    engines: tuple[int, ...] = ()
    """Ranks of the engines to remove."""
    grace_s: float | None = None
    """Seconds for requests of removed engines to finish; None takes `rollout.elastic.grace_s`."""

    @property
    def entry(self) -> dict[str, str]:
        """The server as an entry of `rollout.endpoints`: `url`, `kind`, `sync` and `token_env`, without empty values;
        {} for a request without a server."""
        given = {"url": self.endpoint, "kind": self.kind, "sync": self.sync, "token_env": self.token_env}
        return {name: value for name, value in given.items() if value}

    @classmethod
    def parse(cls, content: bytes) -> EngineRequest:
        """Returns the request in a file's content.

        Raises:
            Malformed: The content is no valid request.
        """
        fields = parse_json(content, most=MOST_BYTES, deepest=3)
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise Malformed(f"it is no {FORMAT}")
        if unknown := fields.keys() - cls.__dataclass_fields__.keys():
            raise Malformed(f"it has unknown fields: {', '.join(sorted(unknown))}")
        try:
            request = cls(**{**fields, "engines": tuple(fields.get("engines", ()))})
        except TypeError as error:
            raise Malformed(f"a field is missing or has the wrong type: {error}") from error
        request.check()
        return request

    def check(self) -> None:
        """Raises Malformed if a field has the wrong type or size, or the fields contradict each other, such as a server
        to add on a node."""
        whole = [self.count, *self.engines]
        texts = [self.id, self.action, self.node, self.endpoint, self.kind, self.sync, self.token_env]
        if any(type(number) is not int or not 0 <= number < MOST_ENGINES * 1000 for number in whole):
            raise Malformed("a number of engines, or a rank, is no whole number from 0 on")
        if not all(isinstance(text, str) and len(text) <= 2048 and text.isprintable() for text in texts):
            raise Malformed("a field is no text in one line")
        if self.action not in ("add", "remove") or not 1 <= self.count <= MOST_ENGINES:
            raise Malformed(f"allowed is to add or to remove, at most {MOST_ENGINES} engines")
        if self.action == "remove" and bool(self.node) == bool(self.engines):
            raise Malformed("allowed is to remove engines by ranks, or by the address of a node")
        if self.entry and not self.endpoint:
            raise Malformed("kind, sync and token_env belong to a server; give its URL (endpoint)")
        if self.endpoint and (self.action, self.count, self.node) != ("add", 1, ""):
            raise Malformed("allowed is to add a server without count and node")
        if self.grace_s is not None and (type(self.grace_s) not in (int, float) or not 0 <= self.grace_s <= 86400):
            raise Malformed("grace_s is no number of seconds, at most a day")


@dataclass
class Inbox:
    """The driver's end of the requests. Construction refuses all requests in the folder: these were meant for an
    earlier run.

    Args:
        folder: The run's folder.
        say: Prints a line about a file that is no request.
    """

    folder: Path
    say: Callable[[str], None]
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Request id → `ok` and `text`, the newest last."""
    _refused: set[str] = field(default_factory=set)
    """Names of files reported as no requests."""
    _written: str = ""

    def __post_init__(self) -> None:
        self.folder = self.folder / FOLDER
        self.folder.mkdir(exist_ok=True)
        while earlier := [*self.take()]:
            for request in earlier:
                self.answer(request, False, "the request is older than this start of the run; give the command again")

    def take(self) -> Iterator[EngineRequest]:
        """Removes and yields the requests that have arrived, in the order of their names, at most `MOST_FILES`; a
        request stays until its turn. Files that are no requests stay, and are reported once by `say`. Raises OSError if
        the folder of the requests cannot be listed."""
        names = sorted(name for name in os.listdir(self.folder) if NAME.fullmatch(name) and name not in self._refused)
        for name in names[:MOST_FILES]:
            try:
                content = _read_own(self.folder / name)
                request = EngineRequest.parse(content)
                if name != f"request-{request.id}.json":
                    raise Malformed("its id is not the file's name")
                os.unlink(self.folder / name)
            except FileNotFoundError:  # withdrawn
                continue
            except (Malformed, OSError) as error:
                self._refused.add(name)
                self.say(f"{self.folder / name} is no request for engines, and stays: {one_line(str(error), 200)}")
                continue
            yield request

    def answer(self, request: EngineRequest, ok: bool, text: str) -> None:
        """Records the answer to a request, and keeps the newest `ANSWERS`; `write` delivers the answers.

        Args:
            request: The request.
            ok: True if the request was granted.
            text: The answer for the user.
        """
        self.answers[request.id] = {"ok": ok, "text": text}
        while len(self.answers) > ANSWERS:
            del self.answers[next(iter(self.answers))]

    def write(self, engines: list[Mapping[str, Any]], most: int) -> None:
        """Writes the engines, `most`, the driver's host and process, and the answers recorded by `answer`, to the run's
        `engines/state.json`.

        Replaces the file in one step. Does nothing if the content is the same as in the last successful call.

        Args:
            engines: Rank, state and place of every engine.
            most: `rollout.elastic.most`.

        Raises:
            OSError: The file cannot be written; the next call tries again.
        """
        driver = {"host": platform.node(), "pid": os.getpid()}
        state = {"format": FORMAT, "most": most, "driver": driver, "engines": engines, "answers": self.answers}
        text = json.dumps(state, indent=1)
        if text != self._written:
            write_whole(self.folder / STATE, text.encode())
            self._written = text


def has_ended(state: Mapping[str, Any]) -> bool:
    """Returns True if the driver that wrote a state has ended. A driver on another machine counts as running until it
    writes a state without engines at its end.

    Args:
        state: Result of `read_state`.
    """
    driver = state.get("driver")
    host, pid = (driver.get("host"), driver.get("pid")) if isinstance(driver, dict) else (None, None)
    gone = host == platform.node() and type(pid) is int and not Path(f"/proc/{pid}").exists()
    return gone or not state.get("engines")


def read_state(run: Path) -> dict[str, Any]:
    """Returns the state written by the driver of a run (`Inbox.write`): `format`; `most`; `driver`, its `host` and
    `pid`; `engines`; and `answers`, request id → `ok` and `text`.

    Raises:
        UserError: The run accepts no requests, has not started, or wrote a state that cannot be read.
    """
    if not run.is_dir():
        raise UserError("the folder does not exist", key=run, fix="give the folder of a running run, runs/<name>")
    if not (run / FOLDER / STATE).exists():
        raise UserError(
            "this run has written no list of its engines; engines join and leave with rollout.elastic.most above 0",
            key=run,
            fix="give the folder of a running run",
        )
    state = read_json(run / FOLDER / STATE, "give the folder of a running run")
    if state.get("format") != FORMAT:
        raise UserError(f"its {FOLDER}/{STATE} was not written by this version", key=run)
    return state


def send(run: Path, request: EngineRequest, wait_s: float) -> tuple[bool, str]:
    """Leaves a request in a run's folder, waits for the answer of the driver and returns the answer: True if the
    request was accepted, and a sentence. After `wait_s` seconds without an answer, withdraws the request; if the driver
    has taken it meanwhile, returns True and a sentence that says so.

    Raises:
        UserError: The run accepts no requests, the folder cannot be written, or there was no answer.
    """
    read_state(run)
    file = run / FOLDER / f"request-{request.id}.json"
    try:
        write_whole(file, json.dumps({"format": FORMAT, **asdict(request)}).encode())
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}", key=run) from error
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        answer = read_state(run).get("answers", {}).get(request.id)
        if isinstance(answer, dict):
            return answer.get("ok") is True, one_line(str(answer.get("text", "")))
        time.sleep(LOOK_EVERY_S)
    try:
        file.unlink()
    except FileNotFoundError:
        return True, "the run has taken the request, and has not answered yet; see `list`"
    raise UserError(f"no answer within {wait_s:g} s, so the request is withdrawn; is the run still running?", key=run)


def new_id() -> str:
    """Returns a random id for a new request: sixteen hexadecimal digits."""
    return secrets.token_hex(8)


def _read_own(file: Path) -> bytes:
    """Returns the content of a regular file of this user.

    Raises:
        OSError, Malformed: The file is a link, of another user, of another kind, or too large.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise Malformed("it is no regular file of this user")
        content = opened.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise Malformed(f"it has more than {MOST_BYTES} bytes")
    return content
