"""Table of suggested layouts, and the settings to paste."""

from __future__ import annotations

import shlex
from typing import Any

from omegaconf import OmegaConf

from skyrl_mega.cli.dry_run_text import shape
from skyrl_mega.cli.tables import aligned
from skyrl_mega.config.derived import expert_parallel
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import dynamic, engine_blocks
from skyrl_mega.planner.memory import GIB, gpu_bytes
from skyrl_mega.planner.relief import least_safe_phase
from skyrl_mega.planner.search import TIE, SearchResult, Suggestion

SHOWN = 10
"""Maximum layouts in the table."""
PASTED = 3
"""Number of layouts with settings written out."""
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
"""Letters for parts of `residency.keep` in the table."""

HOST = "behind / in recompute: layers of a rank whose activations lie in host memory (policy.offload_layers)"


def text(search: SearchResult, given: Config, decoder: Decoder) -> str:
    """Returns the report for people on suggested layouts for the given settings."""
    if not search.suggestions:
        return "\n".join([_misfit_text(search), *(f"note: {note}" for note in notes(search, given, decoder))])
    rows = [HEAD, *(_row(i + 1, s, memory_warning(s, decoder)) for i, s in enumerate(search.suggestions[:SHOWN]))]
    cut = "" if search.complete else "; the search was cut short"
    lines = [
        f"{len(search.suggestions):,} layouts fit {search.gpus} GPUs, of {search.evaluated:,} settings tried{cut}; the "
        f"fastest first, within {TIE:.0%} the least cut:",
        *aligned(rows, left=3),
        *([HOST] if any(s.config.policy.offload_layers for s in search.suggestions[:SHOWN]) else []),
        *(f"note: {note}" for note in notes(search, given, decoder)),
        "",
        "settings for the file, in place of those that it has in the same groups (--json has them as arguments):",
    ]
    for number, suggestion in enumerate(search.suggestions[:PASTED], start=1):
        written = OmegaConf.to_yaml(OmegaConf.from_dotlist(suggestion.overrides)).rstrip().splitlines()
        lines += ["", f"# {number}", *(written if number == 1 else (f"# {line}" for line in written))]
    lines += ["", f"# 1 as arguments: {shlex.join(search.suggestions[0].overrides)}"]
    return "\n".join(lines)


def _misfit_text(search: SearchResult) -> str:
    """Describes that nothing fits, the nearest miss, and a sufficient number of GPUs."""
    instead = "more of cluster.host_memory_gib" if search.host_problem else "more GPUs or shorter sequences"
    enough = f"{search.enough_gpus} GPUs are enough" if search.enough_gpus else f"give {instead}"
    message, nearest = f"nothing fits {search.gpus} GPUs, of {search.evaluated:,} settings tried", search.nearest
    if search.host_problem:
        return f"{message}: some fit its GPUs and none its hosts; {search.host_problem}; {enough}"
    if nearest and nearest.missing_bytes <= 0:
        return f"{message}: policy and engines would, but not the critic (critic.ranks, critic.layout); {enough}"
    if nearest:
        policy, size = nearest.config.policy, gpu_bytes(nearest.config) / GIB
        return (
            f"{message}; the nearest ({_layout(nearest.ranks.parallel)}, policy.recompute={policy.recompute}, "
            f"policy.micro_tokens={policy.micro_tokens}) lacks {nearest.missing_bytes / GIB:.1f} GiB of a GPU's "
            f"{size:.1f}; {enough}"
        )
    if not search.enough_gpus:
        enough = (
            "no engine has room for the model and a sequence (rollout.concurrency, rollout.max_length), or "
            "reference and critic leave it no GPU (reference.ranks, critic.ranks)"
        )
    return f"{message}; {enough}"


def notes(search: SearchResult, given: Config, decoder: Decoder) -> list[str]:
    """Returns notes on given settings unused by all layouts, and on suggested engines whose FP8 blocks differ from the
    policy's."""
    lines = [*filter(None, [dynamic.note(given)])]
    policy = given.policy
    if policy.optimizer.streamed and policy.precision.parameters == "fp8":
        lines.append(
            "policy.optimizer.streamed=true was left out: it does not go with policy.precision.parameters=fp8; "
            "policy.precision.parameters=model allows it"
        )
    shown = search.suggestions[:SHOWN]
    if differing := [i + 1 for i, s in enumerate(shown) if engine_blocks.partial_block(s.config, decoder) is not None]:
        lines.append(
            f"engines of {', '.join(map(str, differing))} have other blocks of FP8 than policy and wire, and round "
            "otherwise (mismatch/*): no engine on so many GPUs has the same; the dry run of such a layout says more"
        )
    return lines


def memory_warning(s: Suggestion, decoder: Decoder) -> str:
    """Returns `close` or `tight` if the dry run reports little memory on a shared GPU, else an empty text."""
    unsafe = least_safe_phase(s.config, decoder, s.parallel)
    return "" if unsafe is None else "tight" if unsafe.free < 0 else "close"


def values(search: SearchResult, given: Config, decoder: Decoder) -> dict[str, Any]:
    """Returns all suggestions as plain values, in bytes and seconds.

    `room` (a memory warning) is given only for the layouts shown by `text`, `why` only if nothing fits.
    """
    return {
        "gpus": search.gpus,
        "tried": search.evaluated,
        "complete": search.complete,
        "enough": search.enough_gpus,
        "why": None if search.suggestions else _misfit_text(search),
        "notes": notes(search, given, decoder),
        "found": [
            {"overrides": s.overrides, "peak": s.peak, "kv_tokens": s.kv_tokens, "seconds": s.seconds}
            | ({"room": memory_warning(s, decoder)} if i < SHOWN else {})
            for i, s in enumerate(search.suggestions)
        ],
    }


def _row(number: int, s: Suggestion, memory_warning: str) -> tuple[str, ...]:
    policy, rollout = s.config.policy, s.config.rollout
    return (
        str(number),
        str(policy.ranks),
        _layout(s.parallel),
        str(policy.micro_tokens),
        policy.recompute + (f"/{policy.offload_layers}" if policy.offload_layers else ""),
        f"{rollout.engines} × TP{rollout.tensor}{' EP' * expert_parallel(rollout)}",
        f"{rollout.memory_fraction:g}",
        _keep(s),
        f"{s.peak / GIB:.1f}",
        memory_warning,
        f"{s.kv_tokens:,}",
        f"{s.seconds:.{0 if s.seconds >= 1000 else 1}f}",
    )


def _keep(s: Suggestion) -> str:
    """Returns letters for the parts that stay on the device in every phase, and whether the optimizer is streamed."""
    keep, streamed = s.config.residency.keep, ", streamed" * s.config.policy.optimizer.streamed
    if keep is None:
        return f"all{streamed}"
    return ("".join(LETTERS[part] for part in keep if part in LETTERS) or "none") + streamed


def _layout(p: ParallelDims) -> str:
    sizes = {"TP": p.tensor, "PP": p.pipeline, "VPP": p.virtual_pipeline, "CP": p.context, "EP": p.expert}
    return shape(sizes | {"ETP": p.expert_tensor, "DP": p.data})
