"""The page for reading trajectories: a list with filters on the left, a trajectory on the right.

Texts and tokens are stored in blocks of `BLOCK` trajectories, unpacked on demand by the page, so that a page of some
thousand trajectories opens at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_mega.report.decode import TokenDecoder, decoder_of
from skyrl_mega.report.document import document
from skyrl_mega.report.records import Part, Record, Tokens, tokens_of
from skyrl_mega.report.terminal import tool_text

BLOCK = 64
"""Trajectories per block."""
LONG = 100
"""Longest JSON text kept on a single line, in characters."""
SNIPPET = 140
"""Characters of a trajectory shown in the list."""

Pieces = dict[tuple[int, str | None], int]
"""Distinct tokens of a page, (token id, text), → number of the row in the table `pieces` of the page, from 0; text None
is shown as the number."""

BODY = """<noscript><p>This page shows its trajectories with JavaScript, which is off. Nothing comes from elsewhere.</p>
</noscript><div id="app"></div>
"""


def page(records: Sequence[Record], progress: Callable[[int], None] = lambda _: None) -> str:
    """Returns a self-contained HTML page for reading trajectories, in the order given; reads their tokens from the
    files.

    Args:
        records: The trajectories.
        progress: Called with the number of finished trajectories.

    Raises:
        UserError: A file of tokens, or a run's `config.yaml` or tokenizer, cannot be read.
    """
    decoders = _decoders(records)
    pieces: Pieces = {}
    blocks: dict[str, Any] = {}
    sums: list[dict[str, Any]] = []
    tokens = tokens_of(records)
    for number, start in enumerate(range(0, len(records), BLOCK)):
        part = records[start : start + BLOCK]
        views = []
        for record, t in zip(part, islice(tokens, len(part)), strict=True):
            views.append(_tokens(record, t, decoders.get(record.run), pieces))
            wrote = int(t.mask.sum()) if len(t.ids) else record.response_length
            sums.append({"wrote": wrote, "logprob": _mean(t.logprobs[(t.mask == 1) & ~np.isnan(t.logprobs)])})
        blocks[f"text-{number}"] = [_text(record) for record in part]
        blocks[f"tokens-{number}"] = views
        progress(start + len(part))
    blocks["pieces"] = list(pieces)
    blocks["index"] = _index(records, sums)
    runs = list(dict.fromkeys(record.run for record in records))
    title = f"{', '.join(runs[:3])}{' …' if len(runs) > 3 else ''} · trajectories"
    return document(title, BODY, styles=["browse.css"], programs=["list.js", "views.js", "browse.js"], blocks=blocks)


def _decoders(records: Sequence[Record]) -> dict[str, TokenDecoder]:
    folders: Mapping[str, Path] = {r.run: r.file.absolute().parent.parent for r in records}
    decoders = {run: decoder_of(folder) for run, folder in folders.items()}
    return {run: decoder for run, decoder in decoders.items() if decoder}


def _index(records: Sequence[Record], sums: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the columns of the page's list."""
    names = ("run", "step", "uid", "sample", "status", "reward", "turns", "prompt_length", "response_length")
    columns: dict[str, list[Any]] = {name: [getattr(r, name) for r in records] for name in names}
    columns["reward"] = list(map(_rounded, columns["reward"]))
    return {
        **columns,
        "env_class": [r.env_class for r in records],
        "generate": [_rounded(r.seconds.get("generate")) for r in records],
        "env": [_rounded(r.seconds.get("env")) for r in records],
        "weights": [r.weights for r in records],
        "snippet": [_snippet(r) for r in records],
        "wrote": [s["wrote"] for s in sums],
        "logprob": [s["logprob"] for s in sums],
        "block": BLOCK,
    }


def _text(record: Record) -> dict[str, Any]:
    """Returns the data of the conversation view."""
    return {
        "parts": [_part(part) for part in record.parts],
        "versions": record.versions,
        "judged": _pairs(record.metadata),
        "error": record.error,
        "tools": [(tool_text(tool), json.dumps(tool, ensure_ascii=False, indent=1)) for tool in record.tools],
        "truth": None if record.truth is None else _pairs({"truth": record.truth})[0][1],
        "extras": _pairs(record.extras),
        "file": f"{record.file.name}, row {record.row}",
    }


def _part(part: Part) -> dict[str, Any]:
    """Returns the known fields of a part."""
    figures = {
        "start": part.start,
        "end": part.end,
        "at": _rounded(part.at_s),
        "generate": _rounded(part.generate_s),
        "env": _rounded(part.env_s),
        "reward": _rounded(part.reward),
        "finish": part.finish,
        "calls": [_call(call) for call in part.tool_calls] or None,
    }
    messages = [[m["role"], m["content"]] for m in part.messages]
    return {"kind": part.kind, "messages": messages, **{k: v for k, v in figures.items() if v is not None}}


def _call(call: Any) -> tuple[str, str]:
    """Returns a tool call's name, and the arguments as text."""
    if isinstance(call, dict) and isinstance(call.get("name"), str):
        rest = call.get("arguments", {k: v for k, v in call.items() if k != "name"})
        return call["name"], rest if isinstance(rest, str) else json.dumps(rest, ensure_ascii=False)
    return "", call if isinstance(call, str) else json.dumps(call, ensure_ascii=False)


def _tokens(record: Record, t: Tokens, decoder: TokenDecoder | None, pieces: Pieces) -> dict[str, Any]:
    """Returns the data of the token view: rows in the table, stretches, and the policy's log-probs in -1e-3 nats; 0 for
    a token not sampled by an engine."""
    ids = t.ids.tolist()
    texts: Sequence[str | None] = decoder.texts(ids) if decoder else [None] * len(ids)
    logprobs = np.nan_to_num(t.logprobs[t.mask == 1], nan=0.0, neginf=-99.0)
    return {
        "places": [pieces.setdefault(piece, len(pieces)) for piece in zip(ids, texts, strict=True)],
        "stretches": _stretches(record, t),
        "logprobs": np.rint(-1000 * logprobs).astype(int).tolist(),
    }


def _stretches(record: Record, t: Tokens) -> list[tuple[str, int, int]]:
    """Returns (kind, start, end) of all parts with tokens; derived from the mask if the file contains no steps."""
    stored = [(p.kind, p.start, p.end) for p in record.parts if p.start is not None and p.end is not None]
    if stored:
        return [(kind, start, end) for kind, start, end in stored if start < end]
    edges = [0, *(edge for span in t.spans for edge in span), len(t.ids)]
    kinds = ("response" if i % 2 else "observation" if i else "prompt" for i in range(len(edges)))
    return [(kind, a, b) for kind, a, b in zip(kinds, edges, edges[1:], strict=False) if a < b]


def _snippet(record: Record) -> str:
    """Returns the first words of the first response, or of the first message if there is no response."""
    parts = [part for part in record.parts if part.by_policy] or record.parts
    text = parts[0].messages[0]["content"] if parts and parts[0].messages else ""
    return " ".join(text[: 4 * SNIPPET].split())[:SNIPPET]


def _mean(values: np.ndarray) -> float | None:
    return _rounded(float(values.mean())) if len(values) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns names and values as text. Values other than text become JSON, indented if long."""
    pairs = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        long = text is not value and len(text) > LONG
        pairs.append((name, json.dumps(value, ensure_ascii=False, indent=1) if long else text))
    return pairs
