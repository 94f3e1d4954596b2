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

from skyrl_mega.config.derived import (
    expert_parallel,
    has_critic,
    length_limit,
    micro_tokens,
    planned_device,
    reference_ranks,
)
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.residency import kept
from skyrl_mega.config.schema import Config, LayoutConfig
from skyrl_mega.models import fp8_widths, megatron
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.megatron import layer_spec
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import fp8_blocks
from skyrl_mega.planner.fit import host_problem, parallel_of
from skyrl_mega.planner.memory import critic_dims, critic_memory, on_cpu
from skyrl_mega.planner.micro_tokens import MICRO_TOKENS
from skyrl_mega.planner.moves import residency_time
from skyrl_mega.planner.pairs import Engine, Ranks, engines, lacking, pairs
from skyrl_mega.planner.relief import shortest
from skyrl_mega.planner.shared import stages
from skyrl_mega.planner.times import elsewhere

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
    """Settings that fit."""

    parallel: ParallelDims
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
        """Returns the values, by dotted key, that turn the given settings into these."""
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
            "residency.keep": c.residency.keep,
        }

    @property
    def overrides(self) -> list[str]:
        """Returns the same values as command-line arguments."""
        return [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]

    @property
    def cuts(self) -> tuple[int, ...]:
        """Returns a sort key for how much the model is cut: stages, then matrices and contexts, then experts, then
        recomputation."""
        p = self.parallel
        recomputes = self.config.policy.recompute != "none" or self.config.policy.offload_layers > 0
        return p.pipeline * p.virtual_pipeline, p.tensor * p.context, p.expert, recomputes


@dataclass(frozen=True)
class Tried:
    """Policy settings combined with all engines."""

    parallel: ParallelDims
    config: Config
    found: list[Suggestion]
    """Combinations that fit."""
    lacking: int
    """Missing bytes of a GPU if nothing fits; 0 or less if only the critic does not fit."""


@dataclass(frozen=True)
class Search:
    """Fitting layouts, the number of tried settings, and the nearest miss."""

    gpus: int
    tried: int
    """Number of evaluated settings."""
    found: tuple[Suggestion, ...]
    """The best settings of each layout, in the order of `ordered`."""
    complete: bool
    """True if all candidates were tried within the time limit."""
    enough: int | None = None
    """Larger number of GPUs with a fitting layout; set if nothing was found."""
    nearest: Tried | None = None
    """Candidate with the smallest shortage; set if nothing fits the GPUs."""
    hosts: str | None = None
    """Error message for the fastest candidate; set if only host memory is short."""


def search(config: Config, hf: Mapping[str, Any], gpus: int | None = None) -> Search:
    """Tries layouts for `gpus` GPUs (None: all GPUs of the settings) and returns those that fit.

    Raises:
        UserError: Nodes of this size cannot make up this number of GPUs, the run is on a CPU, or the critic's separate
            layout does not match its ranks or the model.
    """
    if on_cpu(config):
        raise UserError("--suggest: cluster.device = cpu; layouts are suggested for GPUs: add cluster.device=cuda")
    node = config.cluster.gpus_per_node
    gpus = config.cluster.nodes * node if gpus is None else gpus
    if gpus < 1 or (gpus > node and gpus % node):
        low = max(1, gpus // node) * node
        raise UserError(
            f"--suggest {gpus}: nodes have {node} GPUs (cluster.gpus_per_node); nearest that work: {low}, {low + node}"
        )
    d = architecture(hf).describe(hf)
    if config.policy.micro_tokens is None:  # all candidates are tried
        config = replace(config, policy=replace(config.policy, micro_tokens=MICRO_TOKENS[0]))
    if config.critic.layout and config.critic.ranks:
        _critic(config, d)  # checked once, as the critic's layout is fixed
    if not config.cluster.shared:  # separate GPUs need no offload
        config = replace(config, residency=replace(config.residency, keep=None))
    end = time.process_time() + SECONDS
    every = list(_tries(config, d, gpus, end))
    complete = time.process_time() < end
    made = dict[ParallelDims, list[Suggestion]]()
    for suggestion in (s for tried in every for s in tried.found):
        made.setdefault(suggestion.parallel, []).append(suggestion)
    found = [best for of_layout in made.values() if (best := _first_with_room(of_layout, d))]
    if found:
        return Search(gpus, len(every), tuple(ordered(found, lambda s: _crowded(s, d))), complete)
    larger = [-(-gpus * quarters // (4 * node)) * node for quarters in MORE]
    end = time.process_time() + SECONDS / 4
    enough = next((n for n in larger if any(_first_with_room(t.found, d) for t in _tries(config, d, n, end))), None)
    fits = [s for of_layout in made.values() for s in of_layout]
    hosts = _host_problem(min(fits, key=lambda s: s.seconds), d) if fits else None
    nearest = None if fits else min(every, key=lambda tried: tried.lacking, default=None)
    return Search(gpus, len(every), (), complete, enough=enough, nearest=nearest, hosts=hosts)


def ordered(found: Iterable[Suggestion], crowded: Callable[[Suggestion], bool]) -> Iterator[Suggestion]:
    """Yields suggestions by step time; suggestions at most `TIE` slower than the fastest remaining one form a tie.

    Within a tie suggestions that are not crowded come first, then those that cut the model least.
    """
    rest = sorted(found, key=lambda s: s.seconds)
    while rest:
        tie = [s for s in rest if s.seconds <= (1 + TIE) * rest[0].seconds]
        yield from sorted(tie, key=lambda s: (crowded(s), s.cuts, s.seconds))
        rest = rest[len(tie) :]


def _crowded(suggestion: Suggestion, d: Decoder) -> bool:
    """Returns True if the free memory of a shared GPU is less than the possible error of its estimates."""
    config = suggestion.config
    return config.cluster.shared and shortest(config, d, suggestion.parallel) is not None


def _first_with_room(made: list[Suggestion], d: Decoder) -> Suggestion | None:
    """Returns the fastest suggestion for which host memory suffices, or None; among equally fast suggestions, the one
    that moves least."""
    for suggestion in sorted(made, key=lambda s: (round(s.seconds, 1), s.cuts, -len(kept(s.config.residency.keep)))):
        if _host_problem(suggestion, d) is None:
            return suggestion
    return None


def _host_problem(suggestion: Suggestion, d: Decoder) -> str | None:
    """Returns the error message if host memory is too small for the suggestion, or None."""
    _, reference = parallel_of(suggestion.config)
    return host_problem(suggestion.config, d, suggestion.parallel, reference)


def _tries(config: Config, d: Decoder, gpus: int, end: float) -> Iterator[Tried]:
    """Yields all policy settings that are tried, each with the engines that fit, until the processor time reaches
    `end`.

    For each choice of `residency.keep`, only the fastest engines are included.
    """
    config = replace(config, cluster=replace(config.cluster, nodes=-(-gpus // config.cluster.gpus_per_node)))
    fixed = reference_ranks(config) + (config.critic.ranks or 0) * has_critic(config)
    for ranks, workers in _splits(config, gpus - fixed):
        policy = replace(config.policy, ranks=ranks)
        chosen = engines(replace(config, policy=policy), d, workers)
        if not chosen:
            continue
        for parallel, layout in _layouts(config, d, ranks):
            for recompute, away in _ways(config, max(parallel.stage_sizes(d.layers))):
                optimizer = replace(policy.optimizer, streamed=False)
                given = replace(policy, layout=layout, recompute=recompute, offload_layers=away, optimizer=optimizer)
                for tokens in sorted({*MICRO_TOKENS, micro_tokens(config.policy)}):
                    if time.process_time() > end:
                        return
                    given = replace(given, micro_tokens=tokens)
                    tried = _measure(replace(config, policy=given), d, parallel, chosen)
                    if not tried.found and not given.optimizer.streamed and policy.precision.parameters == "model":
                        # Slower, so only if nothing fits otherwise; then no larger micro-batch fits either. FP8
                        # parameters need all master weights on the device.
                        given = replace(given, optimizer=replace(given.optimizer, streamed=True))
                        tried = _measure(replace(config, policy=given), d, parallel, chosen)
                    yield tried
                    if not tried.found:
                        break  # a larger micro-batch takes more memory


def _ways(config: Config, layers: int) -> Iterator[tuple[str, int]]:
    """Yields candidates for `policy.recompute` and `policy.offload_layers`. With long sequences a copy may be faster
    than recomputation."""
    kinds = _kinds(config)
    yield from ((kind, 0) for kind in kinds)
    if length_limit(config.rollout) >= LONG:
        yield from product([kind for kind in kinds if kind in ("none", "selective")], {layers // 2, layers} - {0})


def _kinds(config: Config) -> list[str]:
    """Returns the allowed values of `policy.recompute` (`config/speed_checks.py`, `config/precision.py`)."""
    policy = config.policy
    if any(name.startswith("recompute_") for name in policy.options):
        return ["none"]  # the given options are more specific (`config/megatron_options.py`)
    without = {"moe"} if policy.moe.replay != "off" else set()
    if on_cpu(config) or policy.spec == "local" or policy.precision.recipe == "fp8_delayed":
        without.add("selective")
    return [kind for kind in RECOMPUTE if kind not in without]


def _measure(config: Config, d: Decoder, parallel: ParallelDims, chosen: list[Engine]) -> Tried:
    """Evaluates policy settings with the engines fitting beside the policy."""
    ranks = Ranks(config, d, parallel)
    found = list(pairs(config, ranks, chosen))
    if not found or not _critic_fits(config, d, ranks.size):
        return Tried(parallel, config, [], lacking(config, ranks, chosen))
    seconds = elsewhere(config, d, parallel)
    made = []
    for pair in found:
        residency = replace(config.residency, keep=pair.keep)
        settings = replace(config, rollout=pair.engine.rollout(pair.fraction), residency=residency)
        moving = residency_time(settings, d, parallel) if pair.keep is not None else 0.0
        total = seconds + pair.seconds + moving
        made.append(Suggestion(parallel, settings, ranks.peak(pair.keep), pair.tokens, total))
    return Tried(parallel, config, made, 0)


def _critic_fits(config: Config, d: Decoder, room: int) -> bool:
    """Returns True if there is no critic or it fits."""
    try:
        critic = _critic(config, d)
    except UserError:
        return False
    return critic is None or all(critic_memory(config, d, critic, r).peak <= room for r in stages(critic).values())


def _critic(config: Config, d: Decoder) -> ParallelDims | None:
    """Returns the critic's grid; None without a critic.

    Raises:
        UserError: The critic's layout, by default the policy's, does not match its ranks or the model.
    """
    critic = critic_dims(config)
    if critic:
        megatron.check(d, critic, "critic.layout")
    return critic


def _splits(config: Config, gpus: int) -> list[tuple[int, int]]:
    """Returns pairs of GPU counts for policy and engines: whole nodes, or any eighths within a single node.

    A critic without given ranks gets as many GPUs as the policy.
    """
    trained = 2 if has_critic(config) and config.critic.ranks is None else 1
    if config.cluster.shared:
        return [(gpus // trained, gpus // trained)]
    unit = config.cluster.gpus_per_node if gpus > config.cluster.gpus_per_node else 1
    shares = sorted({round(gpus / unit * k / 8) * unit for k in EIGHTHS})
    return [(ranks, gpus - trained * ranks) for ranks in shares if ranks > 0 and trained * ranks < gpus]


def _layouts(config: Config, d: Decoder, ranks: int) -> Iterator[tuple[ParallelDims, LayoutConfig]]:
    """Yields every layout of the model over `ranks` ranks with tensor parallelism within a node."""
    sizes = _divisors(ranks)
    tensors = [n for n in sizes if n <= config.cluster.gpus_per_node]
    contexts = [n for n in CONTEXT if n == 1 or length_limit(config.rollout) >= LONG]
    spec = layer_spec(config.policy.spec, planned_device(config))
    experts = [n for n in sizes if d.experts and d.experts.count % n == 0] or [1]
    for tensor, pipeline, virtual, context, expert in product(tensors, sizes, (1, 2), contexts, experts):
        ends = _ends(d.layers, pipeline, virtual)
        if ends is None or ranks % (tensor * pipeline * context) or ranks % (pipeline * expert):
            continue
        layout = LayoutConfig(
            tensor=tensor,
            pipeline=pipeline,
            virtual_pipeline=virtual,
            context=context,
            expert=expert,
            first_stage_layers=ends or None,
            last_stage_layers=ends or None,
        )
        try:
            parallel = ParallelDims.from_config(layout, ranks)
            megatron.check(d, parallel)
            fp8_widths.check(d, parallel, config.policy.precision, spec)
            fp8_blocks.check(config, d, parallel)
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
