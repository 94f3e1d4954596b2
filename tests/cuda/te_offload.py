"""A rank of Transformer Engine's layers, the first of which have what they keep in host memory between the passes.

Its Python and megatron-core's are real (`te`), its kernels torch's (`te_kernels`, `te_fp8_kernels`). Run as a program
it reads a pickled `Case` from standard input and writes its pickled answers to the file that is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from skyrl_mega.config.schema import PolicyConfig
from tests.cuda import programs, te_layers
from tests.cuda.programs import Case

LONGEST = 200
"""Tokens of a sequence, less one."""


@dataclass
class Answer:
    """What it found with one of the policies."""

    waits: Counter[tuple[str, str]]
    """(kind, place) → times that the host waited for the device."""
    hidden: Any
    """numpy float32 [L, H]: the last hidden states of this rank's tokens, without padding."""
    gradients: dict[str, Any]
    """numpy float32, by the parameter's name."""
    kept: list[int]
    """Bytes that each layer saves for its backward pass, without parameters."""
    between: list[int]
    """How many of them are on the device between the passes."""
    most: int
    """The most that all layers have there at a time."""
    host: int
    """Bytes of host memory."""
    tokens: int
    """Of the row."""
    routed: int
    """Copies of tokens that this rank's experts of the last layer work on."""


@dataclass
class Watch:
    """Storages that layers save, and whether they are still there."""

    parameters: set[int]
    """Addresses."""
    layers: list[dict[int, tuple[Any, int]]]
    """Of each layer: address → (weak reference, bytes)."""
    most: int = 0
    at: int = -1
    """The layer that runs."""
    routed: int = 0

    def saved(self, tensor: Any) -> None:
        """Notes one."""
        from torch.multiprocessing.reductions import StorageWeakRef

        if hasattr(tensor, "_fp8_dtype"):  # a weight, or its copy: activations are saved as plain numbers and scales
            return
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.layers[self.at][storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def there(self) -> list[int]:
        """Bytes of each layer that are on the device now."""
        found = [sum(size for ref, size in of.values() if not ref.expired()) for of in self.layers]
        self.most = max(self.most, sum(found))
        return found


@contextmanager
def watching(chunk: Any) -> Iterator[Watch]:
    """Notes what all layers save in a forward pass inside."""
    import torch

    from skyrl_mega.megatron import activation_offload
    from skyrl_mega.megatron.fp8_parameters import storage_tensors
    from tests.cuda.syncs import AsCuda

    layers = chunk.decoder.layers
    watch = Watch({t.untyped_storage().data_ptr() for t in storage_tensors(chunk.parameters())}, [{} for _ in layers])
    own = torch.autograd.graph.saved_tensors_hooks

    class Hooks(own):
        """Those of whoever saves, seen."""

        def __init__(self, pack: Any, unpack: Any) -> None:
            def noted(tensor: Any) -> Any:
                watch.saved(tensor)
                with AsCuda():  # a mode is not in force within what it has called
                    return pack(tensor)

            super().__init__(noted, unpack)

    hooks = []
    for i, layer in enumerate(layers):

        def enter(*_: Any, i: int = i) -> None:
            watch.there()
            watch.at = i

        def leave(*_: Any) -> None:
            watch.there()

        hooks += [layer.register_forward_pre_hook(enter), layer.register_full_backward_pre_hook(leave)]

    def experts(_: Any, given: tuple[Any, ...]) -> None:
        watch.routed = len(given[0])

    hooks.append(layers[-1].mlp.experts.linear_fc1.register_forward_pre_hook(experts))
    activation_offload.saved_tensors_hooks = Hooks
    with Hooks(lambda t: t, lambda t: t):
        yield watch
    activation_offload.saved_tensors_hooks = own
    for hook in hooks:
        hook.remove()


def go(case: Case, waits: Any) -> list[Answer]:
    """Forward and backward through all layers with each of the policies."""
    programs.join(case)
    return [answer(case, policy, waits) for policy in case.policies]


def answer(case: Case, policy: PolicyConfig, waits: Any) -> Answer:
    """Three passes: one makes what is made once, one is counted, one is watched."""
    from skyrl_mega.megatron import activation_offload
    from skyrl_mega.megatron.host_memory import HostMemory
    from tests.cuda.syncs import CUDA, AsCuda, counting
    from tests.megatron import layouts

    layers = te_layers.ready(case, policy, waits, layouts.some_batch(90, count=6, longest=LONGEST))
    activation_offload.SMALLEST["cuda"], activation_offload.PAGE["cuda"] = 1, 2**20
    there: Any = activation_offload
    there.HostMemory = lambda size, device: HostMemory(size, layouts.CPU)
    pages = activation_offload.offload([layers.chunk.decoder.layers], policy.offload_layers, CUDA)
    with AsCuda():
        layers.once()
        with counting(waits):
            layers.once()
        with watching(layers.chunk) as watch:
            hidden = layers.forward()
            between = watch.there()
            kept = [sum(size for _, size in of.values()) for of in watch.layers]
            layers.backward(hidden)
    flat, gradients = te_layers.real(layers, hidden, case), layers.gradients()
    tokens = layers.micro.tokens.numel()
    host = pages.count * pages.page
    return Answer(Counter(waits.found), flat, gradients, kept, between, watch.most, host, tokens, watch.routed)


if __name__ == "__main__":
    # Under the name by which whoever reads the answers imports it.
    from tests.cuda import te_offload

    te_layers.rehearsed(te_offload.go)
