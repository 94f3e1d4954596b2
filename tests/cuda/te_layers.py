"""A rank of Transformer Engine's layers goes forward and backward on a CPU, and the waits of its host are counted.

Its Python and megatron-core's are real (`te`), its kernels torch's (`te_kernels`), the ranks processes on gloo.
Run as a program it reads a pickled `Case` from standard input and writes its pickled answers to the file that is named.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from skyrl_mega.config.precision import row_multiple
from skyrl_mega.config.schema import PolicyConfig
from tests.cuda import programs
from tests.cuda.linears import Linear, watched
from tests.cuda.programs import Case


@dataclass
class Answer:
    """What it found with one of the policies."""

    waits: Counter[tuple[str, str]]
    """(kind, place) → times that the host waited for the device; of `te` layers alone."""
    hidden: Any
    """numpy float32 [L, H]: the last hidden states of this rank's tokens, without padding."""
    gradients: dict[str, Any]
    """numpy float32, by the parameter's name."""
    fields: dict[str, Any]
    """Of megatron-core's configuration."""
    kept: int
    """Bytes that the last layer keeps for its backward pass, without parameters."""
    tokens: int
    """Of the row."""
    routed: int
    """Copies of them that this rank's experts of the last layer work on, with those that pad an expert's rows."""
    linears: dict[str, Linear]
    """Of the last layer of `te`: what its attention's last product and its experts' were given and made of it."""


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
    programs.join(case)
    return [answer(case, policy, waits) for policy in case.policies]


@dataclass
class Ready:
    """A rank's layers and what they are given."""

    opened: Any
    """The `ModelWorker`."""
    chunk: Any
    """Its model, whose parameters want gradients."""
    micro: Any
    gradient: Any
    """Of this rank's last hidden states."""

    def forward(self) -> Any:
        """The last hidden states."""
        for p in self.chunk.parameters():
            p.grad = None
        self.chunk.set_is_first_microbatch()  # as megatron-core's schedule does
        micro = self.micro
        return self.chunk(micro.tokens, micro.positions, None, packed_seq_params=micro.row, padding_mask=micro.padding)

    def backward(self, hidden: Any) -> None:
        """Fills the parameters' gradients."""
        import torch

        gradient = self.gradient.view(hidden.shape).to(hidden.dtype)
        torch.autograd.backward([hidden], [gradient])  # its method leaves the modes

    def once(self) -> Any:
        """Forward and backward; the last hidden states."""
        import torch

        fp8 = self.opened.fp8
        if fp8:  # of the local spec, whose weights are rounded on the CPU, not by a Triton kernel
            with torch._C.DisableTorchFunction():
                fp8.begin()
        hidden = self.forward()
        self.backward(hidden)
        if fp8:
            fp8.end(trained=True)
        return hidden

    def gradients(self) -> dict[str, Any]:
        """numpy float32, by the parameter's name."""
        return {name: p.grad.float().numpy() for name, p in self.chunk.named_parameters() if p.grad is not None}


def ready(case: Case, policy: PolicyConfig, waits: Any, batch: Any) -> Ready:
    """Opens the model that the case names, for one row of the batch."""
    import json

    import torch

    from skyrl_mega.megatron import model
    from skyrl_mega.megatron.fp8_parameters import storage_tensors
    from skyrl_mega.megatron.packing import pack
    from skyrl_mega.megatron.worker import ModelWorker
    from tests.cuda.syncs import Counted, CudaAsCpu, mark_device
    from tests.megatron import layouts

    waits.found.clear()
    parallel, at = case.parallel, case.parallel.coordinates(case.rank)
    rows = row_multiple(policy.precision, policy.spec or "te")
    micro = pack(batch, context=parallel.context, context_rank=at.cp, tensor=parallel.tensor, rows=rows)
    hf = json.loads((case.model / "config.json").read_text())
    with CudaAsCpu(), Counted(waits):  # it says of what is made which stays on the host
        opened = ModelWorker(hf, policy, parallel, dtype=torch.bfloat16, device=layouts.CPU, trainable=False)
        opened.load(case.model)
        for_backward(opened)
    chunk = model.unwrap_gpt(opened.chunks[0]).train()
    chunk.requires_grad_()
    mark_device([*chunk.parameters(), *storage_tensors(chunk.parameters()), *chunk.buffers()])
    with waits.pause():
        gradient = drawn(~micro.padding.view(-1), chunk.config.hidden_size).chunk(parallel.tensor)[at.tp]
    return Ready(opened, chunk, micro, gradient)


def answer(case: Case, policy: PolicyConfig, waits: Any) -> Answer:
    """Three passes: one makes what is made once, one is counted, one is watched."""
    from tests.cuda.syncs import AsCuda, counting
    from tests.megatron import layouts

    at = case.parallel.coordinates(case.rank)
    layers = ready(case, policy, waits, layouts.some_batch(90, count=6, seed=at.dp))
    chunk, te_layers = layers.chunk, policy.spec == "te"
    with AsCuda():
        with keeping(chunk) as kept:  # this pass also makes what is made once: work spaces, the choice of a kernel
            layers.once()
        with counting(waits) if te_layers else nullcontext():
            hidden = layers.once()
        with watched(linears(chunk) if te_layers else {}) as products:
            layers.once()
    fields = {k: v for k, v in vars(chunk.config).items() if isinstance(v, bool | int | str | list)}
    tokens, flat = layers.micro.tokens.numel(), real(layers, hidden, case)
    return Answer(Counter(waits.found), flat, layers.gradients(), fields, kept.bytes, tokens, kept.routed, products)


def real(layers: Ready, hidden: Any, case: Case) -> Any:
    """numpy float32 [L, H]: the hidden states of this rank's tokens, without padding."""
    there = ~layers.micro.padding.view(case.parallel.tensor, -1)[case.parallel.coordinates(case.rank).tp]
    return hidden.detach().float().view(-1, hidden.shape[-1])[there].numpy()


def for_backward(opened: Any) -> None:
    """Makes what a backward pass reads of parameters in FP8: a worker that does not train has none."""
    from megatron.core.fp8_utils import is_float8tensor, post_all_gather_processing

    if fp8 := [p for p in opened.params.values() if is_float8tensor(p)]:
        post_all_gather_processing(fp8)


def drawn(there: Any, width: int) -> Any:
    """A gradient of the last hidden states [T, H] that has nothing to do with padding."""
    import torch

    whole = torch.zeros(len(there), width)
    whole[there] = torch.linspace(-1, 1, int(there.sum()) * width).view(-1, width)
    return whole


def linears(chunk: Any) -> dict[str, Any]:
    """The last layer's."""
    layer = chunk.decoder.layers[-1]
    experts = layer.mlp.experts
    return {"proj": layer.self_attention.linear_proj, "fc1": experts.linear_fc1, "fc2": experts.linear_fc2}


@contextmanager
def keeping(chunk: Any) -> Iterator[Kept]:
    """Notes what the last layer saves for its backward pass, each storage once, in a forward pass inside."""
    import torch

    from skyrl_mega.megatron.fp8_parameters import storage_tensors

    found, inside = Kept(), False
    layer = chunk.decoder.layers[-1]
    parameters = {t.untyped_storage().data_ptr() for t in storage_tensors(chunk.parameters())}

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False
        found.bytes = sum(storage.nbytes() for storage in found.storages.values())  # some are emptied in the end

    def save(t: Any) -> Any:
        if hasattr(t, "_fp8_dtype"):  # a weight, or its copy: activations are saved as plain numbers and scales
            return t
        storage = t.untyped_storage()
        if inside and storage.data_ptr() not in parameters:
            found.storages[storage._cdata] = storage
        return t

    def experts(_: Any, given: tuple[Any, ...]) -> None:
        found.routed = len(given[0])

    hooks = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    hooks.append(getattr(layer.mlp.experts, "linear_fc1", layer.mlp.experts).register_forward_pre_hook(experts))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        yield found
    for hook in hooks:
        hook.remove()


def main() -> None:
    """Answers for the case on standard input."""
    rehearsed(go)


def rehearsed(go: Callable[[Case, Any], list[Any]]) -> None:
    """Reads the case, has this process believe in CUDA, and writes what `go` answers."""
    case: Case = pickle.load(sys.stdin.buffer)
    from tests.cuda import deepep, te_kernels
    from tests.cuda.syncs import Waits

    waits = Waits()
    deepep.install(waits)
    te_kernels.install(waits, case.capability)
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
