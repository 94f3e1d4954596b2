"""What `--simulate` compares: modes of `asynchrony`, splits of the GPUs and sizes of engines, each as the settings that
a run would need.

A choice is a change of the settings that has passed every check that a run's settings have, so that it can be pasted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any

from skyrl_mega.cli.refusal import wrong
from skyrl_mega.config.asynchrony_checks import corrected
from skyrl_mega.config.derived import engine_ranks, gpus_needed
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import AsynchronyConfig, Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import engine_blocks, fit, fixes
from skyrl_mega.planner.fixes import Change
from skyrl_mega.planner.memory import critic_dims

MODES = (("off", 0), ("one_step", 1), ("full", 1), ("full", 2), ("full", 4))
"""With `asynchrony.max_staleness`, in the order in which they are shown."""
EXPLORED = (("full", 2), ("full", 1), ("one_step", 1), ("off", 0))
"""The first of these that can run decides which split is best."""
SPLITS = 6
"""Splits that are simulated."""
COUNTS = 64
"""Numbers of engines that are looked at."""
RANKS = 3
"""Numbers of policy ranks that are looked at with each, the largest that its layout allows."""
TENSORS = (1, 2, 4, 8, 16)
"""Tensor sizes of engines that are looked at in the best split, beside the given one."""
OF_THEIR_OWN = 0.9
"""Share of its memory that engines may have of a GPU that is theirs alone: vLLM's own default."""
ROOM: tuple[Change, ...] = ((), (("policy.optimizer.streamed", True),))
"""What makes room for a policy of fewer ranks."""
CORRECTIONS: tuple[Change, ...] = (
    (("algorithm.importance_cap", 2.0),),
    (("algorithm.old_logprobs", "engine"),),
    (("algorithm.rejection.level", "token"),),
)
"""What tokens of older weights need one of; the first that these settings allow is taken."""


@dataclass(frozen=True)
class Choice:
    """Settings that can run."""

    mode: str
    most: int
    """`asynchrony.max_staleness`; 0 with `off`."""
    config: Config
    change: Change
    """From the settings that were given, without what they have already."""


def off(config: Config) -> Choice:
    """The settings as they are, synchronous."""
    change = _differing(config, _mode("off", 0))
    return Choice("off", 0, fixes.changed(config, change), change)


def given(config: Config, hf: Mapping[str, Any]) -> Choice | UserError:
    """Settings with asynchrony as they are; or why they cannot run."""
    refusal = wrong(config, hf, planned=True, strict=not config.cluster.shared)
    return Choice(config.asynchrony.mode, config.asynchrony.max_staleness, config, ()) if refusal is None else refusal


def choice(config: Config, split: Change, mode: str, most: int, hf: Mapping[str, Any]) -> Choice | UserError:
    """A mode in a split, with a correction where it needs one; or why it cannot run."""
    change = (*_mode(mode, most), *split)
    needed = most and not corrected(config.algorithm)
    refusals = []
    for correction in CORRECTIONS if needed else ((),):
        whole = _differing(config, (*change, *correction))
        changed = fixes.changed(config, whole)
        if (refusal := wrong(changed, hf, planned=True, strict=True)) is None:
            return Choice(mode, most, changed, whole)
        refusals.append(refusal)
    return refusals[0]


def splits(config: Config, hf: Mapping[str, Any]) -> list[Change]:
    """The GPUs between the policy, with reference and critic, and engines: where all fit, at most `SPLITS`, from the
    fewest policy ranks to the most. Where no split has room for the given engines, with the smallest others that fit,
    with the memory of GPUs of their own, or else as much as the settings give; where none has room for the policy, with
    its optimizer streamed; and where its experts are over more ranks than it could have, with them over fewer."""
    sizes = ((), *(_sized(tensor, fraction) for tensor in TENSORS for fraction in _fractions(config)))
    for room in (*ROOM, *((*fewer, *more) for fewer in _fewer_experts(config) for more in ROOM)):
        for own in sizes:
            if _keeps_blocks(config, own, hf) and (found := _splits(config, (*own, *room), hf)):
                return found
    return []


def refused(config: Config, hf: Mapping[str, Any]) -> str:
    """Why one of the splits does not fit, of engines on half of the GPUs; nothing where that one does."""
    total = config.cluster.nodes * config.cluster.gpus_per_node
    engines = max(1, total // 2 // engine_ranks(config.rollout))
    for ranks in range(total, 0, -1):
        split = _split(ranks, engines)
        changed = fixes.changed(config, split)
        if gpus_needed(changed) <= total and _divides(changed):
            found = choice(config, split, "off", 0, hf)
            said = f"with policy.ranks={ranks} and rollout.engines={engines} {found}"
            return said if isinstance(found, UserError) else ""
    return "an engine leaves policy, reference and critic no GPUs over which their layouts can be"


def _fewer_experts(config: Config) -> list[Change]:
    """Expert parallelism by halves, which fewer ranks can have."""
    found: list[Change] = []
    size = config.policy.layout.expert
    while size % 2 == 0:
        size //= 2
        found.append((("policy.layout.expert", size),))
    return found


def _splits(config: Config, own: Change, hf: Mapping[str, Any]) -> list[Change]:
    total = config.cluster.nodes * config.cluster.gpus_per_node
    most = total // engine_ranks(fixes.changed(config, own).rollout)
    found = {}
    for count in _spread(range(1, most + 1), COUNTS):
        for split in islice(_ranks(config, count, total, own, hf), 1):
            found[dict(split)["policy.ranks"]] = split  # where more engines leave it as many ranks, these are better
    return _spread([found[ranks] for ranks in sorted(found)], SPLITS)


def engines(config: Config, split: Change, hf: Mapping[str, Any]) -> list[Change]:
    """A split with other engines, on all of the same GPUs: of each tensor size that fits, with the memory of GPUs of
    their own, where that fits. None whose blocks of FP8 would no longer be the policy's."""
    given = fixes.changed(config, split).rollout
    gpus = given.engines * engine_ranks(given)
    found = []
    for tensor in sorted({*TENSORS, given.tensor}):
        count, idle = divmod(gpus, tensor)
        for fraction in _fractions(config):
            other = tuple({**dict(split), **dict(_sized(tensor, fraction)), "rollout.engines": count}.items())
            if fixes.changed(config, other) == fixes.changed(config, split) or not _keeps_blocks(config, other, hf):
                continue
            if not idle and not isinstance(choice(config, other, "off", 0, hf), UserError):
                found.append(other)
                break
    return found


def on_shared(config: Config, hf: Mapping[str, Any]) -> list[Change]:
    """Engines of other sizes on GPUs that the policy has too, of all of them that the given ones have; as `engines`."""
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


def plainer(config: Config, split: Change, tried: Sequence[Change]) -> list[Change]:
    """A split with the share of memory that the settings give; none where that is one that has been tried."""
    plain = tuple((dict(split) | {"rollout.memory_fraction": config.rollout.memory_fraction}).items())
    there = [fixes.changed(config, each) for each in tried]
    return [] if fixes.changed(config, plain) in there else [plain]


def _keeps_blocks(config: Config, change: Change, hf: Mapping[str, Any]) -> bool:
    """Whether engines have the policy's blocks of FP8, where those of the settings have."""
    d = architecture(hf).describe(hf)
    return engine_blocks.other(fixes.changed(config, change), d) is None or engine_blocks.other(config, d) is not None


def _ranks(config: Config, engines: int, total: int, own: Change, hf: Mapping[str, Any]) -> Iterator[Change]:
    """Splits with so many engines, the most policy ranks first."""
    looked = 0
    for ranks in range(total, 0, -1):
        split = (*_split(ranks, engines), *own)
        changed = fixes.changed(config, split)
        if gpus_needed(changed) > total or not _divides(changed):
            continue
        if not isinstance(choice(config, split, "off", 0, hf), UserError):
            yield split
        looked += 1
        if looked == RANKS:
            return


def _divides(config: Config) -> bool:
    """Whether the ranks can be cut as their layouts say."""
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
    """Shares of a GPU's memory that engines are tried with, the largest first."""
    given = config.rollout.memory_fraction
    return sorted({given, max(given, OF_THEIR_OWN)}, reverse=True)


def _mode(mode: str, most: int) -> Change:
    usual = AsynchronyConfig().max_staleness
    return ("asynchrony.mode", mode), ("asynchrony.max_staleness", usual if mode == "off" else most)


def _differing(config: Config, change: Change) -> Change:
    return tuple((key, value) for key, value in change if reduce(getattr, key.split("."), config) != value)


def _spread(values: Any, most: int) -> list[Any]:
    """So many of them at most, evenly, with both ends."""
    count = len(values)
    if count <= most:
        return list(values)
    return [values[round(i * (count - 1) / (most - 1))] for i in range(most)]
