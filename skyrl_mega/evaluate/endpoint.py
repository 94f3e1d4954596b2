"""An OpenAI-compatible endpoint in place of engines: receives conversations as messages through `/chat/completions`.

Every such endpoint accepts messages and renders these with a template of its own. It reports the number of tokens but
not the tokens. A trajectory therefore contains UNKNOWN tokens, so that budgets count the same way.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import httpx

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.replies import NoAnswer, Retries, ask_again, error_text
from skyrl_mega.common.safe_read import Malformed, parse_json
from skyrl_mega.common.values import shown
from skyrl_mega.config.derived import evaluation_concurrency, evaluation_sampling
from skyrl_mega.config.schema import Config, RolloutConfig, SamplingConfig
from skyrl_mega.envs.base import Message
from skyrl_mega.rollout.agent import edits
from skyrl_mega.rollout.agent.agent_loop import Agent, PolicyTurn, Tools
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.opened import Opened
from skyrl_mega.rollout.agent.seeds import stream_seed
from skyrl_mega.trajectories.trajectory import Kind, Trajectory, TrajectoryStep

MAX_TOKENS = 2**22
"""Largest credible token count of an answer; a trajectory keeps an entry in memory per token."""
UNKNOWN = -1
"""Placeholder for a counted but unknown token."""
ATTEMPTS = 8
"""Maximum number of attempts of a request."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Pause before the first and the longest pause before a later retry."""
TOO_LONG = ("context_length_exceeded", "context length", "maximum model length", "max_model_len")
"""Phrases in an endpoint's error for a conversation beyond the context length."""


class EndpointFailed(RuntimeError):
    """The endpoint did not answer in any attempt, or answered in an unknown form. Names the URL and the last cause."""


@dataclass(frozen=True)
class Endpoint:
    """Address and model of an endpoint."""

    url: str
    """Base address, without `/chat/completions`."""
    model: str
    """Name of the model at the endpoint."""
    key: str | None = field(default=None, repr=False)
    """Bearer token."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable of the key, for errors."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of every request; null removes a field."""

    @classmethod
    def of(cls, url: str, model: str | None, key_variable: str, key: str | None, extra: str) -> Endpoint:
        """Returns the endpoint of command-line options.

        Args:
            url: Address of the endpoint (`--endpoint`). `/chat/completions` at the end is removed, and `/v1` is added
                to an address without a path.
            model: Name of the model at the endpoint (`--served-model`).
            key_variable: Name of the environment variable with the API key.
            key: The API key; None without a key.
            extra: Additional fields of each request, as a JSON object (`--request`).

        Raises:
            UserError: The address is invalid or contains a user or password, the model's name is missing, or the fields
                are no JSON object.
        """
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UserError(
                f"{error}; allowed is http://host:port/v1 or https://…", key="--endpoint", value=url
            ) from error
        if (
            parsed.scheme not in ("http", "https")
            or not parsed.host
            or not 1 <= (80 if parsed.port is None else parsed.port) <= 65535
        ):
            raise UserError("allowed is http://host:port/v1 or https://…", key="--endpoint", value=url)
        if parsed.userinfo:
            raise UserError(
                "the address must not contain a key or password",
                key="--endpoint",
                fix=f"set the environment variable {key_variable}",
            )
        if not model:
            raise UserError(
                "the name of the model is missing",
                key="--endpoint",
                value=url,
                fix="give --served-model, the name under which the endpoint serves the model",
            )
        try:
            fields = parse_json(extra)
        except Malformed as error:
            raise UserError(f"{error}; allowed is a JSON object", key="--request", value=extra[:200]) from error
        if not isinstance(fields, dict):
            raise UserError(
                "allowed is a JSON object, such as '{\"max_completion_tokens\": 500}'",
                key="--request",
                value=extra[:200],
            )
        base = url.rstrip("/").removesuffix("/chat/completions")
        if parsed.path in ("", "/"):
            base += "/v1"
        return cls(base, model, key, key_variable, fields)

    @property
    def is_local(self) -> bool:
        """True if the address of the endpoint is a loopback address or localhost; requests then bypass proxies."""
        host = httpx.URL(self.url).host
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


class Reply(NamedTuple):
    """An answer of the endpoint: the text, and numbers of tokens."""

    text: str
    """The text, including the stop string at the end, if any."""
    cut: bool
    """True if the limit on tokens ended the answer."""
    prompt_tokens: int
    """Number of tokens of the conversation before the answer."""
    tokens: int
    """Number of tokens of the answer."""


class EndpointClient:
    """A client of an endpoint, with bounded retries. Belongs to a single event loop.

    Args:
        endpoint: The endpoint.
        sampling: Sampling settings of all requests.
        timeout_s: Time limit per attempt, in seconds.
        http: The HTTP client.
    """

    def __init__(self, endpoint: Endpoint, sampling: SamplingConfig, timeout_s: float, http: httpx.AsyncClient) -> None:
        self.endpoint, self.sampling, self.timeout_s, self.http = endpoint, sampling, timeout_s, http

    async def reply(self, messages: Sequence[Mapping[str, Any]], max_tokens: int, seed: int) -> Reply | None:
        """Returns the next message, or None if the endpoint refuses the request as longer than its context. Endpoints
        refuse a conversation that is too long alone, and also one too long together with `max_tokens`.

        Fields of `endpoint.extra` replace fields of the request; a field with the value None is left out.

        Args:
            messages: The conversation.
            max_tokens: Maximum number of tokens of the reply.
            seed: Seed of the sampling.

        Raises:
            UserError: The endpoint refused the request, the key or the model's name.
            EndpointFailed: No answer in `ATTEMPTS` attempts of `timeout_s` each, or an answer in an unknown form or
                with broken compression.
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
            raise EndpointFailed(f"{self.endpoint.url} did not answer as OpenAI's chat completions: {error}") from error
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise EndpointFailed(
                f"{self.endpoint.url} did not answer as OpenAI's chat completions: {type(error).__name__}: {error}"
            ) from error

    async def _ask(self, body: dict[str, Any]) -> Any:
        url = f"{self.endpoint.url}/chat/completions"
        retries = Retries(FIRST_PAUSE_S, LONGEST_PAUSE_S, attempts=ATTEMPTS)
        try:
            response, data = await ask_again(self.http, "POST", url, body, self.timeout_s, retries=retries)
            if response.is_success:
                return parse_json(data)
        except NoAnswer as error:
            raise EndpointFailed(
                f"{url} gave no answer in {ATTEMPTS} attempts; the last: {self._without_key(str(error))}; an attempt "
                f"takes at most rollout.request_timeout_s = {self.timeout_s:g}"
            ) from None  # the cause may repeat the key
        except (Malformed, httpx.DecodingError) as error:  # neither JSON nor the compression that it names
            raise EndpointFailed(f"{self.endpoint.url} did not answer as OpenAI's chat completions: {error}") from error
        message = self._without_key(error_text(response, data))
        if response.status_code == 400 and any(words in message for words in TOO_LONG):
            return None
        raise UserError(
            f"--endpoint {url} refused, HTTP {response.status_code}: {message}",
            fix=self._fix_hint(response.status_code),
        )

    def _without_key(self, message: str) -> str:
        """Replaces the key in an error text: some endpoints repeat the key."""
        return message.replace(self.endpoint.key, "***") if self.endpoint.key else message

    def _fix_hint(self, status: int) -> str:
        if status in (401, 403):
            state = "has a key that the endpoint refuses" if self.endpoint.key else "is not set"
            return f"the environment variable {self.endpoint.key_variable} {state}"
        if status == 404:
            return f"fix --endpoint, or --served-model {self.endpoint.model}"
        return "correct the setting in the message; --request '{\"FIELD\": null}' removes a field from the requests"


class MessageAgent(Agent):
    """An agent that runs trajectories against an endpoint, which sees messages and never tokens.

    Args:
        client: The client.
        config: Environments and budgets.
    """

    def __init__(self, client: EndpointClient, config: Config) -> None:
        unused: Any = None  # router and renderer: the endpoint has its own
        limits = replace(TrajectoryLimits.of(config.rollout), turn=client.sampling.max_tokens)
        threads, reward_weights = EnvPool(config.environment.workers), config.algorithm.reward_weights
        super().__init__(unused, unused, config.environment, limits, threads, reward_weights=reward_weights)
        self.client = client

    @property
    def one_message(self) -> bool:
        """False: an endpoint's template always separates the messages (`rollout.conversation` is messages)."""
        return False

    def first(self, messages: list[Message], tools: Tools = ()) -> list[int]:
        """Returns [], no tokens: the endpoint tokenises, and its next reply reports the number of prompt tokens."""
        return []

    def following(self, t: Trajectory, observations: list[Message], tools: Tools = ()) -> list[int]:
        """Returns [], no tokens: the endpoint tokenises, and its next reply reports the number of prompt tokens."""
        return []

    async def generate_turn(self, opened: Opened, name: str, room: int) -> PolicyTurn:
        """Asks the endpoint for the next turn, appends placeholders of its tokens (`UNKNOWN`) and a step to the
        trajectory, and returns the text, the number of tokens, and `length` for a truncated turn, else `stop`.

        Returns an empty, truncated turn, and appends nothing, if the conversation alone, or together with `room`,
        exceeds the endpoint's context.

        Args:
            opened: The trajectory so far.
            name: Unique name of the turn; the seed of the sampling follows from the name.
            room: Most tokens of the turn.

        Raises:
            EndpointFailed: The endpoint gave no answer, or one in another form.
            UserError: The endpoint refused the request.
        """
        t, start = opened.trajectory, opened.seconds
        reply = await self.client.reply(_conversation(t), room, stream_seed(name) >> 32)  # 31 bits: valid everywhere
        if reply is None:
            return PolicyTurn("", 0, "length")
        edits.append(t, [UNKNOWN] * max(0, reply.prompt_tokens - len(t.context)), 0)
        if t.turns == 0:
            t.prompt_length = len(t.tokens)
        end, finish = len(t.tokens), "length" if reply.cut else "stop"
        spent = opened.seconds - start
        t.steps.append(TrajectoryStep(Kind.RESPONSE, end, end, at_s=start, generate_s=spent, finish=finish))
        edits.append(t, [UNKNOWN] * reply.tokens, 1)
        return PolicyTurn(reply.text, reply.tokens, finish)


@dataclass(frozen=True)
class EndpointSource:
    """Source of agents that play trajectories against an endpoint."""

    endpoint: Endpoint
    config: Config
    """The evaluation's settings."""

    @property
    def at_once(self) -> int:
        """Maximum number of concurrent trajectories, and thus of requests."""
        return evaluation_concurrency(self.config, endpoint=True)

    @asynccontextmanager
    async def player(self) -> AsyncIterator[Agent]:
        """Yields an agent that runs trajectories against the endpoint, for use in a single event loop. Afterwards its
        HTTP client is closed."""
        timeout = self.config.rollout.request_timeout_s
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self.endpoint.key}"} if self.endpoint.key else {},
            limits=httpx.Limits(max_connections=self.at_once, max_keepalive_connections=self.at_once),
            timeout=timeout,
            trust_env=not self.endpoint.is_local,
        ) as http:
            endpoint = with_template_options(self.endpoint, self.config.rollout)
            yield MessageAgent(EndpointClient(endpoint, evaluation_sampling(self.config), timeout, http), self.config)

    def refill(self) -> None:
        """Does nothing: there are no engines to restart."""


def with_template_options(endpoint: Endpoint, rollout: RolloutConfig) -> Endpoint:
    """Returns the endpoint with `rollout.chat_template_options` as field `chat_template_kwargs` of each request.

    vLLM and SGLang read this field. A field of the same name in `endpoint.extra` wins. Without options, the endpoint is
    unchanged.
    """
    options = rollout.chat_template_options
    return replace(endpoint, extra={"chat_template_kwargs": options, **endpoint.extra}) if options else endpoint


def with_stop_string(text: str, choice: Mapping[str, Any], stops: Sequence[str]) -> str:
    """Returns a reply's text with the stop string that ended it: endpoints leave this string out.

    vLLM (`stop_reason`) and SGLang (`matched_stop`) report the stop string. For other endpoints, a reply stopped inside
    an open tag gets the stop string closing this tag. Every other text is returned unchanged.

    Args:
        text: The text of the reply.
        choice: The reply's entry in `choices`.
        stops: The requested stop strings.
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
    """Returns the messages from the last prompt on: an environment may have replaced the conversation."""
    last = max(i for i, step in enumerate(t.steps) if step.kind is Kind.PROMPT)
    return t.messages[sum(step.messages for step in t.steps[:last]) :]


def _reply(answer: Any, stops: Sequence[str]) -> Reply:
    """Extracts the used parts of an answer and checks the types.

    Raises:
        Malformed: A part is of another type.
    """
    choice, usage = answer["choices"][0], answer["usage"]
    text, finish = choice["message"].get("content"), choice["finish_reason"]
    if not isinstance(text, str | None) or not isinstance(finish, str | None):
        raise Malformed(f"content is {type(text).__name__}, finish_reason {type(finish).__name__}; allowed is text")
    tokens = [usage[name] for name in ("prompt_tokens", "completion_tokens")]
    if not all(type(n) is int and 0 <= n <= MAX_TOKENS for n in tokens):
        raise Malformed(f"usage {shown(tokens)}; allowed are whole numbers from 0 to {MAX_TOKENS}")
    return Reply(with_stop_string(text or "", choice, stops), finish == "length", *tokens)
