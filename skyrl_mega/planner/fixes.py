"""Searches for working settings near refused settings. Every offered change passes all checks, so users can paste
it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, islice
from math import log
from typing import Any

from skyrl_mega.config.checks.learning import CORRECTION, has_correction
from skyrl_mega.config.derived import critic_ranks, engine_ranks, reference_ranks
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.keys import keys as schema
from skyrl_mega.config.residency import PARTS
from skyrl_mega.config.schema import AsynchronyConfig, Config
from skyrl_mega.planner.micro_tokens import MICRO_TOKENS

Verdict = Callable[[Config], UserError | None]
"""Function returning the error of settings, or None if valid."""
Change = tuple[tuple[str, Any], ...]
"""Keys with new values."""

NAME = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)(=?)")
"""A possible name of a setting, and the sign after it in an assignment."""
OFFERED = 3
"""Maximum number of fixes shown."""
SECONDS = 5.0
"""Maximum processor time of a search."""
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 128)
MORE_NODES = "cluster.nodes"
PAIRED = (
    "policy.recompute",
    "policy.offload_layers",
    "rollout.memory_fraction",
    "residency.keep",
    "policy.optimizer.streamed",
    "policy.micro_tokens",
    "policy.layout.tensor",
    "policy.layout.expert",
    "policy.layout.pipeline",
    "policy.layout.context",
    "policy.ranks",
    "cluster.nodes",
    "rollout.tensor",
    "rollout.engines",
    "reference.ranks",
    "reference.layout.expert",
    "reference.layout.pipeline",
    "reference.layout.tensor",
    "critic.ranks",
    "critic.layout.expert",
    "critic.layout.pipeline",
    "critic.layout.tensor",
)
"""Keys changed in pairs if no single change helps."""


def _sizes(value: Any) -> Iterable[Any]:
    """Returns sizes near the value, nearest first."""
    return sorted((n for n in SIZES if n != value), key=lambda n: (abs(log(n / max(value or 1, 1))), n))


def _counts(value: Any) -> Iterable[Any]:
    """Returns counts near the value, nearest first: a few more or fewer, halves, doubles and multiples. The lower of
    two equally near counts is first."""
    value = value if value and value > 0 else 8
    near = (
        {value + k for k in range(-8, 9)} | {value * 2**k for k in range(1, 6)} | {value // 2**k for k in range(1, 6)}
    )
    near |= {-(-value // unit) * unit + unit * k for unit in (8, 12, 16) for k in range(-2, 3)}
    return sorted((n for n in near if n > 0 and n != value), key=lambda n: (abs(n - value), n))


def _offloaded(value: Any) -> Iterable[Any]:
    """Returns numbers of layers near the value, nearest first. Numbers above a rank's layers mean all layers."""
    return sorted((n for n in (0, 8, 12, 16, 24, 32, 48, 64, 96) if n != value), key=lambda n: abs(n - value))


def _lower(value: Any) -> Iterable[Any]:
    """Returns the value halved repeatedly, down to 1."""
    return [] if value is None else [type(value)(value / 2**k) for k in range(1, 9) if value / 2**k >= 1]


def _micro_tokens(value: Any) -> Iterable[Any]:
    """Returns the value halved repeatedly; if it is above all candidates of the search, the candidates in descending
    order first."""
    if value is None or value <= MICRO_TOKENS[-1]:
        return _lower(value)
    return [*reversed(MICRO_TOKENS), *_lower(MICRO_TOKENS[0])]


def _higher(value: Any) -> Iterable[Any]:
    return [value * 2**k for k in range(1, 9)]


def _larger_counts(value: Any) -> Iterable[Any]:
    """Returns larger counts, up to four times the value, smallest first."""
    return sorted(
        {value + 2**k for k in range(value.bit_length())} | {2 * value, 4 * value} | ({8} if value < 8 else set())
    )


def _fractions(value: Any) -> Iterable[Any]:
    steps = (round(0.05 * k, 2) for k in range(1, 20))
    return sorted((f for f in steps if f != value), key=lambda f: abs(f - value))


def _keep_lists(value: Any) -> Iterable[Any]:
    """Returns lists of parts to keep: none, one part fewer or more, and null for all."""
    parts = list(PARTS) if value is None else [part for part in value if part in PARTS]
    near = [[], *([p for p in PARTS if (p in parts) != (p == part)] for part in PARTS), None]
    return [near[i] for i in range(len(near)) if near[i] != value and near[i] not in near[:i]]


ONLY_NAMED = (
    "data.",
    "cluster.shared",
    "rollout.kv",
    "rollout.max_",
    "rollout.sampling.",
    "reference.",
    "critic.",
    "policy.layout.expert_tensor",
    "rollout.conc",
)
"""Prefixes of keys that are changed only if the error names them: they change what is learned, or are unusual."""

NEAR: dict[str, Callable[[Any], Iterable[Any]]] = {
    "policy.recompute": lambda value: [] if value == "full" else ["full"],
    "policy.offload_layers": _offloaded,
    "policy.micro_tokens": _micro_tokens,
    "policy.optimizer.streamed": lambda value: [] if value else [True],
    "critic.optimizer.streamed": lambda value: [] if value else [True],
    "policy.precision.parameters": lambda value: [] if value == "fp8" else ["fp8"],
    "policy.logit_chunk": _lower,
    "weights.bucket_mib": _lower,
    **{f"policy.layout.{name}": _sizes for name in ("tensor", "expert", "pipeline", "virtual_pipeline", "context")},
    "policy.layout.expert_tensor": lambda value: [None, *_sizes(value)],
    "policy.layout.first_stage_layers": lambda value: [] if value is None else [None, *_counts(value)],
    "policy.layout.last_stage_layers": lambda value: [] if value is None else [None, *_counts(value)],
    "policy.ranks": _counts,
    "rollout.memory_fraction": _fractions,
    "rollout.kv_cache_gib": _lower,
    "residency.keep": _keep_lists,
    "cluster.shared": lambda value: [not value],
    "rollout.tensor": _sizes,
    "rollout.engines": _counts,
    MORE_NODES: _larger_counts,
    "reference.ranks": lambda value: [] if value is None else _counts(value),
    **{f"reference.layout.{name}": _sizes for name in ("tensor", "expert", "pipeline", "virtual_pipeline", "context")},
    "critic.ranks": _counts,
    **{f"critic.layout.{name}": _sizes for name in ("tensor", "expert", "pipeline", "virtual_pipeline", "context")},
    "critic.micro_tokens": _lower,
    "data.mini_batch_prompts": _counts,
    "data.samples_per_prompt": lambda value: [n for n in range(2, 9) if n > value],
    "rollout.max_prompt_tokens": _lower,
    "rollout.sampling.max_tokens": _lower,
    "rollout.max_response_tokens": _lower,
    "rollout.max_length": lambda value: [] if value is None else [None, *_higher(value)],
    "rollout.concurrency": _lower,
    "rollout.env_timeout_s": _higher,
    "weights.timeout_s": _higher,
    "cluster.host_memory_gib": lambda value: [],  # the machine is given; other keys are searched
}
"""For each key, a function returning values near the current value, nearest first."""


def nearest(config: Config, verdict: Verdict, error: UserError) -> list[Change]:
    """Returns changes of a single key, or else of two, after which `verdict` returns None.

    Tries keys named by the error first, then keys for which the error proposes a value (`key=`).

    Args:
        config: The invalid settings.
        verdict: Returns the error of settings; None if valid.
        error: The error of `config`.
    """
    end = time.process_time() + SECONDS
    named, proposed = settings_of(error)
    others = [key for key in NEAR if key not in named and not key.startswith(ONLY_NAMED)]
    singles = [*named, *sorted(others, key=lambda key: key not in proposed)]
    group_name = error.key.partition(".")[0]
    pairs = sorted(
        combinations(PAIRED, 2),
        key=lambda pair: (not proposed.issuperset(pair), -sum(k.startswith(group_name) for k in pair)),
    )
    costly = [MORE_NODES]
    with_more_nodes = list(islice(_passing(config, (MORE_NODES,), verdict, end), 1)) if MORE_NODES in named else []
    changes: list[Change] = []
    for key in singles:
        wanted = 0 if key in costly else 2 if key in named[:1] else 1
        changes += islice(_passing(config, (key,), verdict, end), wanted)
        if len(changes) >= OFFERED:
            return [*changes[: OFFERED - len(with_more_nodes)], *with_more_nodes]
    # Changes of more machines come last.
    for candidates in (
        [pair for pair in pairs if not set(costly) & set(pair)],
        [(key,) for key in costly],
        [pair for pair in pairs if set(costly) & set(pair)],
    ):
        for keys in () if changes else candidates:
            changes += islice(_passing(config, keys, verdict, end), 1)
            if len(changes) >= OFFERED - len(with_more_nodes):
                return [*changes, *(change for change in with_more_nodes if change not in changes)]
    return [*changes, *(change for change in with_more_nodes if change not in changes)]


def separate_or_synchronous(config: Config, verdict: Verdict) -> list[Change]:
    """Returns working changes of settings that share GPUs and generate ahead: to separate GPUs, and to
    `asynchrony.mode=off`.

    Args:
        config: The invalid settings.
        verdict: Returns the error of settings; None if valid.
    """
    end = time.process_time() + SECONDS
    base: Change = (("cluster.shared", False), ("residency.keep", None))
    if not has_correction(config.algorithm):
        key, _, value = CORRECTION.partition("=")
        base += ((key, float(value)),)
    gpus, per_engine = config.cluster.nodes * config.cluster.gpus_per_node, engine_ranks(config.rollout)
    others = reference_ranks(config) + critic_ranks(config)
    splits = [(gpus - others - engines * per_engine, engines) for engines in range(1, gpus // per_engine + 1)]
    splits += [(policy // 8 * 8, engines) for policy, engines in splits if policy % 8]
    by_balance = sorted((s for s in splits if s[0] > 0), key=lambda split: abs(split[0] - split[1] * per_engine))
    changes: list[Change] = []
    for policy, engines in by_balance:
        change = (*base, ("policy.ranks", policy), ("rollout.engines", engines))
        if time.process_time() > end:
            break
        if verdict(changed(config, change)) is None:
            changes.append(change)
            break
    default_staleness = AsynchronyConfig().max_staleness
    off: Change = (("asynchrony.mode", "off"), ("asynchrony.max_staleness", default_staleness))
    return [*changes, *([off] if verdict(changed(config, off)) is None else [])]


def _passing(config: Config, keys: tuple[str, ...], verdict: Verdict, end: float) -> Iterator[Change]:
    """Yields neighbours in `keys` for which `verdict` returns None, until the processor time reaches `end`."""
    for change in _changes(config, keys):
        if time.process_time() > end:
            return
        if verdict(changed(config, change)) is None:
            yield change


def changed(config: Config, change: Change) -> Config:
    """Returns the settings with the change applied; unchanged groups remain the same objects."""
    for key, value in change:
        config = _replaced(config, key.split("."), value)
    return config


def _replaced(settings: Any, path: list[str], value: Any) -> Any:
    name, *inner = path
    return replace(settings, **{name: _replaced(getattr(settings, name), inner, value) if inner else value})


def as_arguments(change: Change) -> str:
    """Returns the change as command-line arguments."""
    return " ".join(f"{key}={_as_text(value)}" for key, value in change)


def _changes(config: Config, keys: tuple[str, ...]) -> Iterator[Change]:
    """Yields all neighbours in `keys`. With two keys, whole numbers are only doubled or halved.

    If the current value is invalid, the default comes first, then its neighbours.
    """
    options = []
    for key in keys:
        settings: Any = config
        *groups, name = key.split(".")
        for group in groups:
            settings = getattr(settings, group)
            if settings is None:
                return
        value, defaults = getattr(settings, name), []
        if not schema()[key].allows(value):
            value = schema()[key].default
            defaults = [value]
        values = [*defaults, *NEAR[key](value)]
        if len(keys) > 1:
            values = [v for v in values if key == "policy.micro_tokens" or _doubled(v, value)]
        options.append([(key, value) for value in values])
    if len(keys) == 1:
        yield from ((pair,) for pair in options[0])
        return
    yield from sorted(
        ((a, b) for a in options[0] for b in options[1]), key=lambda c: options[0].index(c[0]) + options[1].index(c[1])
    )


def _doubled(value: Any, other: Any) -> bool:
    """Returns True if one whole number is the other times a power of two, or if either is not a whole number."""
    if not isinstance(value, int) or not isinstance(other, int) or isinstance(value, bool):
        return True
    if value < 1 or other < 1:
        return False
    ratio, remainder = divmod(max(value, other), min(value, other))
    return remainder == 0 and ratio & (ratio - 1) == 0


def concerns_settings(error: UserError) -> bool:
    """Returns True if an error is about a group of searched settings, names a searched setting or proposes a value."""
    return any(settings_of(error)) or any(key.rpartition(".")[0] == error.key for key in NEAR)


def settings_of(error: UserError) -> tuple[list[str], set[str]]:
    """Returns the searched settings named by an error, in the order of `NEAR`, and those it proposes a value for.

    An error about a group (`policy.layout`) names the settings of the group by their last part (`tensor`).
    """
    words = NAME.findall(f"{error.key} {error.problem} {error.fix}")
    named = {name for name, sign in words if not sign} | {f"{error.key}.{name}" for name, _ in words}
    return [key for key in NEAR if key in named], {name for name, sign in words if sign}.intersection(NEAR)


def _as_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
