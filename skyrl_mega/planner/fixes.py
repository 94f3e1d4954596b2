"""Searches for working settings near refused settings. Every offered change passes all checks, so users can paste
it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, islice

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.learning import CORRECTION, has_correction
from skyrl_mega.config.derived import critic_ranks, engine_ranks, reference_ranks
from skyrl_mega.config.schema import AsynchronyConfig, Config
from skyrl_mega.planner.candidates import KNOBS, Change, changed, combined, near, split

Verdict = Callable[[Config], UserError | None]
"""Function returning the error of settings, or None if valid."""

OFFERED = 3
"""Maximum number of fixes shown."""
SECONDS = 5.0
"""Maximum processor time of a search."""
MORE_NODES = "cluster.nodes"


def nearest(config: Config, verdict: Verdict, error: UserError) -> list[Change]:
    """Returns up to `OFFERED` alternatives, each of which alone leads to valid settings: changes of a single setting,
    or else of two. [] if none is found in `SECONDS` of processor time.

    Tries settings named by the error first; among pairs, the pair that the error names (`UserError.together`). Changes
    of the number of nodes come last.

    Args:
        config: The invalid settings.
        verdict: Returns the error of settings; None if valid.
        error: The error of `config`.
    """
    end = time.process_time() + SECONDS
    named = _named_by(error)
    others = [key for key, knob in KNOBS.items() if key not in named and not knob.only_named]
    singles = [(key,) for key in [*named, *others] if key != MORE_NODES]
    group = error.key.partition(".")[0]
    pairs = sorted(
        combinations([key for key, knob in KNOBS.items() if knob.paired], 2),
        key=lambda pair: (pair != error.together, -sum(key.startswith(group) for key in pair)),
    )
    machines = [pair for pair in pairs if MORE_NODES in pair]

    def passing(*keys: str) -> Iterator[Change]:
        changes = combined(*(near(config, key, coarse=len(keys) > 1) for key in keys))
        wanted = 2 if keys == (*named[:1],) and keys != (MORE_NODES,) else 1
        return islice(_passing(config, changes, verdict, end), wanted)

    more_nodes = [*passing(MORE_NODES)] if MORE_NODES in named else []
    changes: list[Change] = []
    for tried in (singles, [pair for pair in pairs if pair not in machines], [(MORE_NODES,)], machines):
        changes = changes or [
            *islice((change for keys in tried for change in passing(*keys)), OFFERED - len(more_nodes))
        ]
    return [*changes, *(change for change in more_nodes if change not in changes)]


def separate_or_synchronous(config: Config, verdict: Verdict) -> list[Change]:
    """Returns alternatives, each of which alone makes settings with shared GPUs and generation ahead valid: first at
    most one change to separate GPUs, found in `SECONDS` of processor time, then `asynchrony.mode=off` if valid. [] if
    neither is.

    Args:
        config: The invalid settings.
        verdict: Returns the error of settings; None if valid.
    """
    end = time.process_time() + SECONDS
    key, _, value = CORRECTION.partition("=")
    correction: Change = () if has_correction(config.algorithm) else ((key, float(value)),)
    gpus, per_engine = config.cluster.nodes * config.cluster.gpus_per_node, engine_ranks(config.rollout)
    others = reference_ranks(config) + critic_ranks(config)
    counts = [(gpus - others - engines * per_engine, engines) for engines in range(1, gpus // per_engine + 1)]
    counts += [(policy // 8 * 8, engines) for policy, engines in counts if policy % 8]
    by_balance = sorted((s for s in counts if s[0] > 0), key=lambda count: abs(count[0] - count[1] * per_engine))
    splits = ((*split(*count), *correction) for count in by_balance)
    default_staleness = AsynchronyConfig().max_staleness
    off: Change = (("asynchrony.mode", "off"), ("asynchrony.max_staleness", default_staleness))
    return [
        *islice(_passing(config, splits, verdict, end), 1),
        *([off] if verdict(changed(config, off)) is None else []),
    ]


def _passing(config: Config, changes: Iterable[Change], verdict: Verdict, end: float) -> Iterator[Change]:
    """Yields changes after which `verdict` returns None, until the processor time reaches `end`."""
    for change in changes:
        if time.process_time() > end:
            return
        if verdict(changed(config, change)) is None:
            yield change


def concerns_settings(error: UserError) -> bool:
    """Returns True if an error names a setting in `KNOBS`, or is about a group with such settings."""
    return bool(_named_by(error)) or any(key.rpartition(".")[0] == error.key for key in KNOBS)


def _named_by(error: UserError) -> list[str]:
    """Returns the settings in `KNOBS` named by an error as its key or in its `settings`, in the order of `KNOBS`."""
    return [key for key in KNOBS if key in (error.key, *error.settings)]
