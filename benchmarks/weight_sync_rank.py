"""A process of benchmarks/weight_sync.py: a policy rank or an engine worker, inside a node.

Reads commands from standard input and answers each with a line of JSON. Three ways to move the weights:

*ours*: this project's plan, exchange and transport, all in `connect_ours`.

*fp8*: the same with linear weights as block-scaled FP8 on the wire; a worker converts back to BF16.

*baseline*: gather-then-broadcast, as in most frameworks. Policy rank 0 gathers every tensor in full, each distinct part
from the lowest rank with the part (hence from rank 0's node if possible), and broadcasts over a gloo group with all
engine workers; each worker cuts out the shard. Tensors travel in buckets of the same size as in *ours*, two in flight:
rank 0 gathers a bucket during the broadcast of the previous bucket, a worker cuts a bucket during the arrival of the
next. gloo broadcasts along a binomial tree, so several copies of the model leave rank 0's node, and each worker
receives a copy; the benchmark also reports the lower bound of any broadcast, a single copy out of rank 0's node.

Everything is in BF16; only *fp8* converts anything.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.kernels import block_fp8
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.box import Box, Layout, Piece, Shard
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.exchange.exchange import Exchange
from skyrl_mega.weights.fp8.format import Wire, quantised, with_scales
from skyrl_mega.weights.plan.plan import plan
from skyrl_mega.weights.plan.topology import Links, Topology
from skyrl_mega.weights.transports.group import host_store, join

DTYPE = torch.bfloat16
STORE_PORT = 29400
"""Port of the store on policy rank 0's node; in a namespace every port is free."""
UNTOUCHED = 0x5A5A
"""Value of a worker's parameters before a sync, to detect unwritten elements."""

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Scenario:
    """The model, the layouts and the network of a benchmark. Plain values, to be sent as JSON."""

    hf: dict[str, Any]
    """Content of config.json."""
    parallel: dict[str, Any]
    """Fields of the policy's `ParallelDims`."""
    engine_tensor: int
    engines: int
    ranks_per_node: int
    host: str
    """Address of policy rank 0's node."""
    mbit: float
    """Rate of every link in megabits per second."""
    bucket_bytes: int
    timeout_s: float

    @property
    def policy_ranks(self) -> int:
        return int(self.parallel["ranks"])

    @property
    def workers(self) -> int:
        return self.engines * self.engine_tensor

    @property
    def size(self) -> int:
        """Returns the number of processes: policy ranks first, then the workers of engine 0, of engine 1, …"""
        return self.policy_ranks + self.workers

    def node(self, process: int) -> int:
        """Returns the node of a process; policy and engines use separate nodes."""
        policy_nodes = -(-self.policy_ranks // self.ranks_per_node)
        if process < self.policy_ranks:
            return process // self.ranks_per_node
        return policy_nodes + (process - self.policy_ranks) // self.ranks_per_node

    def name(self, process: int) -> str:
        if process < self.policy_ranks:
            return f"policy rank {process}"
        engine, worker = divmod(process - self.policy_ranks, self.engine_tensor)
        return f"engine {engine} worker {worker}"

    def layouts(self) -> tuple[Layout, Layout]:
        """Returns the layouts of the policy and of the engines."""
        arch = architecture(self.hf)
        return (
            arch.megatron_layout(self.hf, ParallelDims(**self.parallel), "te"),
            arch.engine_layout(self.hf, self.engine_tensor, self.engines),
        )

    def topology(self) -> Topology:
        """Returns the topology for the planner: each rank is a device, each node gets a single NIC of the link's
        rate."""
        each, ranks = self.ranks_per_node, self.policy_ranks
        links = Links(gpus_per_node=each, nics_per_node=1, nic_gb_s=self.mbit / 8e3)
        sources = tuple(self.node(rank) * each + rank % each for rank in range(ranks))
        targets = tuple(self.node(ranks + worker) * each + worker % each for worker in range(self.workers))
        return Topology(sources, targets, links)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Process:
    """A process: its number, both layouts and the parameters."""

    def __init__(self, scenario: Scenario, number: int) -> None:
        self.scenario, self.number = scenario, number
        self.source, self.target = scenario.layouts()
        self.is_policy = number < scenario.policy_ranks
        self.worker = number - scenario.policy_ranks
        self.shard = self.source.shards[number] if self.is_policy else self.target.shards[self.worker]
        self.params: Params = {name: torch.empty(shape, dtype=DTYPE) for name, shape in self.shard.params.items()}
        self.expected: Params = {}

    def prepare(self, seed: int, fp8: bool = False) -> None:
        """Fills the weights of version `seed`: a policy rank's parameters, or a worker's expected values after the
        sync, rounded through FP8 with `fp8`."""
        for param in self.params.values():
            param.view(torch.int16).fill_(UNTOUCHED)
        filled = self.params if self.is_policy else {name: param.clone() for name, param in self.params.items()}
        pieces: dict[str, list[Piece]] = {}
        for piece in self.shard.pieces:
            pieces.setdefault(piece.tensor, []).append(piece)
        for index, (name, shape) in enumerate(self.source.tensors.items()):
            if name not in pieces:
                continue
            generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
            # Random bits without the topmost bit of the exponent: every pattern of sign and mantissa, all finite.
            bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator) & ~0x4000
            whole = bits.view(DTYPE)
            if fp8 and not self.is_policy and name in quantised([name]):
                scales = block_fp8.scales(block_fp8.block_amax(whole))
                whole = block_fp8.dequantise(block_fp8.quantise(whole, scales), scales, dtype=DTYPE)
            for piece in pieces[name]:
                part = whole[piece.box.slices()]
                _view(filled[piece.param], piece.offset, piece.box).copy_(part)
        if not self.is_policy:
            self.expected = filled

    def wrong_bytes(self) -> int:
        """Returns the number of wrong bytes in this worker's parameters; 0 for a policy rank."""
        return sum(
            int((self.params[name].view(torch.uint8) != expected.view(torch.uint8)).sum())
            for name, expected in self.expected.items()
        )


def connect_ours(process: Process, store: dist.Store, policy: Any, *, fp8: bool) -> Callable[[], None]:
    """Connects this project's sync and returns a function that runs a sync. All uses of the project's sync are here.

    Args:
        store: Store that all processes have joined.
        policy: Process group of the policy's ranks.
    """
    scenario, cpu = process.scenario, torch.device("cpu")
    names = quantised(process.source.tensors) if fp8 else frozenset[str]()
    wire = Wire(DTYPE, names)
    source, target = with_scales(process.source, names), with_scales(process.target, names)
    moves = plan(source, target, scenario.topology(), itemsize=wire.itemsize)
    address: Any = None
    key = f"ours/port/{fp8}"
    if process.number == 0:
        address = host_store(scenario.host, scenario.timeout_s)
        store.set(key, str(address.port))
    else:
        address = (scenario.host, int(store.get(key)))
    transport = join(
        address,
        process.number,
        scenario.size,
        scenario.name(process.number),
        device=cpu,
        timeout_s=scenario.timeout_s,
    )
    exchange = Exchange(
        moves,
        transport,
        wire,
        source=process.number if process.is_policy else None,
        source_layout=source,
        target=None if process.is_policy else process.worker,
        target_layout=target,
        bucket_bytes=scenario.bucket_bytes,
        target_base=scenario.policy_ranks,
        agree=lambda amax: dist.all_reduce(amax, dist.ReduceOp.MAX, group=policy),
    )

    def run() -> None:
        if process.is_policy:
            exchange.run(source=process.params)
        else:
            exchange.run(target=process.params)

    return run


@dataclass(frozen=True)
class _Part:
    """A box of a tensor, the position in the bucket's flat buffer, and the policy rank that sends the box."""

    tensor: str
    box: Box
    holder: int
    piece: Piece


class Baseline:
    """Gather-then-broadcast, ready to run."""

    def __init__(self, process: Process) -> None:
        scenario = process.scenario
        self._process = process
        self._layout = process.source
        self._group = dist.new_group([0, *range(scenario.policy_ranks, scenario.size)])
        self._buckets = _whole_tensors(self._layout, scenario.bucket_bytes)
        self._parts = _distinct_parts(self._layout)
        largest = max(self._size(names) for names in self._buckets)
        self._buffers = [torch.empty(largest, dtype=DTYPE) for _ in range(2)]
        self._wanted: dict[str, list[Piece]] = {}
        for piece in process.shard.pieces:
            self._wanted.setdefault(piece.tensor, []).append(piece)

    def run(self) -> None:
        """Runs this process's part of a sync."""
        if self._process.number == 0:
            self._lead()
        elif self._process.is_policy:
            self._bring()
        else:
            self._take()

    def _lead(self) -> None:
        """Runs rank 0's part: gathers a bucket during the broadcast of the previous bucket."""
        works: list[Any] = [None, None]
        for k, names in enumerate(self._buckets):
            buffer = self._buffers[k % 2]
            if works[k % 2] is not None:
                works[k % 2].wait()
            self._gather(names, buffer)
            works[k % 2] = self._broadcast(names, buffer)
        for work in works:
            if work is not None:
                work.wait()

    def _gather(self, names: list[str], buffer: Tensor) -> None:
        """Gathers the bucket's tensors in full, on rank 0."""
        tensors = self._views(buffer, names)
        arriving = []
        for rank in range(1, self._process.scenario.policy_ranks):
            if theirs := self._brought(rank, names):
                packed = torch.empty(sum(part.box.numel for part in theirs), dtype=DTYPE)
                arriving.append((dist.irecv(packed.view(torch.uint8), rank), packed, theirs))
        for part in self._brought(0, names):
            tensors[part.tensor][part.box.slices()].copy_(self._local(part.piece))
        for work, packed, theirs in arriving:
            assert work is not None
            work.wait()
            at = 0
            for part in theirs:
                tensors[part.tensor][part.box.slices()].copy_(packed[at : at + part.box.numel].view(part.box.shape))
                at += part.box.numel

    def _bring(self) -> None:
        """Runs another policy rank's part: sends parts of a bucket while parts of the previous bucket are in flight."""
        works: list[Any] = []
        for names in self._buckets:
            if parts := self._brought(self._process.number, names):
                packed = torch.cat([self._local(part.piece).reshape(-1) for part in parts])
                works.append((dist.isend(packed.view(torch.uint8), 0), packed))
            if len(works) > 1:
                works.pop(0)[0].wait()
        for work, _ in works:
            work.wait()

    def _take(self) -> None:
        """Runs an engine worker's part: cuts the shard out of a bucket during the arrival of the next."""
        under_way: list[tuple[Any, int]] = []
        for k in range(len(self._buckets) + 1):
            if k < len(self._buckets):
                under_way.append((self._broadcast(self._buckets[k], self._buffers[k % 2]), k))
            if len(under_way) < 2 and k < len(self._buckets):
                continue
            work, done = under_way.pop(0)
            work.wait()
            for name, tensor in self._views(self._buffers[done % 2], self._buckets[done]).items():
                for piece in self._wanted.get(name, []):
                    self._local(piece).copy_(tensor[piece.box.slices()])

    def _broadcast(self, names: list[str], buffer: Tensor) -> Any:
        """Starts to send or receive a bucket."""
        wire = buffer[: self._size(names)].view(torch.uint8)
        return dist.broadcast(wire, 0, group=self._group, async_op=True)

    def _brought(self, rank: int, names: list[str]) -> list[_Part]:
        """Returns the parts of a bucket sent by a policy rank."""
        return [part for name in names for part in self._parts[name] if part.holder == rank]

    def _local(self, piece: Piece) -> Tensor:
        return _view(self._process.params[piece.param], piece.offset, piece.box)

    def _views(self, buffer: Tensor, names: list[str]) -> dict[str, Tensor]:
        """Returns a bucket's tensors, consecutive in the buffer."""
        at, tensors = 0, {}
        for name in names:
            size = _numel(self._layout, name)
            tensors[name] = buffer[at : at + size].view(self._layout.tensors[name])
            at += size
        return tensors

    def _size(self, names: list[str]) -> int:
        """Returns the number of elements of a bucket."""
        return sum(_numel(self._layout, name) for name in names)


def _view(param: Tensor, offset: tuple[int, ...], box: Box) -> Tensor:
    """Returns the view of `box` in a local parameter, see `Piece`."""
    stack = len(offset) - len(box.shape)
    where: Any = (*offset[:stack], *(slice(o, o + n) for o, n in zip(offset[stack:], box.shape, strict=True)))
    return param[where]


def _numel(layout: Layout, name: str) -> int:
    return prod(layout.tensors[name])


def _whole_tensors(layout: Layout, bucket_bytes: int) -> list[list[str]]:
    """Returns names of tensors in buckets of at most `bucket_bytes`; a larger tensor gets a separate bucket."""
    buckets: list[list[str]] = []
    left = 0
    for name in layout.tensors:
        size = _numel(layout, name) * DTYPE.itemsize
        if size > left:
            buckets.append([])
            left = bucket_bytes
        buckets[-1].append(name)
        left -= size
    return buckets


def _distinct_parts(layout: Layout) -> dict[str, list[_Part]]:
    """Returns every tensor as disjoint boxes, each from the lowest rank that holds the box."""
    parts_by_tensor: dict[str, dict[Box, _Part]] = {name: {} for name in layout.tensors}
    for rank, shard in enumerate(layout.shards):
        for piece in shard.pieces:
            parts_by_tensor[piece.tensor].setdefault(piece.box, _Part(piece.tensor, piece.box, rank, piece))
    for name, parts in parts_by_tensor.items():
        assert sum(box.numel for box in parts) == _numel(layout, name), f"{name}: parts overlap or are missing"
    return {name: list(parts.values()) for name, parts in parts_by_tensor.items()}


def shard_bytes(shard: Shard) -> int:
    """Returns the bytes of all pieces of a shard."""
    return sum(piece.box.numel for piece in shard.pieces) * DTYPE.itemsize


def main() -> None:
    """Joins both groups, then executes commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # library output must not look like an answer
    torch.set_num_threads(1)
    scenario, number = Scenario(**json.loads(sys.argv[1])), int(sys.argv[2])
    process = Process(scenario, number)
    limit = timedelta(seconds=scenario.timeout_s)
    store = dist.TCPStore(scenario.host, STORE_PORT, scenario.size, is_master=number == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=number, world_size=scenario.size, timeout=limit)
    policy = dist.new_group(list(range(scenario.policy_ranks)))
    ways = {
        "baseline": Baseline(process).run,
        "ours": connect_ours(process, store, policy, fp8=False),
        "fp8": connect_ours(process, store, policy, fp8=True),
    }

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    answer(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "prepare":
            process.prepare(command["seed"], command["fp8"])
            answer(ready=True)
            continue
        # All processes share the machine's clock and start at the same moment.
        time.sleep(max(0.0, command["at"] - time.monotonic()))
        cpu = time.process_time()
        ways[command["do"]]()
        end = time.monotonic()
        answer(end=end, cpu_s=time.process_time() - cpu, wrong=process.wrong_bytes())


if __name__ == "__main__":
    main()
