"""Estimates the duration of an RL step from given rates (`cluster.rates`, `cluster.topology`).

Assumes matrix products at a share of the peak, reads at a share of the memory bandwidth, messages at the full rate of
their link, and sequences at `length_share` of their limits unless other trajectories are given. Nothing overlaps except
generation ahead (`asynchrony`). `planner.run_time` adds evaluations, checkpoints and an error bar.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from skyrl_mega.algorithms.old_logprobs import pass_needed
from skyrl_mega.config.containers import environment_slots
from skyrl_mega.config.derived import (
    CACHE_FILL,
    eager,
    engine_count,
    engine_data,
    engine_ranks,
    fused,
    generates_ahead,
    planned_device,
)
from skyrl_mega.config.drafts import WEIGHTLESS, draft_method, draft_tokens
from skyrl_mega.config.pools import engine_cluster
from skyrl_mega.config.schema import Config
from skyrl_mega.models import huggingface
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.megatron import layer_spec
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import dynamic
from skyrl_mega.planner.activations import kept_layer
from skyrl_mega.planner.batch import StepSizes, batch
from skyrl_mega.planner.buffers import MASTER
from skyrl_mega.planner.decode import reads
from skyrl_mega.planner.drafts import draft_model, without_drafts
from skyrl_mega.planner.flops import BACKWARD, PassWork, flops
from skyrl_mega.planner.memory import (
    critic_dims,
    critic_view,
    engine_memory,
    itemsize,
    kept_in_fp8,
    moments,
    on_cpu,
)
from skyrl_mega.planner.moves import host_rate, residency_time, streaming_rate
from skyrl_mega.planner.parameters import layers, stage
from skyrl_mega.planner.processes import EngineMemory
from skyrl_mega.planner.trajectories import Trajectories, assumed, of_batch, sizes_of
from skyrl_mega.weights.plan.sync_plan import copy_bytes
from skyrl_mega.weights.plan.topology import Links

PASSES = {"none": (3, 2, 2), "selective": (3, 2, 2), "moe": (4, 3, 3), "full": (4, 3, 3)}
"""For each `policy.recompute`, products, messages and launches of a forward and backward pass, as multiples of the
forward pass. The backward pass takes two products per forward product and repeats the messages; recomputation is a
forward pass. `moe` is counted as recomputing the whole layer, too much by attention."""
DENSE_LAUNCHES = 0.77
"""Launches of a layer in a model without experts, as a share of one with experts: operations in the forward pass of
megatron-core's own layers on a CPU, 77 and 100, if all experts are one operation."""
TAIL = 10
"""Factor by which the number of running sequences shrinks while the longest responses end."""
EAGER_LAYER_US = 400.0
"""Minimum microseconds of Python and launches per layer of an engine without CUDA graphs; with graphs
`cluster.rates.engine_layer_us` applies. An estimate: 48 MoE layers then take 20 to 25 ms a token. Reported speed-ups by
graphs: 4.3 times (3B on an H200) and 1.7 times (7B on an A800; vllm-omni #7960)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of each phase of a step."""

    generate: float
    """Seconds of the engines until all answers are complete."""
    logprobs: float
    """Log-prob passes of the policy, and of a reference if any."""
    critic: float
    """A critic's values and optimizer steps; 0 without a critic."""
    train: float
    """Optimizer steps of the policy."""
    sync: float
    """Weight sync."""
    residency: float
    """Transfers between GPU and host memory of parts taking turns on a GPU (`planner.moves`)."""
    ahead: float = 0.0
    """Part of `generate` and `tools` overlapping with the policy's work (`asynchrony`)."""
    tools: float = 0.0
    """Seconds added to `generate` by the environments; 0 if their time is unknown."""
    other: float = 0.0
    """Seconds of the driver besides the phases (`cluster.rates.step_s`)."""

    @property
    def step(self) -> float:
        """Seconds of the whole step: the sum of all phases minus `ahead`, the overlap."""
        return sum(asdict(self).values()) - 2 * self.ahead


@lru_cache(maxsize=16)
def elements(decoder: Decoder) -> int:
    """Returns the number of parameters of the whole model; a tied head is not counted twice."""
    return sum(map(prod, huggingface.tensors(decoder).values()))


@lru_cache(maxsize=16)
def wire_bytes(decoder: Decoder, dtype: str, fp8: bool) -> int:
    """Returns the bytes of the model's weights sent once, in type `dtype` or with `fp8` linear weights in FP8."""
    return copy_bytes(dtype, fp8, huggingface.tensors(decoder), decoder.float32_tensors)


def step_time(
    config: Config,
    decoder: Decoder,
    parallel: ParallelDims,
    sync: float | None = None,
    trajectories: Trajectories | None = None,
) -> StepTime:
    """Estimates the seconds of an RL step by phase. Raises UserError if the estimator of advantages or the files of
    drafts cannot be used, or a critic's layout does not fit its ranks.

    Args:
        config: The settings, with `policy.micro_tokens` decided.
        decoder: The model.
        parallel: The policy's grid.
        sync: Seconds of the planned weight sync; None takes the time of copying the model once into a node.
        trajectories: Lengths and environments, instead of `length_share`; None assumes `length_share` of the limits,
            and environments without time.
    """
    sizes, played = batch(config, parallel), trajectories or assumed(config, parallel)
    if trajectories is not None:
        config, sizes = sizes_of(config, parallel, trajectories)
    share = dynamic.trained(config, played.signal) / config.data.prompts_per_step
    train, forward = (seconds * share for seconds in policy_times(config, decoder, parallel, sizes))
    critic = critic_time(config, decoder) * share
    generate, tools = rollout_times(config, decoder, sizes, played)
    return StepTime(
        generate=generate,
        logprobs=forward,
        critic=critic,
        train=train,
        sync=(_single_copy_time(config, decoder) if sync is None else sync) + config.cluster.rates.sync_s,
        residency=residency_time(config, decoder, parallel),
        ahead=min(generate + tools, forward + critic + train) if generates_ahead(config.asynchrony) else 0.0,
        tools=tools,
        other=config.cluster.rates.step_s,
    )


def time_without_generation(config: Config, decoder: Decoder, parallel: ParallelDims) -> float:
    """Estimates a step's seconds for policy, critic, weight sync and driver, by `cluster.rates.length_share`.
    `parallel` is the policy's grid. Raises UserError if the advantage estimator cannot be found, or the critic's layout
    does not fit its ranks, and ValueError if `policy.micro_tokens` is not decided."""
    share = dynamic.trained(config) / config.data.prompts_per_step
    return (
        sum(policy_times(config, decoder, parallel, batch(config, parallel))) * share
        + critic_time(config, decoder) * share
        + _single_copy_time(config, decoder)
        + config.cluster.rates.sync_s
        + config.cluster.rates.step_s
    )


def _single_copy_time(config: Config, decoder: Decoder) -> float:
    """Returns the seconds of a sync limited by a single copy of the model into a node."""
    kinds = [Links.from_config(cluster) for cluster in (config.cluster, engine_cluster(config))]
    copied = wire_bytes(decoder, config.model.dtype, config.weights.wire == "fp8")
    return copied / (min(links.nics_per_node * links.nic_gb_s for links in kinds) * 1e9)


def critic_time(config: Config, decoder: Decoder) -> float:
    """Estimates the seconds of a critic's values and optimizer steps in a step; 0 without a critic. Raises UserError if
    the critic's layout does not fit its ranks, and ValueError if its micro-batch tokens are not decided."""
    parallel, view = critic_dims(config), critic_view(config)
    if parallel is None:
        return 0.0
    train, forward = _pass_times(view, decoder.critic, parallel, batch(view, parallel))
    return forward + config.critic.epochs * train


def generate_time(config: Config, decoder: Decoder, sizes: StepSizes) -> float:
    """Estimates the seconds of engines until all trajectories of a step are complete, with lengths from
    `cluster.rates.length_share`, and environments that take no time. `sizes` are the sizes of a step (`batch.batch`).
    Raises UserError if the files of drafts are unusable."""
    return rollout_times(config, decoder, sizes, of_batch(config, sizes))[0]


def rollout_times(
    config: Config, decoder: Decoder, sizes: StepSizes, trajectories: Trajectories, prompts: Sequence[int] | None = None
) -> tuple[float, float]:
    """Estimates the seconds of engines until all trajectories of a step are complete, and the seconds added by
    environments. Raises UserError if the files of drafts are unusable.

    Greedy answers take a round of their own; dynamic sampling takes several rounds. With `asynchrony.mode=full`, groups
    are generated all the time and no step waits for the longest response.

    Args:
        config: The settings, with the mean length of the trajectories.
        decoder: The model.
        sizes: Sizes of the step.
        trajectories: Lengths and environments.
        prompts: Number of prompts of each round; None takes the rounds of dynamic sampling.

    Returns:
        Seconds of the engines over all rounds, and the seconds to add to them for environments.
    """
    batches = (replace(sizes, prompts=n) for n in prompts or dynamic.rounds(config, trajectories.signal))
    times = [
        _round_times(config, decoder, step, count, trajectories)
        for step in batches
        for count in (step.sequences, step.prompts if sizes.greedy else 0)
        if count
    ]
    return sum(engines for engines, _ in times), sum(tools for _, tools in times)


def _round_times(
    config: Config, decoder: Decoder, sizes: StepSizes, sequences: int, trajectories: Trajectories
) -> tuple[float, float]:
    """Returns the seconds of the engines until the last response ends, and the seconds that environments add.

    Full batches follow each other, while other sequences wait for a place in the KV cache; then a tail of the longest
    responses follows. Environments add the waiting of the slowest trajectory, or more if calls, at most
    `environment.workers` at once, take longer than everything else, or if trajectories take turns in
    `environment.slots`.
    """
    per_engine = -(-sequences // engine_count(config))
    full: float = min(mean_concurrency(config, engine_memory(config, decoder), sizes), per_engine)
    slots = environment_slots(config.environment)
    if slots is not None:
        full = min(full, slots / engine_count(config))
    prompt = max(0.0, sizes.mean - sizes.generated)
    prefill = per_engine * prompt * prefill_time(config, decoder, prompt)
    continuous = generates_ahead(config.asynchrony) and config.asynchrony.mode == "full"
    longest = sizes.generated if continuous else trajectories.longest
    decode = decoding(config, decoder, sizes.mean)
    running = max(1.0, full)  # with fewer slots than engines some engines are idle
    tail = decode(running / TAIL)
    engines = (
        prefill
        + per_engine * sizes.generated / full * decode(running)
        + (longest - sizes.generated) * tail
        + sequences * config.cluster.rates.trajectory_us * 1e-6
    )
    seconds, workers = trajectories.environment_s, config.environment.workers
    calls = sequences * seconds / min(workers, slots or workers)
    held = sequences * (sizes.generated * decode(running) + seconds) / slots if slots and seconds else 0.0
    return engines, max(0.0 if continuous else trajectories.waiting(tail), calls - engines, held - engines)


def prefill_time(config: Config, decoder: Decoder, tokens: float) -> float:
    """Estimates the seconds of an engine for prefilling one token of a prompt, for prompts of `tokens` tokens."""
    rates, work = engine_cluster(config).rates, flops(decoder)
    speed = engine_ranks(config.rollout) * rates.tflops * 1e12 * rates.tflops_share
    return (work.matrices + work.attending(tokens) / max(tokens, 1)) / speed


def decoding(config: Config, decoder: Decoder, mean: float) -> Callable[[float], float]:
    """Returns a function: number of sequences running on an engine → estimated seconds in which every sequence gets a
    token. The sequences are `mean` tokens long, prompt included. With draft tokens a step takes longer, and gives
    `rollout.drafts.acceptance` of its draft tokens in addition to one token. Raises UserError if the config.json of a
    draft model or head cannot be used."""
    rollout, rates = config.rollout, engine_cluster(config).rates
    launches = eager(rollout, config.cluster.device) and config.cluster.device != "cpu"  # a CPU's rates are measured
    layer_us = max(EAGER_LAYER_US, rates.engine_layer_us) if launches else rates.engine_layer_us
    workers = engine_ranks(rollout)
    work, speed = flops(decoder), rates.tflops * 1e12 * rates.tflops_share
    bandwidth = rates.memory_gb_s * 1e9 * rates.memory_share
    reading = reads(config, decoder)

    def step(running: float, tokens: float) -> float:
        """Returns the seconds of a step of `running` sequences with `tokens` tokens each."""
        computed = running * tokens
        of_sequence = mean * reading.per_token + reading.per_sequence + (tokens - 1) * reading.per_draft
        read = reading.weights(computed) + running / (workers / rollout.tensor) * of_sequence
        compute = computed * (work.matrices + work.decoding_at(mean)) / workers / speed
        return max(read / bandwidth, compute) + (decoder.layers * layer_us + rates.engine_step_us) * 1e-6

    drafts, accepted = draft_tokens(rollout), rollout.drafts.acceptance * draft_tokens(rollout)
    model = draft_model(config, decoder)
    propose = decoding(without_drafts(config), model, mean) if model else lambda running: 0.0
    may_stop = rollout.drafts.adaptive and draft_method(rollout) in WEIGHTLESS

    def decode(running: float) -> float:
        plain = step(running, 1)
        if not drafts:
            return plain
        drafted = (step(running, 1 + drafts) + drafts * propose(running)) / (1 + accepted)
        return min(plain, drafted) if may_stop else drafted

    return decode


def mean_concurrency(config: Config, memory: EngineMemory, sizes: StepSizes) -> int:
    """Estimates the mean number of sequences running on one engine at once in a step; at least 1.

    Args:
        config: The settings.
        memory: Memory of a worker; each data-parallel replica of the engine has a cache of its own.
        sizes: Sizes of the step.
    """
    rollout = config.rollout
    data = engine_data(rollout)
    per_engine = -(-sizes.sequences // engine_count(config))
    longest = sizes.mean - sizes.generated / rollout.max_turns + rollout.sampling.max_tokens  # tokens of one request
    fitting = min(memory.sequences(sizes.mean), CACHE_FILL * memory.sequences(longest))
    return max(1, min(rollout.concurrency, per_engine, int(data * fitting)))


def policy_times(config: Config, decoder: Decoder, parallel: ParallelDims, sizes: StepSizes) -> tuple[float, float]:
    """Estimates the policy's seconds in a step: (all optimizer steps, all log-prob passes, a reference's included; 0 if
    the settings need none). `parallel` is the policy's grid, `sizes` are the sizes of a step (`batch.batch`). Raises
    UserError if the estimator of advantages cannot be found."""
    size = itemsize(config)
    train, forward = _pass_times(config, decoder, parallel, sizes)
    train *= sizes.epochs
    logprobs = forward if pass_needed(config.algorithm, sizes.updates) else 0.0
    if config.algorithm.kl.coefficient:
        separate = config.reference.layout is not None
        weights = 0 if separate else sum(chunk.total for chunk in stage(decoder, parallel, 0)) * size
        # Reference and policy weights are swapped through host memory, and back again (`megatron.reference`).
        logprobs += forward + 4 * weights / host_rate(config)
    return train, logprobs


def mfu(config: Config, decoder: Decoder, parallel: ParallelDims, sizes: StepSizes) -> float:
    """Estimates the model FLOPs utilisation (0 to 1) of the train phase: operations without recomputation, over the
    peak `cluster.rates.tflops` of all policy ranks. `parallel` is the policy's grid, `sizes` are the sizes of a step
    (`batch.batch`). Raises UserError if the advantage estimator cannot be found."""
    sequence = PassWork.of([sizes.mean], sizes.generated) + PassWork.of([sizes.shared.left_out], 0) * -1
    load = sequence * (sizes.sequences * sizes.epochs * BACKWARD)
    train, _ = policy_times(config, decoder, parallel, sizes)
    return flops(decoder).forward(load) / (train * parallel.ranks * config.cluster.rates.tflops * 1e12)


def _pass_times(config: Config, decoder: Decoder, parallel: ParallelDims, sizes: StepSizes) -> tuple[float, float]:
    """Returns the seconds of an optimizer step on each mini-batch, and of a forward pass over all sequences."""
    rates, size = config.cluster.rates, itemsize(config)
    speed = rates.tflops * 1e12 * rates.tflops_share
    work = flops(decoder)
    own = sizes.mean - sizes.shared.left_out
    tokens = sizes.sequences * own
    count = sizes.usual * sizes.mini_batches
    per_rank = (tokens / parallel.data + count * sizes.padding) / parallel.context
    # All stages wait for the slowest; of equal stages the last one, because of the head.
    body = work.layers + (work.attending(sizes.mean) - work.attending(sizes.shared.left_out)) / own
    head = work.head * sizes.generated / own  # only for the loss's tokens
    stage_sizes = parallel.stage_sizes(decoder.layers)
    slowest = max(
        body * n / decoder.layers + (head if s == parallel.pipeline - 1 else 0) for s, n in enumerate(stage_sizes)
    )
    compute = per_rank * slowest / parallel.tensor / speed
    layers = max(stage_sizes)
    messages = per_rank * layers * _message_time(decoder, parallel, Links.from_config(config.cluster), size)
    launches = count * layers * rates.layer_us * 1e-6 * (1.0 if decoder.experts else DENSE_LAUNCHES)
    # In a layer with experts the host waits for the GPU, and a CPU computes what it launches.
    together = operator.add if decoder.experts or on_cpu(config) else max
    bubble = 1 + (parallel.pipeline - 1) / (sizes.usual * parallel.virtual_pipeline)
    forward = together(compute + messages, launches) * bubble
    passes = PASSES[config.policy.recompute]
    train = bubble * together(passes[0] * compute + passes[1] * messages, passes[2] * launches)
    layers_per_second = count * layers * bubble / forward  # forward passes of layers per second
    train += (
        bubble
        * count
        * _offload_wait(
            config,
            decoder,
            parallel,
            per_rank / count,
            (1 / layers_per_second, (train / forward - 1) / layers_per_second),
        )
    )
    train += sizes.mini_batches * _update_time(config, decoder, parallel)
    if config.policy.moe.aux_loss and decoder.experts:
        train += forward  # a first pass counts the experts' loads (`megatron.expert_balance`)
    return train, forward


def _offload_wait(
    config: Config, decoder: Decoder, parallel: ParallelDims, tokens: float, layer: tuple[float, float]
) -> float:
    """Returns how many seconds of a micro-batch a stage waits for offloaded activations.

    Each copy overlaps with the layers up to the next offloaded layer.

    Args:
        config: The settings.
        decoder: The model.
        parallel: The grid.
        tokens: Tokens of the micro-batch on each rank.
        layer: Seconds of a layer's forward and backward pass.
    """
    policy = config.policy
    if not policy.offload_layers:
        return 0.0
    spec = layer_spec(policy.spec, planned_device(config))
    experts = decoder.experts is not None
    how: dict[str, Any] = dict(recompute=policy.recompute, spec=spec, fused=fused(policy, spec, experts))
    kept = kept_layer(decoder, parallel, 0, tokens, itemsize(config), **how)
    copy, layers = kept / host_rate(config), max(parallel.stage_sizes(decoder.layers))
    moved = min(policy.offload_layers, layers)
    return sum(max(0.0, moved * copy - layers * seconds) for seconds in layer)


def context_bytes(decoder: Decoder, parallel: ParallelDims, size: int) -> float:
    """Returns the bytes of context parallelism per token of a rank that the rank receives in the forward pass of a mean
    layer. `size` is the bytes of an element."""
    elements = sum(count * block.messages(parallel).context for kind, count in decoder.layer_counts() for block in kind)
    return elements / decoder.layers * size * (parallel.context - 1)


def _message_time(decoder: Decoder, parallel: ParallelDims, links: Links, size: int) -> float:
    """Returns the seconds of tensor, context and expert parallel messages per token in the forward pass of a mean
    layer."""
    t, c, e = parallel.tensor, parallel.context, parallel.expert
    messages = [
        (count / decoder.layers, block.messages(parallel)) for kind, count in decoder.layer_counts() for block in kind
    ]
    seconds = 0.0
    if t > 1:
        # A gather and a reduce-scatter around each block of linear layers.
        gathered = sum(share * message.tensor for share, message in messages)
        seconds += 2 * gathered * size * (t - 1) / t / _group_rate(links, t, t)
    if c > 1:
        seconds += context_bytes(decoder, parallel, size) / _group_rate(links, t * c, c)
    routed = sum(share * message.experts for share, message in messages)
    if e > 1:
        out = routed / t * size * (e - 1) / e
        seconds += 2 * out / _group_rate(links, e * parallel.expert_tensor, e)
    if parallel.expert_tensor > 1:
        seconds += 2 * routed * size / _group_rate(links, parallel.expert_tensor, parallel.expert_tensor)
    return seconds


def _group_rate(links: Links, span: int, size: int) -> float:
    """Returns the bytes per second of a GPU in a group of `size` ranks spanning `span` neighbouring ranks."""
    nic = links.nic_gb_s * links.nics_per_node / links.gpus_per_node
    if span <= links.gpus_per_node:
        return links.fabric_gb_s * 1e9
    near = max(1, size * links.gpus_per_node // span)
    outside = (size - near) / max(1, size - 1)
    return 1e9 / max(outside / nic, (1 - outside) / links.fabric_gb_s)


def _update_time(config: Config, decoder: Decoder, parallel: ParallelDims) -> float:
    """Returns the seconds of an optimizer step.

    Gradients are summed, moments and weights are read and written, and weights are gathered. A streamed optimizer also
    copies moments and master weights from the host and back, both at once.
    """
    links, size = Links.from_config(config.cluster), itemsize(config)
    state, streamed = moments(config), config.policy.optimizer.streamed
    seconds = 0.0
    chunks = stage(decoder, parallel, 0)
    total = sum(chunk.total for chunk in chunks)
    experts = sum(int(chunk.numel[chunk.expert].sum()) for chunk in chunks) if parallel.expert > 1 else 0
    fp8_total = kept_in_fp8(config, decoder, parallel, 0)
    fp8_experts = experts * fp8_total // sum(layers(decoder, parallel, 0).values())
    parts = (
        (total - experts, fp8_total - fp8_experts, parallel.data * parallel.context),
        (experts, fp8_experts, parallel.expert_data),
    )
    for numel, fp8, ranks in parts:
        stride = parallel.ranks // parallel.pipeline
        if ranks > 1:
            seconds += (numel * (4 + size) - fp8 * (size - 1)) * (ranks - 1) / ranks / _group_rate(links, stride, ranks)
        # Reads and writes masters and moments, reads gradients, writes weights.
        seconds += numel / ranks * (2 * (MASTER + state) + 4 + 2) / (config.cluster.rates.memory_gb_s * 1e9)
        if streamed:
            seconds += numel / ranks * (state + MASTER * (size == 2)) / streaming_rate(config)
    return seconds
