"""Memory of every process by kind: policy ranks, ranks of a separate reference, critic ranks, engine workers.

Weights, gradients, optimizer state and weight-sync buckets are counted from the shapes of tensors. Activations, logits,
an engine's working memory and the reserve are estimated; `processes.MARGIN` is their assumed error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

from skyrl_mega.common import limits
from skyrl_mega.common.limits import ENGINE_STEP_TOKENS, OPTIMIZER_PIECE, OPTIMIZER_PIECES, SYNC_BUCKETS
from skyrl_mega.config import allocator
from skyrl_mega.config.derived import (
    critic_layout,
    critic_model,
    critic_ranks,
    eager,
    fused,
    has_critic,
    length_limit,
    logit_chunk,
    overlaps,
    planned_device,
    replica_concurrency,
)
from skyrl_mega.config.drafts import draft_tokens
from skyrl_mega.config.pools import engine_view
from skyrl_mega.config.schema import Config
from skyrl_mega.models.blocks.base import EngineCut
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.megatron import layer_spec
from skyrl_mega.parallel.dims import ParallelDims, RankCoords
from skyrl_mega.planner.activations import BATCH_BYTES, Activations, activations
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.buffers import MASTER, MOMENTS, ModelState, StageBuffers, rank_state, stage_buffers
from skyrl_mega.planner.drafts import draft_bytes
from skyrl_mega.planner.engine_weights import (
    cache_itemsize,
    engine_bytes,
    kv_bytes_per_token,
    prompt_bytes,
    sequence_bytes,
    staged_bytes,
)
from skyrl_mega.planner.parameters import Parameters, layers, stage
from skyrl_mega.planner.processes import EngineMemory, PolicyMemory
from skyrl_mega.planner.routes import rank_bytes

GIB = 2**30
SWAP = 64 * 2**20
"""Bytes of the buffer through which reference weights and policy weights are swapped (`megatron.reference.PIECE`)."""
GAPS = {True: 1 * GIB, False: 4 * GIB}
"""Bytes that torch's allocator holds but cannot use in a policy process, by whether segments expand
(`config.allocator`). Not measured yet. Fixed segments: reports of training on rows of varying length show 2 to 6 GiB.
Expandable segments: pages of 2 and 20 MiB at the ends of the used ranges, on every stream."""
OUTSIDE_BUDGET = int(1.3 * GIB)
"""Bytes of an engine worker outside its budget: CUDA context and NCCL. vLLM 0.32 measures free memory only after both
exist (v1/worker/gpu_worker.py, "take memory snapshot after NCCL is initialized"). Not measured yet."""
LIBRARIES = GIB // 2
"""Bytes of an engine worker's budget taken by libraries: workspaces, kernels loaded late, gaps of the allocator. Not
measured yet."""
GRAPHS = 2 * GIB
"""Bytes of an engine worker's budget taken by CUDA graphs; vLLM 0.32 sets them aside (`profile_cudagraph_memory`).
Users report 1 to 2 GiB; an eager engine needs none."""
DEFAULT_GPU_GIB = 79.1
"""GiB reported by CUDA for an H100 of 80 GB (`get_device_properties(0).total_memory`)."""


def itemsize(config: Config) -> int:
    """Returns the bytes of an element in `model.dtype`."""
    return limits.itemsize(config.model.dtype)


def gpu_bytes(config: Config) -> int:
    """Returns the memory of a policy rank's GPU in bytes: `cluster.gpu_memory_gib`, by default an H100's 79.1 GiB. For
    an engine's GPU give `pools.engine_view(config)`."""
    return int((config.cluster.gpu_memory_gib or DEFAULT_GPU_GIB) * GIB)


def on_cpu(config: Config) -> bool:
    """Returns True if `cluster.device` is cpu, so that processes compute in host memory; `auto` is planned as CUDA."""
    return config.cluster.device == "cpu"


def overlapped(config: Config) -> bool:
    """Returns True if the policy's communication overlaps with compute (`policy.overlap`)."""
    return overlaps(config.policy, planned_device(config))


def policy_memory(config: Config, decoder: Decoder, parallel: ParallelDims, rank: int) -> PolicyMemory:
    """Estimates the GPU memory (on a CPU the host memory) of policy rank `rank` by kind. `parallel` is the policy's
    grid, and `rank` counts in it from 0. Raises ValueError if the grid has no such rank, its stages cannot divide the
    layers, or `policy.micro_tokens` is not decided."""
    size = itemsize(config)
    state, pp = policy_state(config, decoder, parallel, rank), parallel.coordinates(rank).pp
    activation_bytes = _activations(config, decoder, parallel, pp)
    streamed = state.optimizer if config.policy.optimizer.streamed else 0
    if streamed:
        state = replace(
            state, optimizer=_streamed_bytes(state, activation_bytes, MASTER * (size == 2), moments(config))
        )
    copied = bool(config.algorithm.kl.coefficient) and config.reference.layout is None
    return PolicyMemory(
        state=state,
        activations=activation_bytes,
        reference=min(SWAP, _elements(stage(decoder, parallel, pp)) * size) if copied else 0,
        sync=int(SYNC_BUCKETS * config.weights.bucket_mib * 2**20),
        reserve=_reserve(config),
        gaps=_gaps(config),
        keep=_keep(config),
        streamed=streamed,
    )


def policy_state(config: Config, decoder: Decoder, parallel: ParallelDims, rank: int) -> ModelState:
    """Returns the bytes of weights, gradients and optimizer state of policy rank `rank`. A streamed optimizer is
    counted as if all its state were on the device. Raises ValueError if the grid `parallel` has no such rank, or its
    stages cannot divide the layers."""
    return model_state(
        decoder,
        parallel,
        parallel.coordinates(rank),
        itemsize(config),
        config.policy.moe.freeze_router,
        overlap=overlapped(config),
        moments=moments(config),
    )


def moments(config: Config) -> int:
    """Returns the bytes of Adam's two moments together per trained element of the policy."""
    return MOMENTS[config.policy.optimizer.moments]


def _streamed_bytes(state: ModelState, activation_bytes: Activations, master: int, moments: int) -> int:
    """Returns the bytes of a streamed optimizer on the device: the pieces of a step, or all master weights when they
    are created, if that is larger.

    Activations do not exist yet when master weights are created, so their memory is subtracted.
    """
    pieces = min(state.optimizer, OPTIMIZER_PIECES * max(OPTIMIZER_PIECE, state.largest))
    masters = state.optimizer * master // (master + moments)
    return max(pieces, masters - activation_bytes.train - activation_bytes.train_logits)


def reference_memory(config: Config, decoder: Decoder, parallel: ParallelDims, rank: int) -> PolicyMemory:
    """Estimates the memory of rank `rank` of a reference with a separate layout: weights and log-prob passes.
    `parallel` is the reference's grid. Raises ValueError if the grid has no such rank, its stages cannot divide the
    layers, or `policy.micro_tokens` is not decided."""
    coords = parallel.coordinates(rank)
    forward = replace(_activations(config, decoder, parallel, coords.pp), train=0, train_logits=0, host=0)
    weights = _elements(stage(decoder, parallel, coords.pp)) * itemsize(config)
    return PolicyMemory(ModelState(weights, 0, 0), forward, 0, 0, _reserve(config), _gaps(config), role="reference")


def critic_view(config: Config) -> Config:
    """Returns settings with the critic's model and layout as the policy's, without a reference: for estimating a critic
    by the formulas of a policy. To be used with `decoder.critic`, the model with the critic's head."""
    kl = replace(config.algorithm.kl, coefficient=0.0)
    return replace(config, policy=critic_model(config), algorithm=replace(config.algorithm, kl=kl))


def critic_dims(config: Config) -> ParallelDims | None:
    """Returns the critic's grid; None without a critic.

    Raises:
        UserError: The sizes of the critic's layout do not fit its ranks.
    """
    if not has_critic(config):
        return None
    return ParallelDims.from_config(critic_layout(config), critic_ranks(config), key="critic.layout")


def critic_memory(config: Config, decoder: Decoder, parallel: ParallelDims, rank: int) -> PolicyMemory:
    """Estimates the memory of critic rank `rank`: a policy rank's memory without logits, reference and sync buckets.

    Args:
        config: The settings.
        decoder: The model with the policy's head.
        parallel: The critic's grid.
        rank: Rank in the critic's grid.

    Raises:
        ValueError: The grid has no such rank, its stages cannot divide the layers, or `policy.micro_tokens` is not
            decided.
    """
    return replace(policy_memory(critic_view(config), decoder.critic, parallel, rank), sync=0, role="critic")


def engine_memory(config: Config, decoder: Decoder, worker: int = 0) -> EngineMemory:
    """Estimates the memory of worker `worker`, counted within the engine, by kind: of a GPU, or of the host on a CPU. A
    KV cache without space is not an error: `tokens` is then 0.

    Raises:
        UserError: The files of a draft model or head (`rollout.drafts`) cannot be used.
    """
    rollout, size = config.rollout, itemsize(config)
    draft_weights, draft_cache = draft_bytes(config, decoder)
    weights = engine_bytes(config, decoder, worker) + draft_weights
    prefill = max(length_limit(rollout), ENGINE_STEP_TOKENS)
    cut = EngineCut.of(rollout)
    width = 4 * decoder.hidden + max(sum(block.engine_width(cut) for block in kind) for kind in decoder.kinds)
    working = prefill * width * size + sampling_bytes(config, decoder)
    make = partial(
        EngineMemory,
        weights=weights,
        working=int(working),
        sync=int(SYNC_BUCKETS * config.weights.bucket_mib * 2**20),
        staged=staged_bytes(config, decoder),
        per_token=kv_bytes_per_token(decoder, rollout.tensor, cache_itemsize(config)) + draft_cache,
        longest=length_limit(rollout),
        per_sequence=sequence_bytes(config, decoder),
        per_prompt=prompt_bytes(config, decoder),
        keep=_keep(config),
    )
    if on_cpu(config):
        kv = int(rollout.kv_cache_gib * GIB)
        return make(reserve=0, budget=weights + int(working) + kv, beside=0, cpu_kv_cache=kv)
    reserve = LIBRARIES + (0 if eager(rollout, config.cluster.device) else GRAPHS)
    return make(
        reserve=reserve, budget=int(rollout.memory_fraction * gpu_bytes(engine_view(config))), beside=OUTSIDE_BUDGET
    )


def sampling_bytes(config: Config, decoder: Decoder) -> int:
    """Estimates the bytes for sampling a token of every concurrent sequence of a replica, and for checking its draft
    tokens: logits in `model.dtype` and in float32, sorted values and indices."""
    tokens = replica_concurrency(config.rollout) * (1 + draft_tokens(config.rollout))
    return tokens * decoder.vocab * (itemsize(config) + 4 + 4 + 8 + 4)


def _activations(config: Config, decoder: Decoder, parallel: ParallelDims, pp: int) -> Activations:
    spec = layer_spec(config.policy.spec, planned_device(config))
    experts = decoder.experts is not None
    peak = activations(
        decoder,
        parallel,
        pp,
        batch(config, parallel).row,
        itemsize(config),
        recompute=config.policy.recompute,
        offload_layers=config.policy.offload_layers,
        logit_chunk=logit_chunk(config.policy, planned_device(config)),
        token_bytes=BATCH_BYTES + rank_bytes(config, decoder, parallel),
        spec=spec,
        fused=fused(config.policy, spec, experts),
    )
    forward, train = fp8_copies(config, decoder, parallel, pp)
    return replace(peak, forward=peak.forward + forward, train=peak.train + train)


def rounded(config: Config, decoder: Decoder, parallel: ParallelDims, pp: int) -> int:
    """Returns the number of weights of a policy rank of pipeline stage `pp` in layers computed in FP8; 0 without FP8.
    Includes norms and routers (small, and not rounded). `parallel` is the policy's grid."""
    precision = config.policy.precision
    fp8 = range(precision.first_layers, decoder.layers - precision.last_layers) if precision.recipe != "model" else ()
    return sum(size for layer, size in layers(decoder, parallel, pp).items() if layer in fp8)


def kept_in_fp8(config: Config, decoder: Decoder, parallel: ParallelDims, pp: int) -> int:
    """Returns the number of weights of a policy rank of pipeline stage `pp` stored in FP8; 0 unless
    `policy.precision.parameters` is fp8. `parallel` is the policy's grid."""
    return rounded(config, decoder, parallel, pp) if config.policy.precision.parameters == "fp8" else 0


def fp8_copies(config: Config, decoder: Decoder, parallel: ParallelDims, pp: int) -> tuple[int, int]:
    """Returns the bytes of FP8 copies of weights on a policy rank of pipeline stage `pp`: (in a forward pass alone, in
    a pass with backward); zeros without FP8, and with FP8 parameters.

    Transformer Engine keeps a byte per weight for products with activations, and a byte for products with gradients. On
    a CPU the rounded weights are in `model.dtype`; `mxfp8` always needs both copies there.
    """
    recipe = config.policy.precision.recipe
    if recipe == "model" or config.policy.precision.parameters == "fp8":
        return 0, 0  # FP8 parameters serve as both copies, in as many bytes as bfloat16
    weights = rounded(config, decoder, parallel, pp)
    if on_cpu(config):
        return (weights * itemsize(config) * (1 + (recipe == "mxfp8")),) * 2
    return weights, 2 * weights


@lru_cache(maxsize=4096)
def model_state(
    decoder: Decoder,
    parallel: ParallelDims,
    at: RankCoords,
    itemsize: int,
    freeze_router: bool = False,
    *,
    overlap: bool = False,
    moments: int = MOMENTS["float32"],
) -> ModelState:
    """Returns the bytes that the rank at `at` allocates for parameters, gradients and its share of the optimizer state.
    Raises ValueError if the layers cannot be divided over the pipeline stages.

    Args:
        decoder: The model.
        parallel: The grid of ranks.
        at: Coordinates of the rank in the grid.
        itemsize: Bytes of a parameter element: 2 or 4. With 2, the optimizer state includes float32 master weights.
        freeze_router: True if routers are not trained: they have no gradients and optimizer state.
        overlap: True if communication overlaps with compute, which adds padding.
        moments: Bytes of Adam's two moments per element, a value of `MOMENTS`.
    """
    return rank_state(_stage_buffers(decoder, parallel, at.pp, freeze_router, overlap), parallel, at, itemsize, moments)


@lru_cache(maxsize=256)
def _stage_buffers(
    decoder: Decoder, parallel: ParallelDims, pp: int, freeze_router: bool, overlap: bool
) -> StageBuffers:
    return stage_buffers(stage(decoder, parallel, pp), parallel, pp, freeze_router, overlap=overlap)


def _reserve(config: Config) -> int:
    return 0 if on_cpu(config) else int(config.cluster.gpu_reserve_gib * GIB)


def _gaps(config: Config) -> int:
    return 0 if on_cpu(config) else GAPS[allocator.expandable(os.environ)]


def _keep(config: Config) -> tuple[str, ...] | None:
    return None if config.residency.keep is None else tuple(config.residency.keep)


def _elements(chunks: Sequence[Parameters]) -> int:
    """Returns the number of elements without buffer padding."""
    return sum(chunk.total for chunk in chunks)
