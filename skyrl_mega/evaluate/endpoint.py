"""An OpenAI-compatible endpoint in place of engines: the conversation goes to it as messages, `/chat/completions`.

Messages are what every such endpoint takes, whoever serves it. It renders them with a template of its own, and says how
many tokens that was but not which: in a trajectory's tokens they are UNKNOWN, so that budgets count the same way.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import httpx

from skyrl_mega.config.derived import evaluation_concurrency, evaluation_sampling
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.replies import ask
from skyrl_mega.config.safe_read import Malformed, parse_json
from skyrl_mega.config.schema import Config, RolloutConfig, SamplingConfig
from skyrl_mega.config.terminal import one_line
from skyrl_mega.config.values import shown
from skyrl_mega.envs.base import Message
from skyrl_mega.rollout.agent_loop import Agent, Limits, Opened, PolicyTurn, Tools, append, stream_seed
from skyrl_mega.rollout.env_pool import EnvPool
from skyrl_mega.rollout.trajectory import Kind, Step, Trajectory

MOST_TOKENS = 2**22
"""That an answer may say it had: each is counted in memory."""
UNKNOWN = -1
"""A token that is counted and not known."""
ATTEMPTS = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Pauses between attempts grow twofold from the one to the other; each is drawn between half and all of that."""
WORTH_A_RETRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
TOO_LONG = ("context_length_exceeded", "context length", "maximum model length", "max_model_len")
"""How endpoints say that a conversation does not fit."""


class EndpointFailed(RuntimeError):
    """The endpoint gave no answer in all attempts, or one of another form. Names its URL and the last cause."""


@dataclass(frozen=True)
class Endpoint:
    """Whom to ask."""

    url: str
    """Up to and without `/chat/completions`."""
    model: str
    """The name that it serves the model under."""
    key: str | None = field(default=None, repr=False)
    """Sent as a bearer token."""
    key_variable: str = "OPENAI_API_KEY"
    """Where the key came from, for errors."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More fields of every request; null takes a field out."""

    @classmethod
    def of(cls, url: str, model: str | None, key_variable: str, key: str | None, extra: str) -> Endpoint:
        """From the command line.

        Raises:
            UserError: An address that is none, no model's name, or fields that are no JSON object.
        """
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UserError(f"--endpoint {url}: {error}; allowed is http://host:port/v1") from error
        if (
            parsed.scheme not in ("http", "https")
            or not parsed.host
            or not 1 <= (80 if parsed.port is None else parsed.port) <= 65535
        ):
            raise UserError(f"--endpoint {url}: allowed is http://host:port/v1 or https://…")
        if parsed.userinfo:
            raise UserError(
                f"--endpoint: a key is not given in the address; set the environment variable {key_variable}"
            )
        if not model:
            raise UserError(f"--endpoint {url}: it needs --served-model, the name that it serves the model under")
        try:
            fields = parse_json(extra)
        except Malformed as error:
            raise UserError(f"--request {extra[:200]}: {error}; allowed is a JSON object") from error
        if not isinstance(fields, dict):
            raise UserError(
                f"--request {extra[:200]}: allowed is a JSON object, such as '{{\"max_completion_tokens\": 500}}'"
            )
        base = url.rstrip("/").removesuffix("/chat/completions")
        if parsed.path in ("", "/"):
            base += "/v1"
        return cls(base, model, key, key_variable, fields)

    @property
    def near(self) -> bool:
        """Whether it is on this machine; then no proxy is asked."""
        host = httpx.URL(self.url).host
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


class Reply(NamedTuple):
    """What the endpoint said."""

    text: str
    """With the stop string that ended it, where there was one."""
    cut: bool
    prompt_tokens: int
    """Tokens of the conversation before it."""
    tokens: int


class Client:
    """Asks an endpoint, with bounded retries. Lives in one event loop.

    Args:
        endpoint: Whom to ask.
        sampling: How all replies are drawn.
        timeout_s: Seconds for one attempt.
        http: A client of its own; `connected` makes one.
    """

    def __init__(self, endpoint: Endpoint, sampling: SamplingConfig, timeout_s: float, http: httpx.AsyncClient) -> None:
        self.endpoint, self.sampling, self.timeout_s, self.http = endpoint, sampling, timeout_s, http

    async def reply(self, messages: Sequence[Mapping[str, Any]], max_tokens: int, seed: int) -> Reply | None:
        """The next message; None where the conversation is longer than the endpoint's context.

        Raises:
            UserError: It refused the request, the key or the model's name.
            EndpointFailed: No answer in ATTEMPTS attempts, or one of another form.
        """
        sampling = self.sampling
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.top_k != -1:
            body["top_k"] = sampling.top_k
        body = {name: value for name, value in {**body, **self.endpoint.extra}.items() if value is not None}
        answer = await self._ask(body)
        if answer is None:
            return None
        try:
            return _reply(answer, sampling.stop)
        except Malformed as error:
            raise EndpointFailed(f"{self.endpoint.url} answered in another form: {error}") from error
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise EndpointFailed(f"{self.endpoint.url} answered in another form: {error!r} is missing") from error

    async def _ask(self, body: dict[str, Any]) -> Any:
        url, cause, pause = f"{self.endpoint.url}/chat/completions", "", FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            wanted = 0.0
            try:
                response, data = await ask(self.http, "POST", url, body, self.timeout_s)
            except Malformed as error:
                raise EndpointFailed(f"{self.endpoint.url} answered in another form: {error}") from error
            except TimeoutError:
                cause = f"no answer within rollout.request_timeout_s = {self.timeout_s:g}"
            except httpx.TransportError as error:
                cause = f"{type(error).__name__}: {error}".rstrip(": ")
            else:
                if response.is_success:
                    return self._json(data)
                said = self._hidden(_message(response, data))
                if response.status_code == 400 and any(words in said for words in TOO_LONG):
                    return None
                cause = f"HTTP {response.status_code}: {said}"
                if response.status_code not in WORTH_A_RETRY:
                    raise UserError(f"--endpoint {url} refused, {cause}; {self._mend(response.status_code)}")
                wanted = _retry_after(response)
            if attempt < ATTEMPTS:
                # Drawn, so that many do not come back at once.
                await asyncio.sleep(max(min(wanted, LONGEST_PAUSE_S), pause * random.uniform(0.5, 1.0)))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        raise EndpointFailed(f"{url} gave no answer in {ATTEMPTS} attempts; the last: {cause}")

    def _json(self, data: bytes) -> Any:
        try:
            return parse_json(data)
        except Malformed as error:
            raise EndpointFailed(f"{self.endpoint.url} answered in another form: no JSON ({error})") from error

    def _hidden(self, said: str) -> str:
        """What it said, without the key: some repeat it."""
        return said.replace(self.endpoint.key, "***") if self.endpoint.key else said

    def _mend(self, status: int) -> str:
        if status in (401, 403):
            state = "holds another key" if self.endpoint.key else "is not set"
            return f"the environment variable {self.endpoint.key_variable} {state}"
        if status == 404:
            return f"fix --endpoint, or --served-model {self.endpoint.model}"
        return "fix the setting it names; --request '{\"field\": null}' takes a field out of the requests"


class MessageAgent(Agent):
    """Plays trajectories with an endpoint.

    Args:
        client: Where replies come from.
        config: Environments and budgets.
    """

    def __init__(self, client: Client, config: Config) -> None:
        self.client = client
        self.limits = replace(Limits.of(config.rollout), turn=client.sampling.max_tokens)
        self.environments, self.threads = config.environment, EnvPool(config.environment.workers)
        self.reward_weights = config.algorithm.reward_weights

    def first(self, messages: list[Message], tools: Tools = ()) -> list[int]:
        """None: the next reply says how many they were."""
        return []

    def following(self, t: Trajectory, observations: list[Message], tools: Tools = ()) -> list[int]:
        """None: the next reply says how many they were."""
        return []

    async def generate_turn(self, opened: Opened, name: str, room: int) -> PolicyTurn:
        """The endpoint's reply; none, cut off, where the conversation does not fit into its context."""
        t, start = opened.trajectory, opened.seconds
        reply = await self.client.reply(_conversation(t), room, stream_seed(name) >> 32)  # 31 bits: what all take
        if reply is None:
            return PolicyTurn("", 0, "length")
        append(t, [UNKNOWN] * max(0, reply.prompt_tokens - len(t.context)), 0)
        if t.turns == 0:
            t.prompt_length = len(t.tokens)
        end, finish = len(t.tokens), "length" if reply.cut else "stop"
        spent = opened.seconds - start
        t.steps.append(Step(Kind.RESPONSE, end, end, at_s=start, generate_s=spent, finish=finish))
        append(t, [UNKNOWN] * reply.tokens, 1)
        return PolicyTurn(reply.text, reply.tokens, finish)


@dataclass(frozen=True)
class EndpointSource:
    """Agents that ask an endpoint."""

    endpoint: Endpoint
    config: Config

    @property
    def at_once(self) -> int:
        """Conversations, and so requests, at once."""
        return evaluation_concurrency(self.config, endpoint=True)

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[Agent]:
        """An agent for one event loop."""
        timeout = self.config.rollout.request_timeout_s
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self.endpoint.key}"} if self.endpoint.key else {},
            limits=httpx.Limits(max_connections=self.at_once, max_keepalive_connections=self.at_once),
            timeout=timeout,
            trust_env=not self.endpoint.near,
        ) as http:
            endpoint = with_template_options(self.endpoint, self.config.rollout)
            yield MessageAgent(Client(endpoint, evaluation_sampling(self.config), timeout, http), self.config)

    def refill(self) -> None:
        """There is nobody to start again."""


def with_template_options(endpoint: Endpoint, rollout: RolloutConfig) -> Endpoint:
    """The endpoint, told `rollout.chat_template_options` in each request as vLLM and SGLang take them."""
    options = rollout.chat_template_options
    return replace(endpoint, extra={"chat_template_kwargs": options, **endpoint.extra}) if options else endpoint


def restored(text: str, choice: Mapping[str, Any], stops: Sequence[str]) -> str:
    """A reply with the stop string that ended it; endpoints leave it out.

    vLLM (`stop_reason`) and SGLang (`matched_stop`) say which it was. Of others, a reply that stopped while a tag was
    open gets back the stop string that closes this tag.
    """
    if choice.get("finish_reason") != "stop":
        return text
    for name in ("stop_reason", "matched_stop"):
        if name in choice:
            ended = choice[name]
            return text + ended if ended in stops and not text.endswith(ended) else text
    opened = {stop: text.rfind(f"<{stop[2:]}") for stop in stops if stop.startswith("</") and stop.endswith(">")}
    last = max(opened, key=opened.__getitem__, default="")
    return text + last if last and opened[last] > text.rfind(last) else text


def _conversation(t: Trajectory) -> list[dict[str, Any]]:
    """Messages from the last prompt on: an environment may have put a new conversation in the place of the old."""
    last = max(i for i, step in enumerate(t.steps) if step.kind is Kind.PROMPT)
    return t.messages[sum(step.messages for step in t.steps[:last]) :]


def _reply(answer: Any, stops: Sequence[str]) -> Reply:
    """The parts of an answer that are used, each of its type.

    Raises:
        Malformed: One is of another.
    """
    choice, usage = answer["choices"][0], answer["usage"]
    text, finish = choice["message"].get("content"), choice["finish_reason"]
    if not isinstance(text, str | None) or not isinstance(finish, str | None):
        raise Malformed(f"content is {type(text).__name__}, finish_reason {type(finish).__name__}; allowed is text")
    tokens = [usage[name] for name in ("prompt_tokens", "completion_tokens")]
    if not all(type(n) is int and 0 <= n <= MOST_TOKENS for n in tokens):
        raise Malformed(f"usage {shown(tokens)}; allowed are whole numbers from 0 to {MOST_TOKENS}")
    return Reply(restored(text or "", choice, stops), finish == "length", *tokens)


def _message(response: httpx.Response, data: bytes) -> str:
    """What the endpoint said of an error, on one line."""
    try:
        said = parse_json(data)
        error = said.get("error", said)
        text = f"{error.get('message', error)} {error.get('code') or ''}" if isinstance(error, dict) else str(error)
    except (Malformed, AttributeError):
        text = data[:2000].decode(errors="replace") or response.reason_phrase
    return one_line(text, 300)


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the endpoint asks for; 0 when it does not say (or says a date)."""
    try:
        seconds = float(response.headers.get("Retry-After", "0"))
    except ValueError:
        return 0.0
    return seconds if 0 <= seconds < math.inf else 0.0
