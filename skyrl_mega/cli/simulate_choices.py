"""Candidates of `--simulate`: asynchrony modes, splits of the GPUs and engine sizes, each as complete settings.

A choice is a change of the settings. It passes every check of a run's settings, so it can be pasted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

from skyrl_mega.cli.refusal import find_error
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.learning import MOST_SIMULATED, has_correction
from skyrl_mega.config.derived import engine_ranks, gpus_needed
from skyrl_mega.config.pools import engine_cluster
from skyrl_mega.config.schema import AsynchronyConfig, Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import engine_blocks, fit
from skyrl_mega.planner.candidates import Change, changed, differing, split
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
    """Value of `asynchrony.mode`."""
    most: int
    """Value of `asynchrony.max_staleness`; 0 with `off`."""
    config: Config
    """The complete settings."""
    change: Change
    """Difference from the given settings."""
    split: Change = field(default=(), compare=False)
    """Changes of settings that divide the GPUs."""


@dataclass(frozen=True)
class Refused:
    """Mode that cannot run with the settings, and the reason."""

    mode: str
    """Value of `asynchrony.mode`."""
    most: int
    """Value of `asynchrony.max_staleness`."""
    reason: str
    """Error message of the settings with this mode."""


def synchronous(config: Config) -> Choice:
    """Returns the given settings as a choice with `asynchrony.mode=off`; validity is not checked."""
    change = differing(config, _mode("off", 0))
    return Choice("off", 0, changed(config, change), change)


def modes(
    config: Config, split: Change, hf: Mapping[str, Any], *, splits_fit: bool = True
) -> Iterator[Choice | Refused]:
    """Yields the given settings if they are asynchronous, then each of `MODES` in a split.

    Modes that cannot run, or with a `max_staleness` above `MOST_SIMULATED`, are `Refused`.

    Args:
        config: The given settings.
        split: Changes of settings that divide the GPUs.
        hf: The model's config.json.
        splits_fit: False if no split of the GPUs fits. On shared GPUs every asynchronous mode is then `Refused`,
            and `off` is left out.
    """
    mode, most = config.asynchrony.mode, config.asynchrony.max_staleness
    if mode != "off" and most > MOST_SIMULATED:
        yield Refused(mode, most, f"it would take too long: --simulate plays {MOST_SIMULATED} at most")
    elif mode != "off":
        error = find_error(config, hf, planned=True, strict=not config.cluster.shared)
        as_given = Choice(mode, most, config, ())
        yield Refused(mode, most, f"(the settings as they are) {error}") if error else as_given
    for mode, most in MODES:
        if splits_fit or not config.cluster.shared:
            yield choice(config, split, mode, most, hf)
        elif mode != "off":
            yield Refused(mode, most, "impossible, as no split of the GPUs into policy and engines fits")


def choice(config: Config, split: Change, mode: str, most: int, hf: Mapping[str, Any]) -> Choice | Refused:
    """Returns the settings with this mode and division of the GPUs. If these settings are invalid or do not fit into
    the GPUs' memory, returns `Refused` with the reason.

    If the mode needs an off-policy correction, adds the first valid correction of `CORRECTIONS`. If none is valid, the
    reason is the error of the first.

    Args:
        config: The given settings.
        split: Changes of settings that divide the GPUs.
        mode: `asynchrony.mode`.
        most: `asynchrony.max_staleness`.
        hf: The model's config.json.
    """
    needed = most and not has_correction(config.algorithm)
    errors = []
    for correction in CORRECTIONS if needed else ((),):
        change = differing(config, (*_mode(mode, most), *split, *correction))
        candidate = changed(config, change)
        if (error := find_error(candidate, hf, planned=True, strict=True)) is None:
            return Choice(mode, most, candidate, change, split)
        errors.append(error)
    return Refused(mode, most, str(errors[0]))


def splits(config: Config, hf: Mapping[str, Any]) -> list[Change]:
    """Returns at most `SPLITS` fitting divisions of the GPUs between engines and policy (with reference and critic),
    from fewest to most policy ranks; [] if none fits.

    If the given engines fit no split, tries the smallest other engines that fit, with the memory fraction of exclusive
    GPUs or else the given one. If the policy fits no split, streams its optimizer. If the experts are spread over too
    many ranks, lowers expert parallelism.
    """
    sizes = ((), *(_sized(tensor, fraction) for tensor in TENSORS for fraction in _fractions(config)))
    for experts, memory, engine in product(_fewer_expert_ranks(config), MEMORY_RELIEF, sizes):
        if _keeps_blocks(config, engine, hf) and (fitting := _splits_with(config, (*engine, *experts, *memory), hf)):
            return fitting
    return []


def _fewer_expert_ranks(config: Config) -> list[Change]:
    """Returns no change, and changes halving expert parallelism repeatedly, for policies of fewer ranks."""
    size = config.policy.layout.expert
    halves = (size >> k for k in range(1, size.bit_length()) if size % (1 << k) == 0)
    return [(), *((("policy.layout.expert", half),) for half in halves)]


def _splits_with(config: Config, change: Change, hf: Mapping[str, Any]) -> list[Change]:
    """Returns fitting splits with a further change, evenly spaced over the possible numbers of engines."""
    most = _engine_gpus(config) // engine_ranks(changed(config, change).rollout)
    by_ranks = {}
    # Engines in a pool have all of the pool's GPUs.
    counts = range(1, most + 1) if config.cluster.pools.engines is None else range(most, most + 1)
    for count in _evenly_spaced([n for n in counts if n], COUNTS):
        matching = islice(_matching_splits(config, count, change), RANKS)
        if fitting := next((each for each in matching if _fits(config, each, hf)), None):
            by_ranks[dict(fitting)["policy.ranks"]] = fitting  # with equal policy ranks, more engines are better
    return _evenly_spaced([by_ranks[ranks] for ranks in sorted(by_ranks)], SPLITS)


def misfit_reason(config: Config, hf: Mapping[str, Any]) -> str:
    """Returns the reason why no split fits, as a clause for a message. Call if `splits` returns []. The example is a
    split with engines on half of the GPUs or fewer."""
    share = 2 if config.cluster.pools.engines is None else 1
    most = max(1, _engine_gpus(config) // share // engine_ranks(config.rollout))
    counts = _evenly_spaced(range(most, 0, -1), COUNTS)
    example = next((each for count in counts for each in _matching_splits(config, count, ())), None)
    if example is None:
        return "an engine leaves policy, reference and critic no GPUs over which their layouts can be"
    result = choice(config, example, "off", 0, hf)
    divided = changed(config, example)
    where = f"with policy.ranks={divided.policy.ranks} and rollout.engines={divided.rollout.engines}"
    return f"{where} {result.reason}" if isinstance(result, Refused) else "none passes the checks of a run"


def _matching_splits(config: Config, engines: int, change: Change) -> Iterator[Change]:
    """Yields splits with a further change whose layouts match the numbers of ranks, most policy ranks first."""
    total = _gpus(config)
    for ranks in range(total, 0, -1):
        each = (*split(ranks, engines), *change)
        candidate = changed(config, each)
        if gpus_needed(candidate) <= total and _layouts_match(candidate):
            yield each


def engines(
    config: Config, split: Change, hf: Mapping[str, Any], fractions: Sequence[float] | None = None
) -> list[Change]:
    """Returns variants of a split with other engines on the same GPUs: at most one for each tensor parallel size,
    smallest size first; [] if none fits.

    Each variant fits by `find_error` and differs from the given engines. Leaves out engines whose FP8 blocks would no
    longer match the policy's.

    Args:
        config: The given settings.
        split: Changes of settings that divide the GPUs; empty for shared GPUs.
        hf: The model's config.json.
        fractions: Memory fractions to try; by default those of exclusive GPUs, largest first.
    """
    divided = changed(config, split)
    gpus, fitting = divided.rollout.engines * engine_ranks(divided.rollout), []
    for tensor in sorted({*TENSORS, divided.rollout.tensor}):
        count, idle = divmod(gpus, tensor)
        for fraction in () if idle else fractions or _fractions(config):
            other = tuple({**dict(split), **dict(_sized(tensor, fraction)), "rollout.engines": count}.items())
            is_new = changed(config, other) != divided and _keeps_blocks(config, other, hf)
            if is_new and _fits(config, other, hf):
                fitting.append(other)
                break
    return fitting


def with_given_fraction(config: Config, split: Change, tried: Sequence[Change]) -> list[Change]:
    """Returns a split with the given `rollout.memory_fraction`, as the only entry of a list; empty if already in
    `tried`."""
    plain = tuple((dict(split) | {"rollout.memory_fraction": config.rollout.memory_fraction}).items())
    return [] if changed(config, plain) in [changed(config, each) for each in tried] else [plain]


def _fits(config: Config, split: Change, hf: Mapping[str, Any]) -> bool:
    """Returns True if the settings of a split are valid without asynchrony."""
    return isinstance(choice(config, split, "off", 0, hf), Choice)


def _keeps_blocks(config: Config, change: Change, hf: Mapping[str, Any]) -> bool:
    """Returns False if the change makes the engines' FP8 blocks differ from the policy's."""
    decoder = architecture(hf).describe(hf)
    return (
        engine_blocks.partial_block(changed(config, change), decoder) is None
        or engine_blocks.partial_block(config, decoder) is not None
    )


def _layouts_match(config: Config) -> bool:
    """Returns True if the layouts match the numbers of ranks."""
    try:
        fit.parallel_of(config)
        critic_dims(config)
    except UserError:
        return False
    return True


def _gpus(config: Config) -> int:
    return config.cluster.nodes * config.cluster.gpus_per_node


def _engine_gpus(config: Config) -> int:
    """Returns the number of GPUs that engines may have, with a pool those of the pool."""
    cluster = engine_cluster(config)
    return cluster.nodes * cluster.gpus_per_node


def _sized(tensor: int, fraction: float) -> Change:
    return ("rollout.tensor", tensor), ("rollout.memory_fraction", fraction)


def _fractions(config: Config) -> list[float]:
    """Returns the memory fractions to try for engines, largest first."""
    given = config.rollout.memory_fraction
    return sorted({given, max(given, EXCLUSIVE_FRACTION)}, reverse=True)


def _mode(mode: str, most: int) -> Change:
    usual = AsynchronyConfig().max_staleness
    return ("asynchrony.mode", mode), ("asynchrony.max_staleness", usual if mode == "off" else most)


def _evenly_spaced(values: Sequence[Any], most: int) -> list[Any]:
    """Returns at most `most` values, evenly spaced, including both ends."""
    count = len(values)
    if count <= most:
        return list(values)
    return [values[round(i * (count - 1) / (most - 1))] for i in range(most)]
