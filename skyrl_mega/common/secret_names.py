"""Recognition of secrets by the words of a name and by the form of a text, without knowing any value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


MASK = "***"
WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
"""A word of a name: api_key, X-API-Key, apiKey and APIKey all consist of `api`, `key`."""
SECRETS = _set(
    "secret password passwd passphrase passcode pwd credential cred auth oauth authorization authorisation "
    "authentication bearer cookie jwt apikey"
)
"""Words in the name of a secret, at any position."""
ENDINGS = re.compile(
    r".+(secret|password|passwd|passphrase|credential|apikey|accesskey|privatekey)|.*(auth|access)token"
)
"""Secret words joined to other words: `dbpassword`."""
HIDE_NUMBERS = _set("secret password passwd passphrase passcode pwd credential")
OF_KEYS = _set("api access secret private auth encryption signing")
"""Words before `key` in the name of a secret, at any position: `api_key_openai`."""
ABOUT = _set(
    "variable var env environment name file filename path dir directory folder url uri endpoint host port type kind "
    "method mode scheme provider required enabled length size count limit timeout ttl rate manager store backend"
)
"""Last words of names about a secret without the secret itself: `token_variable`, `password_file`."""
TEXT_TOKENS = _set(
    "eos bos pad unk sep cls mask special stop end start begin added additional reserved image video audio text turn "
    "message think thinking tool micro prompt response completion input output new begin first last next decoder vocab "
    "batched speculative spec suppress skip padding overflowing embed"
)
"""Words before `token` in names of tokenizer tokens and token counts."""
COUNTS = _set("max min num n total per budget")
"""Words anywhere before `token` in names of token counts: `max_num_batched_tokens`."""
DATA_KEYS = _set(
    "answer question primary foreign sort group public partition index cache input output prompt response image video "
    "audio data dataset target label dict json yaml map column field row value attention query ground gold truth id "
    "text message reward metric score problem solution tool template name hot monitor eval train reference source "
    "content config setting object property join order unique search lookup hash shard split category class task "
    "instruction example last first next start end max min num kv head "
    "hashing ignore share att metadata multimodal fn"
)
"""Words before `key` in names of data keys."""
WAYS = _set("two one first second third forward backward single multi num n max min per by all")
"""Words before `pass` in names with another meaning: `two_pass`."""
OWNERS = _set(
    "api service account openai anthropic azure google gemini aws wandb hf huggingface mistral deepseek serper bing "
    "tavily brave"
)
"""Names of mappings with a secret under `key`."""
PLAIN_HEADERS = re.compile(r"accept|accept-.*|content-.*|user-agent|host|connection|cache-control", re.IGNORECASE)
IN_QUERY = frozenset(("key", "sig", "signature"))
"""Parameters with a secret value only in the query of an address."""
CLASSES = "environment.classes."
NAMES = ("environment.options.", CLASSES)
"""Settings with user-given names as first key."""

USER = re.compile(r"(?<=://)(?:[^\s/?#]+|[^\s/?#@:]+:(?!\d+(?:[/?#,]|$))\S+)(?=@)")
"""User and password before a host; a password may contain an unescaped slash or @."""
SCHEME = re.compile(r"(Bearer|Basic|Token)\s+(?!\$\{)\S+", re.IGNORECASE)
"""The whole value of an Authorization header."""
COUNT_OPTIONS = frozenset(("tokens",))
"""Options of our own commands with the name of a secret: `--simulate --tokens 2000,0.8`."""
PROSE = _set(
    "a an the there is are was were has have had no not must needs takes cannot does in of for and or with it that this"
)
"""Words after a name in a sentence about the name: `--wandb-key is slime's`, `api_key: there is no such option`."""
ENV_REFERENCE = re.compile(r"\$\{[^}]*\}")
PAIR = re.compile(
    r"(?P<before>[?&]|(?<![\w.-]))(?P<dashes>--?)?(?P<name>[A-Za-z][\w.-]*)"
    r"(?P<sign>(?P<shown> = )|=|[\"']\s*[:=]\s*|:\s*|\s+)(?:(?:Bearer|Basic|Token)\s+)?"
)
"""A name and the separator before its value."""
VALUE = re.compile(r"\"(?P<double>[^\"]+)\"|'(?P<single>[^']+)'|(?P<plain>[^\s&;'\"]+)")
SHOWN = re.compile(r"(?P<plain>(?:(?!: | is not known|;).)+)")
"""A value in an error message: `key = value: allowed is …`."""


def is_secret(key: str, value: Any) -> bool:
    """Returns True if a setting must be masked, by the words of its key or of a group above, such as `auth.value`.

    Returns False for None, booleans, empty text, mappings and lists. A number must be masked only if a word such as
    `password` (`HIDE_NUMBERS`) ends its key or a group's name.

    Args:
        key: Dotted key of the setting.
        value: The setting's value.
    """
    for prefix in NAMES:
        if key.startswith(prefix):
            name, _, rest = key.removeprefix(prefix).partition(".")
            key = rest or ("" if prefix == CLASSES else name)
    parts = [part for part in key.split(".") if part and not part.isdigit()]
    if not parts or isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        return False
    if not isinstance(value, str):
        return any((_words(part) or [""])[-1] in HIDE_NUMBERS for part in parts)
    if any(map(_has_secret_name, parts[:-1])):
        return True
    if any((_words(part) or [""])[-1] == "header" for part in parts[:-1]) and not PLAIN_HEADERS.fullmatch(parts[-1]):
        return True
    if _words(parts[-1]) == ["key"]:
        owner = (_words(parts[-2]) or [""])[-1] if len(parts) > 1 else ""
        return owner in OWNERS or _is_random(value)
    counts = parts[-1].lower().endswith("tokens") and value.strip().isdigit()
    return _has_secret_name(parts[-1]) and not counts


def hide_in_text(text: str) -> str:
    """Returns a text with secrets replaced by `***`: in addresses, connection strings, headers, JSON and command
    options. References such as `${oc.env:NAME}` stay. A text without a secret is returned unchanged."""
    if SCHEME.fullmatch(text):
        return MASK
    for start, end in reversed(list(secret_spans(text))):
        if not ENV_REFERENCE.fullmatch(text[start:end]):
            text = f"{text[:start]}{MASK}{text[end:]}"
    return USER.sub(lambda match: _mask_user(match[0]), text)


def secret_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yields start and end index (exclusive) of each secret in a text, in order and without overlaps: the value after a
    name, as in `api_key=…` or `--token …`.

    Includes values that are a reference (`${…}`) or masked already; excludes a password before a host (`user:…@host`).
    """
    position = 0
    while pair := PAIR.search(text, position):
        position = pair.end("name")
        pattern = SHOWN if pair["shown"] and "." in pair["name"] else VALUE
        value = pattern.match(text, pair.end())
        if value and value.lastgroup and _is_secret_pair(pair, value[value.lastgroup]):
            yield value.span(value.lastgroup)
            position = value.end()


def is_option(word: Any) -> bool:
    """Returns True if a word of a command is an option with the name of a secret, such as `--api-key`: the next word
    must be masked. False for `--api-key=…`, and for anything but text."""
    return (
        isinstance(word, str) and bool(re.fullmatch(r"--?[A-Za-z][\w-]*", word)) and _has_secret_name(word.lstrip("-"))
    )


def names_secret(name: str) -> bool:
    """Returns True if an environment variable with this name usually contains a secret, such as `HF_TOKEN`."""
    return _has_secret_name(name) or _words(name) == ["key"]


def _is_secret_pair(pair: re.Match[str], value: str) -> bool:
    name, sign = pair["name"], pair["sign"]
    if pair["dashes"] and name in COUNT_OPTIONS:
        return False
    if sign.isspace() and not pair["dashes"]:
        return False
    if sign.startswith(":") and not (
        "-" in name or "_" in name or _words(name)[-1] in ("authorization", "cookie", "key")
    ):
        return False  # prose: "Your password: …"
    if pair["before"] and name.lower() in IN_QUERY:
        return True
    return is_secret(name, value) and not value.startswith("//") and value not in PROSE


def _has_secret_name(part: str) -> bool:
    """Returns True if a part of a key, or an option, is named like a secret."""
    words = _words(part)
    while len(words) > 1 and words[-1] in ("value", "text", "string", "str"):
        words.pop()
    if not words or (len(words) > 1 and words[-1] in ABOUT):
        return False
    if any(word in SECRETS or ENDINGS.fullmatch(word) for word in words):
        return True
    if any(first in OF_KEYS and second == "key" for first, second in pairwise(words)):
        return True
    preceding = words[-2] if len(words) > 1 else ""
    if words[-1] == "token":
        return preceding not in TEXT_TOKENS and COUNTS.isdisjoint(words)
    if words[-1] == "key":
        return bool(preceding) and preceding not in DATA_KEYS
    return words[-1] == "pass" and preceding not in WAYS


def _words(part: str) -> list[str]:
    words = [word.lower() for word in WORD.findall(part)]
    return [word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word for word in words]


def _is_random(value: str) -> bool:
    """Returns True if a text looks like a generated key: long, without spaces, with letters and digits."""
    mixed = bool(re.search(r"\d", value)) and bool(re.search(r"[A-Za-z]", value))
    return bool(re.fullmatch(r"[\w+/=-]{8,}", value)) and mixed


def _mask_user(text: str) -> str:
    """Returns the user info before a host, masked unless taken entirely from the environment."""
    return text if re.fullmatch(r"(?:[\w.-]+:)?(?:\$\{[^}]*\}:?)+", text) else MASK
