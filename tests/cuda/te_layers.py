"""A rank of Transformer Engine's layers goes forward and backward on a CPU, and the waits of its host are counted.

Its Python and megatron-core's are real (`te`), its kernels torch's (`te_kernels`), the ranks processes on gloo.
Run as a program it reads a pickled `Case` from standard input and writes its pickled answers to the file that is named.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from skyrl_mega.config.schema import PolicyConfig
from skyrl_mega.parallel.dims import ParallelDims


@dataclass(frozen=True)
class Case:
    """What one rank is to do."""

    rank: int
    address: str
    model: Path
    parallel: ParallelDims
    policies: tuple[PolicyConfig, ...]


@dataclass
class Answer:
    """What it found with one of the policies."""

    waits: Counter[tuple[str, str]]
    """(kind, place) → times that the host waited for the device; of `te` layers alone."""
    hidden: Any
    """numpy float32 [L, H]: the last hidden states."""
    gradients: dict[str, Any]
    """numpy float32, by the parameter's name."""
    fields: dict[str, Any]
    """Of megatron-core's configuration."""
    kept: int
    """Bytes that the last layer keeps for its backward pass, without parameters."""
    tokens: int
    """Of the row."""
    routed: int
    """Copies of them that this rank's experts of the last layer work on."""


@dataclass
class Kept:
    """What one layer has saved."""

    storages: dict[int, Any] = field(default_factory=dict)
    """Their address → storage, kept so that no address is used twice."""
    bytes: int = 0
    routed: int = 0
    """Rows that its experts got."""


def go(case: Case, waits: Any) -> list[Answer]:
    """Forward and backward through all layers with each of the policies."""
    import json

    import torch
    import torch.distributed as dist

    from skyrl_mega.megatron import layer_spec, model
    from skyrl_mega.megatron.packing import pack
    from skyrl_mega.megatron.worker import ModelWorker
    from tests.cuda.syncs import AsCuda, Counted, CudaAsCpu, counting, mark_device
    from tests.megatron import layouts

    layer_spec.varlen_attn = None  # a kernel of the local spec, which no stand-in computes
    host, port = case.address.split(":")
    parallel = case.parallel
    store = dist.TCPStore(host, int(port), parallel.ranks, is_master=case.rank == 0, timeout=timedelta(seconds=120))
    with CudaAsCpu():
        model.join(case.rank, parallel, store, layouts.CPU, 120)
    hf = json.loads((case.model / "config.json").read_text())
    at = parallel.coordinates(case.rank)
    micro = pack(layouts.some_batch(90, count=6, seed=at.dp), context=1, context_rank=0, tensor=parallel.tensor)

    def pass_through(chunk: Any) -> Any:
        for p in chunk.parameters():
            p.grad = None
        hidden = chunk(micro.tokens, micro.positions, None, packed_seq_params=micro.row, padding_mask=micro.padding)
        gradient = torch.linspace(-1, 1, hidden.numel()).view(hidden.shape).to(hidden.dtype)
        torch.autograd.backward([hidden], [gradient])  # its method would leave the modes
        return hidden

    def answer(policy: PolicyConfig) -> Answer:
        waits.found.clear()
        with CudaAsCpu(), Counted(waits):  # it says of what is made which stays on the host
            opened = ModelWorker(hf, policy, parallel, dtype=torch.bfloat16, device=layouts.CPU, trainable=False)
            opened.load(case.model)
        chunk = model.bare(opened.chunks[0]).train()
        chunk.requires_grad_()
        mark_device([*chunk.parameters(), *chunk.buffers()])
        with AsCuda():
            with keeping(chunk) as kept:  # this pass also makes what is made once: work spaces, the choice of a kernel
                pass_through(chunk)
            with counting(waits) if policy.spec == "te" else nullcontext():
                hidden = pass_through(chunk)
        gradients = {name: p.grad.float().numpy() for name, p in chunk.named_parameters() if p.grad is not None}
        fields = {k: v for k, v in vars(chunk.config).items() if isinstance(v, bool | int | str | list)}
        flat = hidden.detach().float().view(-1, hidden.shape[-1]).numpy()
        return Answer(Counter(waits.found), flat, gradients, fields, kept.bytes, micro.tokens.numel(), kept.routed)

    return [answer(policy) for policy in case.policies]


@contextmanager
def keeping(chunk: Any) -> Iterator[Kept]:
    """Notes what the last layer saves for its backward pass, each storage once, in a forward pass inside."""
    import torch

    found, inside = Kept(), False
    layer = chunk.decoder.layers[-1]
    parameters = {p.untyped_storage().data_ptr() for p in chunk.parameters()}

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False
        found.bytes = sum(storage.nbytes() for storage in found.storages.values())  # some are emptied in the end

    def save(t: Any) -> Any:
        storage = t.untyped_storage()
        if inside and storage.data_ptr() not in parameters:
            found.storages[storage._cdata] = storage
        return t

    def experts(_: Any, given: tuple[Any, ...]) -> None:
        found.routed = len(given[0])

    hooks = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    hooks.append(layer.mlp.experts.register_forward_pre_hook(experts))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        yield found
    for hook in hooks:
        hook.remove()


def main() -> None:
    """Answers for the case on standard input."""
    case: Case = pickle.load(sys.stdin.buffer)
    from tests.cuda import deepep, te_kernels
    from tests.cuda.syncs import Waits

    waits = Waits()
    deepep.install(waits)
    te_kernels.install(waits)
    import torch

    from skyrl_mega.megatron import cpu
    from tests.cuda import as_cpu

    torch.set_num_threads(1)
    cpu.stand_in()
    as_cpu.unmapped()
    te_kernels.stand_in(waits)
    deepep.stand_in()
    answers = go(case, waits)
    with open(sys.argv[1], "wb") as file:
        pickle.dump(answers, file)


if __name__ == "__main__":
    # Under the name by which whoever reads the answers imports it.
    from tests.cuda import te_layers

    te_layers.main()
