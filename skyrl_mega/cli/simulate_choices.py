"""Candidates of `--simulate`: asynchrony modes, splits of the GPUs and engine sizes, each as complete settings.

A choice is a change of the settings. It passes every check of a run's settings, so it can be pasted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any

from skyrl_mega.cli.refusal import find_error
from skyrl_mega.config.checks.learning import has_correction
from skyrl_mega.config.derived import engine_ranks, gpus_needed
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import AsynchronyConfig, Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import engine_blocks, fit, fixes
from skyrl_mega.planner.fixes import Change
from skyrl_mega.planner.memory import critic_dims

MODES = (("off", 0), ("one_step", 1), ("full", 1), ("full", 2), ("full", 4))
"""Modes with `asynchrony.max_staleness`, in display order."""
EXPLORED = (("full", 2), ("full", 1), ("one_step", 1), ("off", 0))
"""Modes for comparing splits; the first one that can run is used."""
SPLITS = 6
"""Maximum number of splits simulated."""
COUNTS = 64
"""Maximum number of different engine counts tried."""
RANKS = 3
"""Number of policy sizes tried for each number of engines: the largest allowed by the layout."""
TENSORS = (1, 2, 4, 8, 16)
"""Engine tensor sizes tried in the best split, besides the given size."""
EXCLUSIVE_FRACTION = 0.9
"""Memory fraction of engines on exclusive GPUs: vLLM's default."""
MEMORY_RELIEF: tuple[Change, ...] = ((), (("policy.optimizer.streamed", True),))
"""Changes freeing memory for a policy with fewer ranks."""
CORRECTIONS: tuple[Change, ...] = (
    (("algorithm.importance_cap", 2.0),),
    (("algorithm.old_logprobs", "engine"),),
    (("algorithm.rejection.level", "token"),),
)
"""Off-policy corrections for stale tokens; the first one that the settings allow is used."""


@dataclass(frozen=True)
class Choice:
    """Valid settings to simulate."""

    mode: str
    most: int
    """Value of `asynchrony.max_staleness`; 0 with `off`."""
    config: Config
    change: Change
    """Difference from the given settings."""


def synchronous(config: Config) -> Choice:
    """Returns the given settings without asynchrony."""
    change = _differing(config, _mode("off", 0))
    return Choice("off", 0, fixes.changed(config, change), change)


def as_given(config: Config, hf: Mapping[str, Any]) -> Choice | UserError:
    """Returns the given settings with their asynchrony, or the error if invalid."""
    refusal = find_error(config, hf, planned=True, strict=not config.cluster.shared)
    return Choice(config.asynchrony.mode, config.asynchrony.max_staleness, config, ()) if refusal is None else refusal


def choice(config: Config, split: Change, mode: str, most: int, hf: Mapping[str, Any]) -> Choice | UserError:
    """Returns a mode in a split, with an off-policy correction if needed, or the error if invalid.

    Args:
        config: The given settings.
        split: Changes of settings that divide the GPUs.
        mode: `asynchrony.mode`.
        most: `asynchrony.max_staleness`.
        hf: The model's config.json.
    """
    change = (*_mode(mode, most), *split)
    needed = most and not has_correction(config.algorithm)
    refusals = []
    for correction in CORRECTIONS if needed else ((),):
        whole = _differing(config, (*change, *correction))
        changed = fixes.changed(config, whole)
        if (refusal := find_error(changed, hf, planned=True, strict=True)) is None:
            return Choice(mode, most, changed, whole)
        refusals.append(refusal)
    return refusals[0]


def splits(config: Config, hf: Mapping[str, Any]) -> list[Change]:
    """Returns at most `SPLITS` fitting divisions of the GPUs between engines and policy (with reference and critic),
    from fewest to most policy ranks.

    If the given engines fit no split, tries the smallest other engines that fit, with the memory fraction of exclusive
    GPUs or else the given one. If the policy fits no split, streams its optimizer. If the experts are spread over too
    many ranks, lowers expert parallelism.
    """
    sizes = ((), *(_sized(tensor, fraction) for tensor in TENSORS for fraction in _fractions(config)))
    for relief in (
        *MEMORY_RELIEF,
        *((*fewer, *more) for fewer in _fewer_expert_ranks(config) for more in MEMORY_RELIEF),
    ):
        for engine_change in sizes:
            if _keeps_blocks(config, engine_change, hf) and (
                fitting := _splits_with(config, (*engine_change, *relief), hf)
            ):
                return fitting
    return []


def misfit_reason(config: Config, hf: Mapping[str, Any]) -> str:
    """Explains why a split with engines on half of the GPUs does not fit; empty if it fits."""
    total = config.cluster.nodes * config.cluster.gpus_per_node
    engines = max(1, total // 2 // engine_ranks(config.rollout))
    for ranks in range(total, 0, -1):
        split = _split(ranks, engines)
        changed = fixes.changed(config, split)
        if gpus_needed(changed) <= total and _layouts_match(changed):
            result = choice(config, split, "off", 0, hf)
            reason = f"with policy.ranks={ranks} and rollout.engines={engines} {result}"
            return reason if isinstance(result, UserError) else ""
    return "an engine leaves policy, reference and critic no GPUs over which their layouts can be"


def _fewer_expert_ranks(config: Config) -> list[Change]:
    """Returns changes halving expert parallelism repeatedly, for policies of fewer ranks."""
    changes: list[Change] = []
    size = config.policy.layout.expert
    while size % 2 == 0:
        size //= 2
        changes.append((("policy.layout.expert", size),))
    return changes


def _splits_with(config: Config, engine_change: Change, hf: Mapping[str, Any]) -> list[Change]:
    total = config.cluster.nodes * config.cluster.gpus_per_node
    most = total // engine_ranks(fixes.changed(config, engine_change).rollout)
    by_ranks = {}
    for count in _evenly_spaced(range(1, most + 1), COUNTS):
        for split in islice(_rank_splits(config, count, total, engine_change, hf), 1):
            by_ranks[dict(split)["policy.ranks"]] = split  # with equal policy ranks, more engines are better
    return _evenly_spaced([by_ranks[ranks] for ranks in sorted(by_ranks)], SPLITS)


def engines(config: Config, split: Change, hf: Mapping[str, Any]) -> list[Change]:
    """Returns a split with other engines on the same GPUs: a variant for each tensor size that fits.

    Prefers the memory fraction of exclusive GPUs. Leaves out engines whose FP8 blocks would no longer match the
    policy's.
    """
    given = fixes.changed(config, split).rollout
    gpus = given.engines * engine_ranks(given)
    fitting = []
    for tensor in sorted({*TENSORS, given.tensor}):
        count, idle = divmod(gpus, tensor)
        for fraction in _fractions(config):
            other = tuple({**dict(split), **dict(_sized(tensor, fraction)), "rollout.engines": count}.items())
            if fixes.changed(config, other) == fixes.changed(config, split) or not _keeps_blocks(config, other, hf):
                continue
            if not idle and not isinstance(choice(config, other, "off", 0, hf), UserError):
                fitting.append(other)
                break
    return fitting


def shared_engines(config: Config, hf: Mapping[str, Any]) -> list[Change]:
    """Returns engines of other sizes on the same shared GPUs; otherwise like `engines`."""
    given = config.rollout
    gpus = given.engines * engine_ranks(given)
    others = (
        (("rollout.tensor", tensor), ("rollout.engines", gpus // tensor))
        for tensor in TENSORS
        if gpus % tensor == 0 and tensor != given.tensor
    )
    return [
        other
        for other in others
        if _keeps_blocks(config, other, hf) and not isinstance(choice(config, other, "off", 0, hf), UserError)
    ]


def with_given_fraction(config: Config, split: Change, tried: Sequence[Change]) -> list[Change]:
    """Returns a split with the given `rollout.memory_fraction`, as the only entry of a list; empty if already in
    `tried`."""
    plain = tuple((dict(split) | {"rollout.memory_fraction": config.rollout.memory_fraction}).items())
    already_tried = [fixes.changed(config, each) for each in tried]
    return [] if fixes.changed(config, plain) in already_tried else [plain]


def _keeps_blocks(config: Config, change: Change, hf: Mapping[str, Any]) -> bool:
    """Returns False if the change makes the engines' FP8 blocks differ from the policy's."""
    decoder = architecture(hf).describe(hf)
    return (
        engine_blocks.partial_block(fixes.changed(config, change), decoder) is None
        or engine_blocks.partial_block(config, decoder) is not None
    )


def _rank_splits(
    config: Config, engines: int, total: int, engine_change: Change, hf: Mapping[str, Any]
) -> Iterator[Change]:
    """Yields splits with `engines` engines, most policy ranks first."""
    looked = 0
    for ranks in range(total, 0, -1):
        split = (*_split(ranks, engines), *engine_change)
        changed = fixes.changed(config, split)
        if gpus_needed(changed) > total or not _layouts_match(changed):
            continue
        if not isinstance(choice(config, split, "off", 0, hf), UserError):
            yield split
        looked += 1
        if looked == RANKS:
            return


def _layouts_match(config: Config) -> bool:
    """Returns True if the layouts match the numbers of ranks."""
    try:
        fit.parallel_of(config)
        critic_dims(config)
    except UserError:
        return False
    return True


def _split(ranks: int, engines: int) -> Change:
    return (
        ("cluster.shared", False),
        ("residency.keep", None),
        ("policy.ranks", ranks),
        ("rollout.engines", engines),
    )


def _sized(tensor: int, fraction: float) -> Change:
    return ("rollout.tensor", tensor), ("rollout.memory_fraction", fraction)


def _fractions(config: Config) -> list[float]:
    """Returns the memory fractions to try for engines, largest first."""
    given = config.rollout.memory_fraction
    return sorted({given, max(given, EXCLUSIVE_FRACTION)}, reverse=True)


def _mode(mode: str, most: int) -> Change:
    usual = AsynchronyConfig().max_staleness
    return ("asynchrony.mode", mode), ("asynchrony.max_staleness", usual if mode == "off" else most)


def _differing(config: Config, change: Change) -> Change:
    return tuple((key, value) for key, value in change if reduce(getattr, key.split("."), config) != value)


def _evenly_spaced(values: Any, most: int) -> list[Any]:
    """Returns at most `most` values, evenly spaced, including both ends."""
    count = len(values)
    if count <= most:
        return list(values)
    return [values[round(i * (count - 1) / (most - 1))] for i in range(most)]
