"""Host memory of a node, and files on disk. Estimated, except the copies of weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from skyrl_mega.cluster.run_placement import RunPlacement, plan_placement
from skyrl_mega.config.derived import engine_ranks, generates_ahead, has_critic, length_limit, on_driver_node
from skyrl_mega.config.sandboxes import sandboxes_mib
from skyrl_mega.config.schema import ClusterConfig, Config
from skyrl_mega.models import huggingface
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.activations import BATCH_BYTES
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.buffers import FLOAT32, MASTER
from skyrl_mega.planner.checkpoint import INDEX, STAGING, checkpoint_bytes
from skyrl_mega.planner.memory import (
    GIB,
    critic_dims,
    critic_memory,
    critic_view,
    engine_memory,
    itemsize,
    kept_in_fp8,
    moments,
    on_cpu,
    overlapped,
    policy_memory,
    reference_memory,
)
from skyrl_mega.planner.parameters import stage
from skyrl_mega.planner.placement import PlannedNode
from skyrl_mega.planner.processes import PHASES, PolicyMemory
from skyrl_mega.planner.routes import driver_bytes
from skyrl_mega.planner.times import elements, wire_bytes
from skyrl_mega.weights.members import FILES

PROCESS = {"cuda": 4 * GIB, "cpu": 1 * GIB}
"""Bytes of a Python process with torch and Megatron or vLLM, without any weight."""
ROLLOUT_WORKER = 1 * GIB
"""Bytes of a rollout worker (`environment.processes`) with a tokenizer, without any environment."""
DRIVER = 4 * GIB
"""Bytes of the driver with a tokenizer, and of Ray's processes."""
QUEUE = 10 * 16 * 2**20
"""Bytes of vLLM's queue in /dev/shm between an engine and a worker, per direction: 10 messages of 16 MiB."""
NCCL = 64 * 2**20
"""Bytes in /dev/shm used by NCCL per process."""


@dataclass(frozen=True)
class NodeMemory:
    """Host memory of a node in bytes."""

    processes: int
    """Interpreters and libraries."""
    device: int
    """Memory of ranks and engine workers computing on a CPU; 0 with GPUs."""
    reference: int
    """Pinned memory for the frozen reference weights, or for the policy's weights while the reference is on the GPU.
    Counted."""
    parked: int
    """Pinned memory of policy and critic for parts offloaded between phases (`residency.keep`) and streamed optimizers,
    counted; and for offloaded activations (`policy.offload_layers`), estimated."""
    checkpoint: int
    """Staging buffers and index of policy and critic ranks while a checkpoint is written or read."""
    batch: int
    """Tokens and fields of an RL step in Ray's object store, and of the steps generated ahead."""
    weight_files: int
    """Bytes of published weights kept by policy ranks, and of fetched weights kept by engine workers
    (`weights.transport=files`)."""
    shm: int
    """Memory in /dev/shm besides the object store."""
    sandboxes: int
    """Maximum memory of sandboxed programs, disks included: on the driver's node, or on every node with rollout
    workers."""

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return sum(vars(self).values())


def host_memory(
    config: Config,
    decoder: Decoder,
    parallel: ParallelDims,
    reference: ParallelDims | None,
    node: PlannedNode,
    first: bool,
) -> NodeMemory:
    """Estimates the bytes of host memory needed by a run on a node, by kind.

    Args:
        config: The settings, with `policy.micro_tokens` decided.
        decoder: The model.
        parallel: The policy's grid.
        reference: Grid of a reference with a separate layout; None without such a reference.
        node: Ranks and engine workers of the node.
        first: True for the driver's node.

    Raises:
        UserError: A critic's layout does not fit its ranks, or on a CPU the files of a draft model or head
            (`rollout.drafts`) cannot be used.
    """
    cpu = on_cpu(config)
    streamed = config.policy.optimizer.streamed or config.critic.optimizer.streamed
    offloads = streamed or config.residency.keep is not None or config.policy.offload_layers > 0
    ranks = _rank_memories(config, decoder, parallel, reference, node) if cpu or offloads else []
    workers = (
        [engine_memory(config, decoder, w) for of_engine in node.engines.values() for w in of_engine] if cpu else []
    )
    sizes = batch(config, parallel)
    trained = len(node.policy) + len(node.critic)
    processes = trained + len(node.reference) + node.workers + len(node.engines)
    multi = engine_ranks(config.rollout) > 1 or not cpu
    rollout_workers = _rollout_workers(config, first)
    return NodeMemory(
        processes=processes * PROCESS["cpu" if cpu else "cuda"]
        + (DRIVER if first else 0)
        + rollout_workers * ROLLOUT_WORKER,
        device=_peak_sum([p.totals for p in ranks] + [w.totals for w in workers]) + sum(w.sync for w in workers)
        if cpu
        else 0,
        reference=sum(pinned_reference(config, decoder, parallel, rank) for rank in node.policy),
        parked=sum(p.pinned for p in ranks),
        checkpoint=trained * (STAGING + INDEX) if config.checkpoint.every else 0,
        batch=int((sizes.sequences + sizes.greedy) * sizes.longest * _driver_token_bytes(config, decoder))
        * (1 + _steps_ahead(config))
        if first
        else 0,
        weight_files=_weight_files(config, decoder, parallel, node),
        sandboxes=int(sandboxes_mib(config) * 2**20)
        if rollout_workers or (first and not config.environment.processes)
        else 0,
        shm=(node.workers + len(node.engines)) * QUEUE * multi + (0 if cpu else processes * NCCL),
    )


def _weight_files(config: Config, decoder: Decoder, parallel: ParallelDims, node: PlannedNode) -> int:
    """Returns the bytes of weights kept on a node for a sync by files."""
    if config.weights.transport != FILES:
        return 0
    copy, kept = wire_bytes(decoder, config.model.dtype, config.weights.wire == "fp8"), node.workers
    published = len(node.policy) / parallel.ranks if config.weights.files.full_every > 1 else 0
    return int(copy * (published + kept / engine_ranks(config.rollout)))


def _rollout_workers(config: Config, first: bool) -> int:
    """Returns the number of rollout workers on a node."""
    many = config.environment.processes
    if on_driver_node(config.environment):
        return many if first else 0
    return -(-many // config.cluster.nodes)


def _driver_token_bytes(config: Config, decoder: Decoder) -> float:
    """Returns the bytes of a token on the driver."""
    return BATCH_BYTES + driver_bytes(config, decoder)


def _steps_ahead(config: Config) -> int:
    """Returns how many steps may be generated ahead of the current step."""
    return config.asynchrony.max_staleness if generates_ahead(config.asynchrony) else 0


def _peak_sum(processes: Sequence[Mapping[str, int]]) -> int:
    """Returns the largest sum of bytes over all processes in any phase."""
    return max(sum(totals[phase] for totals in processes) for phase in PHASES)


def _rank_memories(
    config: Config, decoder: Decoder, parallel: ParallelDims, reference: ParallelDims | None, node: PlannedNode
) -> list[PolicyMemory]:
    """Returns the memory of each policy, reference and critic rank on a node."""
    memories = [policy_memory(config, decoder, parallel, rank) for rank in node.policy]
    memories += [reference_memory(config, decoder, reference, rank) for rank in node.reference if reference]
    critic = critic_dims(config) if node.critic else None
    return memories + [critic_memory(config, decoder, critic, rank) for rank in node.critic if critic]


def pinned_reference(config: Config, decoder: Decoder, parallel: ParallelDims, rank: int) -> int:
    """Returns the bytes of pinned host memory for the reference weights of policy rank `rank`, a rank of the layout
    `parallel`; 0 without a KL term, and for a reference with a separate layout. Raises ValueError if the layout has no
    such rank."""
    if not config.algorithm.kl.coefficient or config.reference.layout is not None:
        return 0
    pp = parallel.coordinates(rank).pp
    total = sum(chunk.total for chunk in stage(decoder, parallel, pp))
    in_fp8 = kept_in_fp8(config, decoder, parallel, pp)  # a forward pass reads one byte per weight
    return (total - in_fp8) * itemsize(config) + in_fp8


def numa_warnings(config: Config, decoder: Decoder, parallel: ParallelDims) -> list[str]:
    """Returns a warning for each NUMA node whose memory is too small for the pinned data of its GPUs; [] on CPUs, and
    if `cluster.numa_nodes` or `cluster.host_memory_gib` is null. `parallel` is the policy's grid.

    Assumes that GPU g of n is nearest to NUMA node g · `cluster.numa_nodes` / n. Raises UserError if a critic's layout
    does not fit its ranks, and ValueError if `policy.micro_tokens` is not decided.
    """
    cluster = config.cluster
    if cluster.numa_nodes is None or cluster.host_memory_gib is None or on_cpu(config):
        return []
    pinned: Counter[tuple[int, int]] = Counter()
    placed = plan_placement(config)
    for rank, device in enumerate(placed.policy):
        size = policy_memory(config, decoder, parallel, rank).pinned + pinned_reference(config, decoder, parallel, rank)
        pinned[_numa_node(cluster, placed, device)] += size
    if critic := critic_dims(config):
        for rank, device in enumerate(placed.critic):
            pinned[_numa_node(cluster, placed, device)] += critic_memory(config, decoder, critic, rank).pinned
    available = cluster.host_memory_gib * GIB / cluster.numa_nodes
    return [
        f"node {node}: {size / GIB:.0f} GiB are pinned for the GPUs of NUMA node {numa}, which has "
        f"{available / GIB:.0f} GiB (cluster.numa_nodes): the rest is at another socket, with slower copies"
        for (node, numa), size in sorted(pinned.items())
        if size > available
    ]


def _numa_node(cluster: ClusterConfig, placed: RunPlacement, device: int) -> tuple[int, int]:
    """Returns the node and NUMA node of a policy's or critic's GPU."""
    node, gpu = divmod(device, placed.per_node)
    return node, gpu * (cluster.numa_nodes or 1) // cluster.gpus_per_node


@dataclass(frozen=True)
class Shares:
    """Largest parts of a checkpoint in bytes. All ranks write at once, each from local memory."""

    rank: int
    """Bytes written by the rank with the largest part."""
    node: int
    """Bytes written by all ranks of the node with the largest part."""


def shares(config: Config, decoder: Decoder, parallel: ParallelDims, placed: Sequence[PlannedNode]) -> Shares:
    """Returns the largest parts of a checkpoint (policy and critic) of a rank and of a node; zeros without checkpoints.

    Args:
        config: The settings.
        decoder: The model with the policy's head.
        parallel: The policy's grid.
        placed: All nodes of the run (`placement.nodes`).

    Raises:
        UserError: A critic's layout does not fit its ranks.
    """
    if not config.checkpoint.every:
        return Shares(0, 0)
    critic = critic_dims(config)

    def write(settings: Config, decoder: Decoder, grid: ParallelDims, rank: int) -> int:
        freeze = config.policy.moe.freeze_router
        return checkpoint_bytes(
            decoder, grid, rank, itemsize(settings), freeze, overlap=overlapped(config), moments=moments(settings)
        )

    by_node = [
        [write(config, decoder, parallel, rank) for rank in node.policy]
        + [write(critic_view(config), decoder.critic, critic, rank) for rank in node.critic if critic]
        for node in placed
    ]
    return Shares(max(size for node in by_node for size in node), max(map(sum, by_node)))


@dataclass(frozen=True)
class Disk:
    """Sizes of files in bytes."""

    checkpoint: int
    """A checkpoint of the policy, and of a critic."""
    kept: int
    """All checkpoints on disk at once: `checkpoint.keep` finished checkpoints, and a checkpoint being written."""
    export: int
    """Hugging Face directory at the end; 0 without `checkpoint.export`."""


def disk(config: Config, decoder: Decoder) -> Disk:
    """Estimates the bytes of the checkpoints and of the export in a run's folder, over all nodes. Checkpoints count 0
    if `checkpoint.every` is 0, and the export counts 0 without `checkpoint.export`."""
    trained = [(config, decoder), *[(critic_view(config), decoder.critic)] * has_critic(config)]
    checkpoint = sum(_model_bytes(settings, m) for settings, m in trained) if config.checkpoint.every else 0
    if config.checkpoint.every:
        data = config.data
        ahead = _steps_ahead(config) * data.prompts_per_step * data.samples_per_prompt
        checkpoint += int(ahead * length_limit(config.rollout) * _driver_token_bytes(config, decoder))
    export = elements(decoder) * itemsize(config) if config.checkpoint.export else 0
    return Disk(checkpoint, checkpoint * (config.checkpoint.keep + 1), export)


def _model_bytes(config: Config, decoder: Decoder) -> int:
    """Returns the bytes of a model in a checkpoint."""
    (chunk,) = stage(decoder, ParallelDims(ranks=1), 0)
    frozen = int(chunk.numel[chunk.router].sum()) if config.policy.moe.freeze_router else 0
    tensors = huggingface.tensors(decoder)
    fixed = sum(prod(tensors[name]) for name in decoder.frozen_tensors)
    trained = elements(decoder) - frozen - fixed
    return trained * (MASTER + moments(config)) + frozen * itemsize(config) + fixed * FLOAT32
