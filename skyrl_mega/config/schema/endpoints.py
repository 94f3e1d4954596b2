"""An entry of `rollout.endpoints`: an inference server that the run uses and does not start (docs/endpoints.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Optional
from urllib.parse import urlsplit

from skyrl_mega.config.schema.fields import MOST, Refusals

KINDS = ("vllm", "sglang")
"""Kinds of servers with a client in this project; any other kind is an import path."""
SYNCS = {"vllm": ("group", "files", "directory"), "sglang": ("directory",)}
"""Kind → ways of new weights, the default first. A user's class takes a directory."""
KEY = "rollout.endpoints"
COMMON = ("temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "n", "ignore_eos", "skip_special_tokens")
CONTROLLED = {
    "vllm": (
        *(*COMMON, "max_tokens", "logprobs", "prompt_logprobs", "include_stop_str_in_output"),
        *("detokenize", "truncate_prompt_tokens", "output_kind"),
    ),
    "sglang": (
        *(*COMMON, "min_p", "max_new_tokens", "sampling_seed", "no_stop_trim", "stop_regex"),
        *("return_logprob", "logprob_start_len"),
    ),
}
"""Kind → sampling parameters that the run sets, which `options` must not."""
LONGEST = 1000
"""Characters of an address."""
PORTS = {"http": 80, "https": 443}
"""Scheme → port of an address without one."""


@dataclass(frozen=True)
class EndpointConfig:
    """An inference server outside of the run."""

    url: str
    """Base address: `http://host:port` or `https://…`."""
    kind: str = "vllm"
    """`vllm`, `sglang`, or `path:Class`, a class of six methods."""
    sync: Optional[str] = None
    """How the server takes new weights: `group`, `files` or `directory`; null is the first of `SYNCS`."""
    token_env: Optional[str] = None
    """Name of the environment variable with the server's API key."""
    concurrency: Optional[int] = None
    """Most requests at once; null is `rollout.concurrency`."""
    max_difference: Optional[float] = None
    """Largest mean difference in nats between the log-probs of server and policy after a weight sync; null follows
    `health.mismatch`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request's sampling parameters, or the options of a user's class."""

    @property
    def way(self) -> str:
        """How the server takes new weights: `group`, `files` or `directory`."""
        return self.sync or SYNCS.get(self.kind, ("directory",))[0]


TYPES: Mapping[str, tuple[type, ...]] = {
    "url": (str,),
    "kind": (str,),
    "sync": (str, type(None)),
    "token_env": (str, type(None)),
    "concurrency": (int, type(None)),
    "max_difference": (int, float, type(None)),
    "options": (dict,),
}
"""Key of an entry → allowed types."""


def entries(endpoints: Sequence[Mapping[str, Any]]) -> list[EndpointConfig]:
    """Returns the entries of `rollout.endpoints`. Call only for entries without `refusals`: raises TypeError for an
    unknown or a missing key."""
    return [EndpointConfig(**entry) for entry in endpoints]


def refusals(endpoints: Sequence[Mapping[str, Any]]) -> Refusals:
    """Yields refusals of entries: unknown keys, values of other types or out of range, unusable addresses and ways of
    weights, sampling parameters that the run sets, and an address listed twice. Nothing follows an entry with an
    unknown key, a wrong type or no address."""
    known = [entry_field.name for entry_field in fields(EndpointConfig)]
    for number, entry in enumerate(endpoints):
        key = f"{KEY}.{number}"
        if unknown := [name for name in entry if name not in known]:
            yield f"{key}.{unknown[0]}", f"there is no such key; allowed are {', '.join(known)}", "", ""
            return
        if "url" not in entry:
            yield key, "the address is missing; give url, such as http://127.0.0.1:8000", "", ""
            return
        for name, value in entry.items():
            if not isinstance(value, TYPES[name]) or isinstance(value, bool):
                names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in TYPES[name])
                yield f"{key}.{name}", f"allowed is {names}", "", str(value)
                return
        yield from _refusals(key, EndpointConfig(**entry))
    places = [_place(entry["url"]) for entry in endpoints]
    for entry, place in zip(endpoints, places, strict=True):
        if places.count(place) > 1:
            yield KEY, f"{entry['url'].rstrip('/')} is listed twice", "give it once", ""
            return


def _place(url: str) -> tuple[str, str, int | None, str]:
    """Returns scheme, host, port and path of an address, equal for two spellings of the same address."""
    parsed = urlsplit(url)
    host = parsed.hostname or ""
    return (
        parsed.scheme,
        "127.0.0.1" if host == "localhost" else host,
        parsed.port or PORTS.get(parsed.scheme),
        parsed.path.rstrip("/"),
    )


def _refusals(key: str, entry: EndpointConfig) -> Refusals:
    if problem := url_problem(entry.url):
        yield f"{key}.url", problem, "", "" if "@" in entry.url or not entry.url.isprintable() else entry.url[:LONGEST]
    if entry.kind not in KINDS and ":" not in entry.kind:
        yield f"{key}.kind", f"allowed is {', '.join(KINDS)} or path:Class (docs/endpoints.md)", "", entry.kind
    elif entry.way not in SYNCS.get(entry.kind, ("directory",)):
        allowed = ", ".join(SYNCS.get(entry.kind, ("directory",)))
        yield f"{key}.sync", f"kind={entry.kind} takes weights by {allowed}", "", entry.way
    if entry.concurrency is not None and not 1 <= entry.concurrency <= MOST:
        yield f"{key}.concurrency", f"allowed is a whole number from 1 to {MOST}", "", str(entry.concurrency)
    if entry.max_difference is not None and not 0 < entry.max_difference < 100:
        yield f"{key}.max_difference", "allowed is a number above 0 and below 100", "", str(entry.max_difference)
    for name in entry.options:
        if name in CONTROLLED.get(entry.kind, ()):
            yield f"{key}.options.{name}", "the run decides it (rollout.sampling)", "leave it out", ""


def url_problem(url: str) -> str:
    """Returns the reason why an address cannot be used; "" for a usable address: http or https, with a host, without
    password, query and fragment, of at most `LONGEST` printable ASCII characters without spaces."""
    allowed = "allowed is http://host:port or https://…"
    if not url.isascii() or not url.isprintable() or " " in url or len(url) > LONGEST:
        return f"{allowed}, of at most {LONGEST} printable ASCII characters without spaces"
    try:
        parsed = urlsplit(url)
        port = parsed.port
    except ValueError as error:
        return f"{error}; {allowed}"
    if parsed.scheme not in ("http", "https") or not parsed.hostname or port == 0:
        return allowed
    if "@" in parsed.netloc:
        return "the address must not contain a password; give token_env, the environment variable with the API key"
    if parsed.query or parsed.fragment:
        return f"{allowed}, without a query"
    return ""
