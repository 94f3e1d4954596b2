"""Suggested layouts as a table, and the settings to paste."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from skyrl_mega.cli.dry_run_text import aligned
from skyrl_mega.config.derived import expert_parallel
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.planner.memory import GIB
from skyrl_mega.planner.relief import shortest
from skyrl_mega.planner.search import TIE, Search, Suggestion

SHOWN = 10
"""Layouts in the table."""
PASTED = 3
"""Layouts whose settings are written out."""
HEAD = (
    "",
    "policy",
    "layout",
    "micro",
    "recompute",
    "engines",
    "share",
    "keep",
    "peak GiB",
    "room",
    "KV tokens",
    "s a step",
)
LETTERS = {"parameters": "p", "gradients": "g", "optimizer": "o", "engine_weights": "w", "kv_cache": "k"}
"""Parts of `residency.keep` in the table."""

HOST = "host: what layers keep for the backward pass lies in host memory (policy.offload_layers)"


def text(search: Search, d: Decoder) -> str:
    """What a person reads, of a model's layouts."""
    if not search.found:
        enough = f"{search.enough} GPUs are enough" if search.enough else "give more GPUs or shorter sequences"
        if not search.tried and not search.enough:
            enough = (
                "no engine has room for the model and a sequence (rollout.concurrency, rollout.max_length), or "
                "reference and critic leave it no GPU (reference.ranks, critic.ranks)"
            )
        return f"nothing fits {search.gpus} GPUs, of {search.tried:,} settings tried; {enough}"
    rows = [HEAD, *(_row(i + 1, s, room(s, d)) for i, s in enumerate(search.found[:SHOWN]))]
    cut = "" if search.complete else "; the search was cut short"
    lines = [
        f"{len(search.found):,} layouts fit {search.gpus} GPUs, of {search.tried:,} settings tried{cut}; the fastest "
        f"first, within {TIE:.0%} the least cut:",
        *aligned(rows, left=3),
        *(["", HOST] if any(s.config.policy.offload_layers for s in search.found[:SHOWN]) else []),
        "",
        "settings for the file, in place of those that it has in the same groups (--json has them as arguments):",
    ]
    for number, suggestion in enumerate(search.found[:PASTED], start=1):
        written = yaml.safe_dump(_tree(suggestion.settings), sort_keys=False).rstrip().splitlines()
        lines += ["", f"# {number}", *(written if number == 1 else (f"# {line}" for line in written))]
    lines += ["", f"# 1 as arguments: {shlex.join(search.found[0].overrides)}"]
    return "\n".join(lines)


def _tree(settings: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *groups, name = key.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    return tree


def room(s: Suggestion, d: Decoder) -> str:
    """`close` or `tight` where the dry run says so of a shared GPU."""
    short = shortest(s.config, d, s.parallel) if s.config.cluster.shared else None
    return "" if short is None else "tight" if short.left < 0 else "close"


def values(search: Search, d: Decoder) -> dict[str, Any]:
    """Everything found, as plain values. Bytes and seconds; room, of those that the table shows."""
    return {
        "gpus": search.gpus,
        "tried": search.tried,
        "complete": search.complete,
        "enough": search.enough,
        "found": [
            {"overrides": s.overrides, "peak": s.peak, "kv_tokens": s.kv_tokens, "seconds": s.seconds}
            | ({"room": room(s, d)} if i < SHOWN else {})
            for i, s in enumerate(search.found)
        ],
    }


def _row(number: int, s: Suggestion, room: str) -> tuple[str, ...]:
    policy, rollout = s.config.policy, s.config.rollout
    return (
        str(number),
        str(policy.ranks),
        _layout(s),
        str(policy.micro_tokens),
        policy.recompute + " host" * (policy.offload_layers > 0),
        f"{rollout.engines} × TP{rollout.tensor}{' EP' * expert_parallel(rollout)}",
        f"{rollout.memory_fraction:g}",
        _keep(s),
        f"{s.peak / GIB:.1f}",
        room,
        f"{s.kv_tokens:,}",
        f"{s.seconds:.1f}",
    )


def _keep(s: Suggestion) -> str:
    """What stays on a device in every phase, by its letters, and whether the optimizer is streamed."""
    keep, streamed = s.config.residency.keep, ", streamed" * s.config.policy.optimizer.streamed
    if keep is None:
        return f"all{streamed}"
    return ("".join(LETTERS[part] for part in keep if part in LETTERS) or "none") + streamed


def _layout(s: Suggestion) -> str:
    p = s.parallel
    sizes = {"TP": p.tensor, "PP": p.pipeline, "VPP": p.virtual_pipeline, "CP": p.context, "EP": p.expert}
    sizes |= {"ETP": p.expert_tensor, "DP": p.data}
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "alone"
