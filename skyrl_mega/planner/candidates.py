"""Candidates of every search for settings: the table of searched settings, their combinations, and the order of
results.

A candidate is a change of given settings. Four searches share this module: layouts (`search`), fixes of refusals
(`fixes`), settings freeing memory (`relief`), and the simulated modes (`cli.simulate_choices`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from math import log
from typing import Any, TypeVar

from skyrl_mega.config.keys import keys as schema
from skyrl_mega.config.residency import PARTS
from skyrl_mega.config.schema import Config
from skyrl_mega.planner.micro_tokens import MICRO_TOKENS

Change = tuple[tuple[str, Any], ...]
"""Keys with new values."""
Near = Callable[[Any], Iterable[Any]]
"""Function returning values near a value, nearest first."""
Result = TypeVar("Result")


def changed(config: Config, change: Change) -> Config:
    """Returns new settings with the change applied, without checking values; unchanged groups remain the same objects.
    `config` stays as it is. Raises TypeError or AttributeError for an unknown setting, and for a key below a group that
    is null."""
    for key, value in change:
        config = _replaced(config, key.split("."), value)
    return config


def _replaced(settings: Any, path: list[str], value: Any) -> Any:
    name, *inner = path
    return replace(settings, **{name: _replaced(getattr(settings, name), inner, value) if inner else value})


def value_of(config: Config, key: str) -> Any:
    """Returns the value of a setting, such as `policy.layout.tensor`. Raises AttributeError for an unknown setting, and
    for a key below a group that is null."""
    return reduce(getattr, key.split("."), config)


def differing(config: Config, change: Change) -> Change:
    """Returns the part of a change with new values, compared with the present settings; () if nothing changes."""
    return tuple((key, value) for key, value in change if value_of(config, key) != value)


def as_arguments(change: Change) -> str:
    """Returns the change as command-line arguments, `key=value` separated by spaces; "" for no change."""
    return " ".join(f"{key}={_as_text(value)}" for key, value in change)


def _as_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def split(ranks: int, engines: int) -> Change:
    """Returns the change to separate GPUs for policy and engines (disaggregated), with the default of
    `residency.keep`.

    Args:
        ranks: Ranks of the policy, a GPU each.
        engines: Number of engines, not of their GPUs.
    """
    return (
        ("cluster.shared", False),
        ("residency.keep", None),
        ("policy.ranks", ranks),
        ("rollout.engines", engines),
    )


def combined(*knobs: Iterable[Change]) -> Iterator[Change]:
    """Yields every combination of one change from each of the lists `knobs`, joined to one change.

    Combinations with the smallest sum of positions in the lists come first. Yields nothing if a list is empty. The
    lists are read completely first.
    """
    by_distance = sorted(product(*map(enumerate, knobs)), key=lambda parts: sum(position for position, _ in parts))
    return (sum((change for _, change in parts), ()) for parts in by_distance)


def ranked(
    results: Iterable[Result], seconds: Callable[[Result], float], tie: float, key: Callable[[Result], Any]
) -> Iterator[Result]:
    """Yields results by step time, fastest first, except within ties.

    The fastest remaining result and all results at most `tie` slower form a tie, ordered by `key`.

    Args:
        results: The results.
        seconds: Returns the step time of a result.
        tie: Largest relative difference of step times within a tie, such as 0.02.
        key: Returns the sort key within a tie; equal keys are ordered by step time.
    """
    rest = sorted(results, key=seconds)
    while rest:
        tied = [result for result in rest if seconds(result) <= (1 + tie) * seconds(rest[0])]
        yield from sorted(tied, key=key)
        rest = rest[len(tied) :]


def near(config: Config, key: str, *, coarse: bool = False) -> list[Change]:
    """Returns changes of a setting to other values, nearest first, without checking them against other settings; [] if
    the setting's group is null.

    If the value is invalid, the default comes first, then values near the default.

    Args:
        config: The settings.
        key: A key of `KNOBS`.
        coarse: True to keep only whole numbers that are the value times, or divided by, a power of two; does not
            concern `policy.micro_tokens`, and values that are no whole numbers.
    """
    settings = value_of(config, key.rpartition(".")[0])
    if settings is None:
        return []
    value, defaults = value_of(config, key), []
    if not schema()[key].allows(value):
        value = schema()[key].default
        defaults = [value]
    values = [*defaults, *KNOBS[key].near(value)]
    if coarse and key != "policy.micro_tokens":
        values = [other for other in values if _is_doubled(other, value)]
    return [((key, other),) for other in values]


def _is_doubled(value: Any, other: Any) -> bool:
    """Returns True if one whole number is the other times a power of two, or if either is not a whole number."""
    if not isinstance(value, int) or not isinstance(other, int) or isinstance(value, bool):
        return True
    if value < 1 or other < 1:
        return False
    ratio, remainder = divmod(max(value, other), min(value, other))
    return remainder == 0 and ratio & (ratio - 1) == 0


def _of(values: tuple[Any, ...]) -> Near:
    """Returns a function sorting the other values by distance from a value."""
    return lambda value: sorted((other for other in values if other != value), key=lambda other: abs(other - value))


def _only(other: Any) -> Near:
    """Returns a function returning a single value, or nothing if the current value is the same."""
    return lambda value: [] if value == other else [other]


def _unless_null(values: Near, *first: Any) -> Near:
    """Returns a function returning `first` and the values near a value; nothing for null."""
    return lambda value: [] if value is None else [*first, *values(value)]


def _sizes(value: Any) -> Iterable[Any]:
    """Returns sizes near the value, nearest first."""
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 128)
    return sorted((n for n in sizes if n != value), key=lambda n: (abs(log(n / max(value or 1, 1))), n))


def _counts(value: Any) -> Iterable[Any]:
    """Returns counts near the value, nearest first: a few more or fewer, halves, doubles and multiples. The lower of
    two equally near counts is first."""
    value = value if value and value > 0 else 8
    counts = {value + k for k in range(-8, 9)} | {n for k in range(1, 6) for n in (value * 2**k, value // 2**k)}
    counts |= {-(-value // unit) * unit + unit * k for unit in (8, 12, 16) for k in range(-2, 3)}
    return sorted((n for n in counts if n > 0 and n != value), key=lambda n: (abs(n - value), n))


def _lower(value: Any) -> Iterable[Any]:
    """Returns the value halved repeatedly, down to 1."""
    return [] if value is None else [type(value)(value / 2**k) for k in range(1, 9) if value / 2**k >= 1]


def _micro_tokens(value: Any) -> Iterable[Any]:
    """Returns the value halved repeatedly; if it is above all candidates of the layout search, the candidates in
    descending order first."""
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


def _keep_lists(value: Any) -> Iterable[Any]:
    """Returns lists of parts to keep: none, one part fewer or more, and null for all."""
    parts = list(PARTS) if value is None else [part for part in value if part in PARTS]
    lists = [[], *([p for p in PARTS if (p in parts) != (p == part)] for part in PARTS), None]
    return [lists[i] for i in range(len(lists)) if lists[i] != value and lists[i] not in lists[:i]]


@dataclass(frozen=True)
class Knob:
    """A setting that searches may change, with the values to try."""

    near: Near
    """Function from the current value to other values, nearest first."""
    paired: bool = False
    """True to change the setting also together with another one, if no single change helps."""
    only_named: bool = False
    """True to change the setting only if the error names it: it changes what is learned, or is unusual."""


def _layout(role: str, *, only_named: bool = False) -> dict[str, Knob]:
    paired = {"tensor": True, "expert": True, "pipeline": True, "virtual_pipeline": False, "context": role == "policy"}
    return {f"{role}.layout.{name}": Knob(_sizes, of_pair, only_named) for name, of_pair in paired.items()}


KNOBS: dict[str, Knob] = {
    "policy.recompute": Knob(_only("full"), paired=True),
    "policy.offload_layers": Knob(_of((0, 8, 12, 16, 24, 32, 48, 64, 96)), paired=True),
    "policy.micro_tokens": Knob(_micro_tokens, paired=True),
    "policy.optimizer.streamed": Knob(_only(True), paired=True),
    "critic.optimizer.streamed": Knob(_only(True), only_named=True),
    "policy.precision.parameters": Knob(_only("fp8")),
    "policy.logit_chunk": Knob(_lower),
    "weights.bucket_mib": Knob(_lower),
    **_layout("policy"),
    "policy.layout.expert_tensor": Knob(lambda value: [None, *_sizes(value)], only_named=True),
    "policy.layout.first_stage_layers": Knob(_unless_null(_counts, None)),
    "policy.layout.last_stage_layers": Knob(_unless_null(_counts, None)),
    "policy.ranks": Knob(_counts, paired=True),
    "rollout.memory_fraction": Knob(_of(tuple(round(0.05 * k, 2) for k in range(1, 20))), paired=True),
    "rollout.kv_cache_gib": Knob(_lower, only_named=True),
    "residency.keep": Knob(_keep_lists, paired=True),
    "cluster.shared": Knob(lambda value: [not value], only_named=True),
    "rollout.tensor": Knob(_sizes, paired=True),
    "rollout.engines": Knob(_counts, paired=True),
    "cluster.nodes": Knob(_larger_counts, paired=True),
    "reference.ranks": Knob(_unless_null(_counts), paired=True, only_named=True),
    **_layout("reference", only_named=True),
    "critic.ranks": Knob(_counts, paired=True, only_named=True),
    **_layout("critic", only_named=True),
    "critic.micro_tokens": Knob(_lower, only_named=True),
    "data.mini_batch_prompts": Knob(_counts, only_named=True),
    "data.samples_per_prompt": Knob(lambda value: range(max(2, value + 1), 9), only_named=True),
    "rollout.max_prompt_tokens": Knob(_lower, only_named=True),
    "rollout.sampling.max_tokens": Knob(_lower, only_named=True),
    "rollout.max_response_tokens": Knob(_lower, only_named=True),
    "rollout.max_length": Knob(_unless_null(_higher, None), only_named=True),
    "rollout.concurrency": Knob(_lower, only_named=True),
    "rollout.env_timeout_s": Knob(_higher),
    "weights.timeout_s": Knob(_higher),
    "cluster.host_memory_gib": Knob(lambda value: []),  # the machine is given; other keys are searched
}
"""All searched settings, in the order in which they are tried."""
