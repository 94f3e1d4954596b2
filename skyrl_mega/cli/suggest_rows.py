"""Rows of `--suggest`: the settings as they are, and the distinct choices among the layouts that fit, each with gain
and costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_mega.cli.refusal import find_error
from skyrl_mega.config.pools import gpus_by_kind
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import engine_blocks, micro_tokens
from skyrl_mega.planner.fit import parallel_of
from skyrl_mega.planner.host_memory import host_memory
from skyrl_mega.planner.memory import GIB, engine_memory, gpu_bytes, policy_memory
from skyrl_mega.planner.placement import nodes
from skyrl_mega.planner.rates import Rate
from skyrl_mega.planner.relief import least_safe_phase
from skyrl_mega.planner.run_time import ErrorBar, columns, error_bar
from skyrl_mega.planner.search import TIE, Suggestion
from skyrl_mega.planner.shared import shared_gpus, stage_ranks
from skyrl_mega.planner.times import step_time
from skyrl_mega.planner.trajectories import Trajectories, assumed

SHOWN = 10
"""Maximum rows of distinct choices."""
MORE_FREE = GIB
"""Additional free bytes of a GPU that make a layout a distinct choice."""
LESS_HOST = 0.75
"""Share of another row's host memory below which a layout is a distinct choice."""


@dataclass(frozen=True)
class Row:
    """Settings with their costs in time and memory."""

    suggestion: Suggestion
    """The settings with the estimates of the search."""
    free: int
    """Free bytes of the fullest GPU in the busiest phase: a shared GPU, or else a GPU of the policy."""
    warning: str
    """`close` or `tight` as in the dry run; empty if the memory is safe."""
    host: int
    """Bytes of host memory of the fullest node."""
    partial_blocks: bool
    """True if the engines' FP8 blocks differ from the policy's."""

    @property
    def seconds(self) -> float:
        """Estimated seconds of a step."""
        return self.suggestion.seconds

    @property
    def gpu_hours(self) -> float:
        """Estimated GPU-hours of a step, on all GPUs of all nodes, a pool's included."""
        return self.seconds * sum(gpus_by_kind(self.suggestion.config).values()) / 3600

    @property
    def gpus(self) -> int:
        """Number of GPUs of the allocation: nodes × GPUs per node."""
        cluster = self.suggestion.config.cluster
        return cluster.nodes * cluster.gpus_per_node

    def saved(self, given: Row | None) -> float | None:
        """Returns the share of a step's time saved compared with `given`: 1 - seconds / given.seconds.

        Negative if this row is slower; None if `given` is None.
        """
        return None if given is None else 1 - self.seconds / given.seconds

    def covers(self, other: Row) -> bool:
        """Returns True if the table can omit `other`, a row for as many GPUs, because this row is about as good.

        That is, `other` is at most `TIE` (relative) faster, has less than `MORE_FREE` more free bytes, needs more than
        the share `LESS_HOST` of this row's host memory, and avoids neither a warning nor partial blocks of this row.
        """
        return (
            self.seconds <= (1 + TIE) * other.seconds
            and self.free > other.free - MORE_FREE
            and self.host * LESS_HOST < other.host
            and (not self.warning or bool(other.warning))
            and self.partial_blocks <= other.partial_blocks
        )


@dataclass(frozen=True)
class Rows:
    """The settings as they are, and the distinct choices."""

    given: Row | None
    """The given settings; None if they do not fit."""
    why: str | None
    """Error message of given settings that do not fit."""
    choices: Sequence[Row]
    """Distinct choices in the order of the search."""
    bar: ErrorBar | None
    """Error bar of the seconds of the first choice; None without choices."""


def rows(
    config: Config, hf: Mapping[str, Any], suggestions: Iterable[Suggestion], gpus: int, used: Sequence[Rate]
) -> Rows:
    """Returns the given settings and the distinct suggestions as rows of the table. Settings that do not fit raise no
    error: the result has the message.

    Args:
        config: The given settings, with planned rates.
        hf: The model's config.json.
        suggestions: Fitting layouts in the order of the search.
        gpus: Number of GPUs of the search.
        used: The rates of the settings with their uncertainties, as from `rates.with_measured`.
    """
    decoder = architecture(hf).describe(hf)
    error = find_error(config, hf, planned=True)
    given = None if error else row(as_suggestion(config, hf, decoder), decoder)
    comparable = [given] if given and given.gpus == gpus else []
    choices = distinct(suggestions, comparable, decoder)
    bar = step_error_bar(choices[0].suggestion, decoder, used) if choices else None
    return Rows(given, str(error) if error else None, choices, bar)


def step_error_bar(suggestion: Suggestion, decoder: Decoder, used: Sequence[Rate]) -> ErrorBar:
    """Returns the error bar of a suggestion's seconds of a step, from the rates, the assumed lengths, and with dynamic
    sampling the assumed share of groups with a signal. Raises
    UserError if the files of a draft model or head (`rollout.drafts`) cannot be used.

    Args:
        suggestion: The settings.
        decoder: The model.
        used: The rates of the settings with their uncertainties.
    """
    config, parallel = suggestion.config, suggestion.parallel
    mean = assumed(config, parallel)
    lengths = columns(config, parallel, mean)

    def seconds(config: Config, trajectories: Trajectories) -> float:
        return step_time(config, decoder, parallel, trajectories=trajectories).step

    dynamic = config.algorithm.dynamic_sampling.enabled
    return error_bar(seconds, config, mean, used, [lengths["short"], lengths["limit"]], signal=dynamic)


def distinct(suggestions: Iterable[Suggestion], known: Sequence[Row], decoder: Decoder) -> list[Row]:
    """Returns at most `SHOWN` rows: the first suggestion, then each suggestion not covered by an earlier or known row;
    [] without suggestions.

    Args:
        suggestions: Fitting layouts in the order of the search.
        known: Rows already in the table, for comparison; not returned.
        decoder: The model.
    """
    choices: list[Row] = []
    for suggestion in suggestions:
        candidate = row(suggestion, decoder)
        if not choices or not any(other.covers(candidate) for other in (*known, *choices)):
            choices.append(candidate)
        if len(choices) == SHOWN:
            break
    return choices


def row(suggestion: Suggestion, decoder: Decoder) -> Row:
    """Returns a suggestion as a row, with free GPU memory, host memory and warnings computed by the planner. Raises
    UserError if the files of a draft model or head (`rollout.drafts`) cannot be used."""
    config, parallel = suggestion.config, suggestion.parallel
    _, reference = parallel_of(config)
    free = min(
        (gpu.least_free for gpu in shared_gpus(config, decoder, parallel)), default=gpu_bytes(config) - suggestion.peak
    )
    host = max(
        host_memory(config, decoder, parallel, reference, node, first=i == 0).total
        for i, node in enumerate(nodes(config))
    )
    partial = engine_blocks.partial_block(config, decoder) is not None
    return Row(suggestion, free, "tight" if free < 0 else memory_warning(suggestion, decoder), host, partial)


def memory_warning(s: Suggestion, decoder: Decoder) -> str:
    """Returns the dry run's warning about memory on shared GPUs: `tight` if memory is missing by the estimates,
    `close` if it may be missing within their margin, else an empty text. Raises UserError if the files of a draft model
    or head (`rollout.drafts`) cannot be used."""
    unsafe = least_safe_phase(s.config, decoder, s.parallel)
    return "" if unsafe is None else "tight" if unsafe.free < 0 else "close"


def as_suggestion(config: Config, hf: Mapping[str, Any], decoder: Decoder) -> Suggestion:
    """Returns valid settings as a `Suggestion`, with micro-batch tokens decided and memory and time estimated. Raises
    UserError if the files of a draft model or head (`rollout.drafts`) cannot be used."""
    config = micro_tokens.with_micro_tokens(config, hf)
    parallel, _ = parallel_of(config)
    peak = max(policy_memory(config, decoder, parallel, rank).peak for rank in stage_ranks(parallel).values())
    seconds = step_time(config, decoder, parallel).step
    return Suggestion(parallel, config, peak, engine_memory(config, decoder).tokens, seconds)
