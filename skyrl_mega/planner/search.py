"""Searches layouts for a number of GPUs: all that fit, ordered by estimated step time.

If estimates do not differ enough, the layout that cuts the model least comes first. Policy and engines are searched
separately and combined, as their times add up and only shared GPUs couple them. On shared GPUs engines get the memory
that `residency.keep` leaves: for every choice of it, the largest fraction that fits beside the policy in the phases
with a KV cache.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import (
    engine_data,
    expert_parallel,
    has_critic,
    length_limit,
    micro_tokens,
    planned_device,
    policy_ranks,
    reference_ranks,
)
from skyrl_mega.config.residency import kept
from skyrl_mega.config.schema import Config, LayoutConfig
from skyrl_mega.models import fp8_widths, megatron
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.megatron import layer_spec
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import fp8_blocks
from skyrl_mega.planner.candidates import Change, changed, ranked
from skyrl_mega.planner.engine_search import (
    REPLICAS,
    EngineChoice,
    PolicyRanks,
    engine_choices,
    fastest_engines,
    missing_bytes,
)
from skyrl_mega.planner.fit import host_problem, parallel_of
from skyrl_mega.planner.memory import critic_dims, critic_memory, on_cpu
from skyrl_mega.planner.micro_tokens import MICRO_TOKENS
from skyrl_mega.planner.moves import residency_time
from skyrl_mega.planner.relief import least_safe_phase
from skyrl_mega.planner.shared import stage_ranks
from skyrl_mega.planner.times import time_without_generation

SECONDS = 40.0
"""Maximum processor time of a search."""
RECOMPUTE = ("none", "selective", "moe", "full")
"""Candidates for `policy.recompute`, if the settings allow them."""
CONTEXT = (1, 2, 4, 8)
TIE = 0.03
"""Relative difference of estimated step times below which neither layout counts as faster."""
LONG = 16384
"""Minimum sequence length in tokens for trying context parallelism."""
EIGHTHS = range(1, 8)
"""Candidates for the policy's share of the GPUs, in eighths."""
MORE = (5, 6, 8, 12, 16, 24, 32)
"""Numbers of GPUs to try if nothing fits, in quarters of the given number."""


@dataclass(frozen=True)
class Suggestion:
    """Settings that fit the GPUs, with estimates of memory and time."""

    parallel: ParallelDims
    """The policy's grid."""
    config: Config
    """The complete settings."""
    peak: int
    """Bytes of the fullest policy rank."""
    kv_tokens: int
    """KV cache tokens of an engine worker."""
    seconds: float
    """Estimated seconds of an RL step."""

    @property
    def settings(self) -> dict[str, Any]:
        """Key → value in `config` of every setting within a search's reach."""
        c, layout = self.config, self.config.policy.layout
        return {
            "cluster.nodes": c.cluster.nodes,
            "policy.ranks": c.policy.ranks,
            **{f"policy.layout.{name}": getattr(layout, name) for name in vars(LayoutConfig())},
            "policy.micro_tokens": c.policy.micro_tokens,
            "policy.recompute": c.policy.recompute,
            "policy.offload_layers": c.policy.offload_layers,
            "policy.optimizer.streamed": c.policy.optimizer.streamed,
            "rollout.engines": c.rollout.engines,
            "rollout.tensor": c.rollout.tensor,
            "rollout.memory_fraction": c.rollout.memory_fraction,
            **({"rollout.options.enable_expert_parallel": True} if expert_parallel(c.rollout) else {}),
            **({"rollout.options.data_parallel_size": engine_data(c.rollout)} if REPLICAS in c.rollout.options else {}),
            "residency.keep": c.residency.keep,
        }

    @property
    def overrides(self) -> list[str]:
        """`settings` as command-line arguments, `key=value` with values in JSON."""
        return [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]

    @property
    def cuts(self) -> tuple[int, ...]:
        """Sort key, smallest for the model least divided: stages, then tensor · context, then experts, then
        recomputation or offloaded activations."""
        p = self.parallel
        recomputes = self.config.policy.recompute != "none" or self.config.policy.offload_layers > 0
        return p.pipeline * p.virtual_pipeline, p.tensor * p.context, p.expert, recomputes


@dataclass(frozen=True)
class Evaluated:
    """Policy settings with the engines considered, and the combinations that fit."""

    config: Config
    """The settings with this policy."""
    ranks: PolicyRanks
    """Memory of the policy."""
    engines: list[EngineChoice]
    """All engines considered for this division of the GPUs."""
    fitting: list[Suggestion]
    """Layouts of this policy with engines for which the memory of all GPUs and hosts is enough."""

    @property
    def missing_bytes(self) -> int:
        """Bytes missing on the fullest GPU with the least demanding engines; 0 or less if these fit, and only the
        critic does not."""
        return missing_bytes(self.config, self.ranks, self.engines)


@dataclass(frozen=True)
class SearchResult:
    """Fitting layouts, the number of tried settings, and the nearest miss."""

    gpus: int
    """Number of GPUs searched for."""
    evaluated: int
    """Number of evaluated settings."""
    suggestions: tuple[Suggestion, ...]
    """The best settings of each layout, in the order of `ordered`."""
    complete: bool
    """True if all candidates were tried within the time limit."""
    layouts: int = 0
    """Number of layouts tried; the last one in part if not complete."""
    untried: tuple[ParallelDims, ...] = ()
    """Layouts that were not tried; empty if complete."""
    stopped: bool = False
    """True if the search was ended by the caller, before the time limit."""
    enough_gpus: int | None = None
    """Larger number of GPUs with a fitting layout; set if nothing was found."""
    nearest: Evaluated | None = None
    """Candidate with the smallest shortage; set if nothing fits the GPUs."""
    host_problem: str | None = None
    """Error message for the fastest candidate; set if only host memory is short."""


@dataclass(frozen=True)
class SearchState:
    """State of a running search."""

    gpus: int
    """Number of GPUs under search."""
    evaluated: int
    """Number of evaluated settings so far."""
    best: Suggestion | None
    """The fastest fitting settings so far; host memory is not checked yet."""


def search(
    config: Config,
    hf: Mapping[str, Any],
    gpus: int | None = None,
    keep_going: Callable[[SearchState], bool] = lambda progress: True,
) -> SearchResult:
    """Tries layouts for about `SECONDS` of processor time, and returns the fitting layouts, best first, or the nearest
    miss. Nothing fitting is not an error. If nothing fits, a quarter of this time goes into finding a sufficient number
    of GPUs.

    Args:
        config: The settings.
        hf: The model's config.json.
        gpus: Number of GPUs, without those of a pool of engines; None takes all GPUs of the settings.
        keep_going: Called after each evaluated setting, also with larger numbers of GPUs (`SearchState.gpus`) if
            nothing fits; returns False to end the search, which then returns its result so far.

    Raises:
        UserError: Nodes of this size cannot make up this number of GPUs, the run is on a CPU, or the critic's separate
            layout does not match its ranks or the model.
    """
    gpus = _checked_gpus(config, gpus)
    decoder = architecture(hf).describe(hf)
    if config.policy.micro_tokens is None:  # all candidates are tried
        config = changed(config, (("policy.micro_tokens", MICRO_TOKENS[0]),))
    if config.critic.layout and config.critic.ranks:
        _critic(config, decoder)  # checked once, as the critic's layout is fixed
    if not config.cluster.shared:  # separate GPUs need no offload
        config = changed(config, (("residency.keep", None),))
    end = time.process_time() + SECONDS
    evaluated, fastest, stopped = list[Evaluated](), None, False
    for evaluation in _evaluations(config, decoder, gpus, end):
        evaluated.append(evaluation)
        fastest = min([*([fastest] if fastest else []), *evaluation.fitting], key=lambda s: s.seconds, default=None)
        if stopped := not keep_going(SearchState(gpus, len(evaluated), fastest)):
            break
    complete = not stopped and time.process_time() < end
    by_layout = dict[ParallelDims, list[Suggestion]]()
    for suggestion in (s for evaluation in evaluated for s in evaluation.fitting):
        by_layout.setdefault(suggestion.parallel, []).append(suggestion)
    best = [best for of_layout in by_layout.values() if (best := _best_with_host_memory(of_layout, decoder))]
    suggestions = tuple(ordered(best, lambda s: least_safe_phase(s.config, decoder, s.parallel) is not None))
    tried = {evaluation.ranks.parallel for evaluation in evaluated}
    untried = () if complete else tuple(_untried(config, decoder, gpus, tried))
    result = SearchResult(gpus, len(evaluated), suggestions, complete, len(tried), untried, stopped=stopped)
    if suggestions:
        return result
    fits = [s for of_layout in by_layout.values() for s in of_layout]
    host_error = _host_problem(min(fits, key=lambda s: s.seconds), decoder) if fits else None
    return replace(
        result,
        enough_gpus=None if stopped else _enough_gpus(config, decoder, gpus, keep_going),
        nearest=None if fits else min(evaluated, key=lambda evaluation: evaluation.missing_bytes, default=None),
        host_problem=str(host_error) if host_error else None,
    )


def _checked_gpus(config: Config, gpus: int | None) -> int:
    """Returns the number of GPUs to search for.

    Raises:
        UserError: Nodes of this size cannot make up this number of GPUs, or the run is on a CPU.
    """
    if on_cpu(config):
        raise UserError(
            "cluster.device = cpu; layouts are suggested for GPUs: add cluster.device=cuda", key="--suggest"
        )
    node = config.cluster.gpus_per_node
    gpus = config.cluster.nodes * node if gpus is None else gpus
    if gpus < 1 or (gpus > node and gpus % node):
        low = max(1, gpus // node) * node
        raise UserError(
            f"nodes have {node} GPUs (cluster.gpus_per_node); nearest that work: {low}, {low + node}",
            key="--suggest",
            value=gpus,
        )
    return gpus


def _enough_gpus(config: Config, decoder: Decoder, gpus: int, keep_going: Callable[[SearchState], bool]) -> int | None:
    """Returns a larger number of GPUs with a fitting layout; None if there is none or the time is over."""
    end, node, count = time.process_time() + SECONDS / 4, config.cluster.gpus_per_node, 0
    for quarters in MORE:
        more = -(-gpus * quarters // (4 * node)) * node
        for evaluation in _evaluations(config, decoder, more, end):
            count += 1
            if _best_with_host_memory(evaluation.fitting, decoder):
                return more
            if not keep_going(SearchState(more, count, None)):
                return None
    return None


def ordered(suggestions: Iterable[Suggestion], unsafe: Callable[[Suggestion], bool]) -> Iterator[Suggestion]:
    """Yields suggestions by step time; within a tie (`TIE`) safe suggestions come first, then suggestions that cut the
    model least.

    Args:
        suggestions: The suggestions.
        unsafe: Returns True if a suggestion leaves too little free memory on a shared GPU.
    """
    return ranked(suggestions, lambda s: s.seconds, TIE, lambda s: (unsafe(s), s.cuts, s.seconds))


def _best_with_host_memory(suggestions: list[Suggestion], decoder: Decoder) -> Suggestion | None:
    """Returns the fastest suggestion for which host memory suffices, or None; among equally fast suggestions, the one
    that moves least."""
    fastest_first = sorted(
        suggestions, key=lambda s: (round(s.seconds, 1), s.cuts, -len(kept(s.config.residency.keep)))
    )
    return next((s for s in fastest_first if _host_problem(s, decoder) is None), None)


def _host_problem(suggestion: Suggestion, decoder: Decoder) -> UserError | None:
    """Returns the error if host memory is too small for the suggestion, or None."""
    _, reference = parallel_of(suggestion.config)
    return host_problem(suggestion.config, decoder, suggestion.parallel, reference)


def _evaluations(config: Config, decoder: Decoder, gpus: int, end: float) -> Iterator[Evaluated]:
    """Yields all policy settings that are tried, each with the engines that fit, until the processor time reaches
    `end`.

    For each choice of `residency.keep`, only the fastest engines are included.
    """
    sizes = sorted({*MICRO_TOKENS, micro_tokens(config.policy)})
    for divided, engines in _divisions(config, decoder, gpus):
        for parallel, layout in _layouts(divided, decoder, policy_ranks(divided)):
            for recompute in _recompute_changes(config, max(parallel.stage_sizes(decoder.layers))):
                trial = changed(divided, (("policy.layout", layout), *recompute))
                for tokens in sizes:
                    if time.process_time() > end:
                        return
                    trial = changed(trial, (("policy.micro_tokens", tokens),))
                    evaluation = _evaluate_or_stream(trial, decoder, parallel, engines)
                    trial = evaluation.config
                    yield evaluation
                    if not evaluation.fitting:
                        break  # a larger micro-batch takes more memory


def _divisions(config: Config, decoder: Decoder, gpus: int) -> Iterator[tuple[Config, list[EngineChoice]]]:
    """Yields the settings with each division of the GPUs, and the engines that fit there."""
    nodes = -(-gpus // config.cluster.gpus_per_node)
    config = changed(config, (("cluster.nodes", nodes), ("policy.optimizer.streamed", False)))
    fixed = reference_ranks(config) + (config.critic.ranks or 0) * has_critic(config)
    for ranks, workers in _gpu_splits(config, gpus - fixed):
        divided = changed(config, (("policy.ranks", ranks),))
        if engines := engine_choices(divided, decoder, workers):
            yield divided, engines


def _untried(config: Config, decoder: Decoder, gpus: int, tried: set[ParallelDims]) -> Iterator[ParallelDims]:
    """Yields the layouts that a search would still have tried."""
    for divided, _ in _divisions(config, decoder, gpus):
        layouts = _layouts(divided, decoder, policy_ranks(divided))
        yield from (parallel for parallel, _ in layouts if parallel not in tried)


def _evaluate_or_stream(
    config: Config, decoder: Decoder, parallel: ParallelDims, engines: list[EngineChoice]
) -> Evaluated:
    """Evaluates policy settings; if nothing fits, also with a streamed optimizer.

    A streamed optimizer is slower, so it is tried only if nothing fits otherwise. FP8 parameters need all master
    weights on the device.
    """
    evaluation = _evaluate(config, decoder, parallel, engines)
    if evaluation.fitting or config.policy.optimizer.streamed or config.policy.precision.parameters != "model":
        return evaluation
    return _evaluate(changed(config, (("policy.optimizer.streamed", True),)), decoder, parallel, engines)


def _recompute_changes(config: Config, layers: int) -> list[Change]:
    """Returns candidates for `policy.recompute` and `policy.offload_layers`. With long sequences a copy may be faster
    than recomputation."""
    kinds, is_long = _recompute_kinds(config), length_limit(config.rollout) >= LONG
    offloading = product([kind for kind in kinds if kind in ("none", "selective")], {layers // 2, layers} - {0})
    choices = [*product(kinds, (0,)), *(offloading if is_long else ())]
    return [(("policy.recompute", kind), ("policy.offload_layers", offloaded)) for kind, offloaded in choices]


def _recompute_kinds(config: Config) -> list[str]:
    """Returns the allowed values of `policy.recompute` (`config/checks/policy.py`)."""
    policy = config.policy
    if any(name.startswith("recompute_") for name in policy.options):
        return ["none"]  # the given options are more specific (`config/megatron_options.py`)
    excluded = {"moe"} if policy.moe.replay != "off" else set()
    if policy.spec == "local":
        excluded.add("selective")
    return [kind for kind in RECOMPUTE if kind not in excluded]


def _evaluate(config: Config, decoder: Decoder, parallel: ParallelDims, chosen: list[EngineChoice]) -> Evaluated:
    """Evaluates policy settings with the engines fitting beside the policy."""
    ranks = PolicyRanks(config, decoder, parallel)
    plans = list(fastest_engines(config, ranks, chosen))
    if not plans or not _critic_fits(config, decoder, ranks.size):
        return Evaluated(config, ranks, chosen, [])
    other_seconds = time_without_generation(config, decoder, parallel)
    suggestions = []
    for plan in plans:
        residency = replace(config.residency, keep=plan.keep)
        settings = replace(config, rollout=plan.engine.rollout(plan.fraction), residency=residency)
        total = other_seconds + plan.seconds + residency_time(settings, decoder, parallel)
        suggestions.append(Suggestion(parallel, settings, ranks.peak(plan.keep), plan.tokens, total))
    return Evaluated(config, ranks, chosen, suggestions)


def _critic_fits(config: Config, decoder: Decoder, available: int) -> bool:
    """Returns True if there is no critic or it fits."""
    try:
        critic = _critic(config, decoder)
    except UserError:
        return False
    return critic is None or all(
        critic_memory(config, decoder, critic, r).peak <= available for r in stage_ranks(critic).values()
    )


def _critic(config: Config, decoder: Decoder) -> ParallelDims | None:
    """Returns the critic's grid; None without a critic.

    Raises:
        UserError: The critic's layout, by default the policy's, does not match its ranks or the model.
    """
    critic = critic_dims(config)
    if critic:
        megatron.check(decoder, critic, "critic.layout")
    return critic


def _gpu_splits(config: Config, gpus: int) -> list[tuple[int, int]]:
    """Returns pairs of GPU counts for policy and engines: whole nodes, or any eighths within a single node. Engines in
    a pool have all GPUs of the pool.

    A critic without given ranks gets as many GPUs as the policy.
    """
    grids = 2 if has_critic(config) and config.critic.ranks is None else 1
    if config.cluster.shared:
        return [(gpus // grids, gpus // grids)]
    if pool := config.cluster.pools.engines:
        return [(gpus // grids, pool.nodes * pool.gpus_per_node)]
    unit = config.cluster.gpus_per_node if gpus > config.cluster.gpus_per_node else 1
    shares = sorted({round(gpus / unit * k / 8) * unit for k in EIGHTHS})
    return [(ranks, gpus - grids * ranks) for ranks in shares if ranks > 0 and grids * ranks < gpus]


def _layouts(config: Config, decoder: Decoder, ranks: int) -> Iterator[tuple[ParallelDims, LayoutConfig]]:
    """Yields every layout of the model over `ranks` ranks with tensor parallelism within a node, and with the exchange
    of context ranks from the settings."""
    sizes = _divisors(ranks)
    tensors = [n for n in sizes if n <= config.cluster.gpus_per_node]
    contexts = [n for n in CONTEXT if n == 1 or length_limit(config.rollout) >= LONG]
    spec = layer_spec(config.policy.spec, planned_device(config))
    experts = [n for n in sizes if decoder.experts and decoder.experts.count % n == 0] or [1]
    for tensor, pipeline, virtual, context, expert in product(tensors, sizes, (1, 2), contexts, experts):
        ends = _ends(decoder.layers, pipeline, virtual)
        if ends is None or ranks % (tensor * pipeline * context) or ranks % (pipeline * expert):
            continue
        layout = LayoutConfig(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=virtual,
            context=context,
            context_exchange=config.policy.layout.context_exchange,
            expert=expert,
            first_stage_layers=ends or None,
            last_stage_layers=ends or None,
        )
        try:
            parallel = ParallelDims.from_config(layout, ranks)
            megatron.check(decoder, parallel)
            fp8_widths.check(decoder, parallel, config.policy.precision, spec)
            fp8_blocks.check(config, decoder, parallel)
        except UserError:
            continue
        yield parallel, layout


def _ends(layers: int, pipeline: int, virtual: int) -> int | None:
    """Returns the number of layers of the first and last stage if they have fewer than the others.

    Returns 0 if all stages have equally many, and None if the model cannot be cut this way.
    """
    if pipeline == 1:
        return 0 if virtual == 1 else None
    if layers % (pipeline * virtual) == 0:
        return 0
    between = -(-layers // pipeline)
    left = layers - between * (pipeline - 2)
    return left // 2 if virtual == 1 and left > 0 and left % 2 == 0 else None


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
