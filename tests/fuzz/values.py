"""Absurd values and bytes."""

from __future__ import annotations

import base64
import json
from random import Random
from typing import Any

NUMBERS: list[Any] = [0, 1, -1, 2**31, 2**63, 10**30, -(10**9), 0.5, 1e-300, 1e308, "NAN", "INF", "-INF", True, False]
TEXTS = ["", " ", "x", "null", "true", "-5", "1e5", "é", "\u202e", "\x1b[2J", "a\0b", "../..", "${run.name}", "${x"]
TEXTS += ["[" * 200, "a" * 5000, "\n", "=", "<|im_end|>", "\ufdd0", "%s%n", "!!python/name:os.system", "&a [*a]", "\\"]
TEXTS += ["'", "{{1/0}}", "${oc.env:HOME}", "${.name}"]


def value(random: Random, depth: int = 0) -> Any:
    """Returns a number, a text, None, or a list or mapping of such values."""
    kind = random.random()
    if kind < 0.35:
        return random.choice(NUMBERS)
    if kind < 0.75 or depth > 3:
        return random.choice([*TEXTS, None])
    if kind < 0.87:
        return [value(random, depth + 1) for _ in range(random.randrange(4))]
    return {str(random.choice(TEXTS)): value(random, depth + 1) for _ in range(random.randrange(4))}


def real(drawn: Any) -> Any:
    """Returns a generated value with real NaN and infinities, which JSON cannot hold."""
    if isinstance(drawn, list):
        return [real(one) for one in drawn]
    if isinstance(drawn, dict):
        return {name: real(one) for name, one in drawn.items()}
    return float(drawn) if drawn in ("NAN", "INF", "-INF") else drawn


def spoilt(random: Random, data: bytes) -> bytes:
    """Returns the bytes with some bytes changed, duplicated, removed or inserted."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5, 20))):
        at = random.randrange(len(out) + 1)
        match random.randrange(6):
            case 0:
                out[at : at + 1] = random.randbytes(1)
            case 1:
                del out[at : at + random.choice((1, 8, 100))]
            case 2:
                out[at:at] = random.randbytes(random.choice((1, 4)))
            case 3:
                out[at:at] = random.choice(TEXTS).encode(errors="surrogatepass")
            case 4:
                out[at:at] = random.choice((b"[", b"{", b'"', b":", b"-9", b"9" * 40, b"NaN", b"null", b"1e999"))
            case _:
                out[at:at] = out[at : at + random.randrange(50)]
    return bytes(out)


def replaced(random: Random, given: Any) -> Any:
    """Returns a copy of a JSON value with an element at any depth replaced or removed."""
    copy = at = json.loads(json.dumps(given))
    for _ in range(random.randrange(1, 7)):
        if not at:
            break
        key = random.choice(range(len(at)) if isinstance(at, list) else list(at))
        if not isinstance(at[key], dict | list) or random.random() < 0.2:
            if random.random() < 0.2:
                del at[key]
            else:
                at[key] = real(value(random))
            break
        at = at[key]
    return copy


def packed(data: bytes) -> str:
    """Returns bytes encoded as text for JSON."""
    return base64.b64encode(data).decode()


def unpacked(text: str) -> bytes:
    """Returns the bytes of a text made by `packed`."""
    return base64.b64decode(text)
