"""A rank of Transformer Engine layers with the activations of the first layers in host memory between the passes.

Python of Transformer Engine and megatron-core is real (`te`), kernels are plain torch (`te_kernels`, `te_fp8_kernels`).
As a program, this module reads a pickled `Case` from standard input and writes pickled answers to the named file.
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
"""Length limit of a sequence: tokens, less one."""


@dataclass
class Answer:
    """Results of a policy."""

    waits: Counter[tuple[str, str]]
    """(kind, place) → number of host waits for the device."""
    hidden: Any
    """Last hidden states of this rank's tokens without padding, numpy float32 [L, H]."""
    gradients: dict[str, Any]
    """Gradients by parameter name, numpy float32."""
    kept: list[int]
    """Bytes saved by each layer for the backward pass, without parameters."""
    between: list[int]
    """Device bytes of these tensors between the passes."""
    most: int
    """Peak of the device bytes of all layers."""
    host: int
    """Bytes of host memory."""
    tokens: int
    """Tokens of the row."""
    routed: int
    """Token copies for this rank's experts in the last layer."""


@dataclass
class Watch:
    """Recorder of the storages saved by layers, and of their lifetime."""

    parameters: set[int]
    """Addresses of the parameters' storages."""
    layers: list[dict[int, tuple[Any, int]]]
    """Saved storages of each layer: address → (weak reference, bytes)."""
    most: int = 0
    at: int = -1
    """Index of the running layer."""
    routed: int = 0

    def saved(self, tensor: Any) -> None:
        """Records a saved tensor."""
        from torch.multiprocessing.reductions import StorageWeakRef

        if hasattr(tensor, "_fp8_dtype"):  # a weight or its copy: activations are saved as plain numbers and scales
            return
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.layers[self.at][storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def there(self) -> list[int]:
        """Returns the bytes of each layer on the device now."""
        sizes = [sum(size for ref, size in of.values() if not ref.expired()) for of in self.layers]
        self.most = max(self.most, sum(sizes))
        return sizes


@contextmanager
def watching(chunk: Any) -> Iterator[Watch]:
    """Records the storages saved by all layers during a forward pass in the context."""
    import torch

    from skyrl_mega.megatron import activation_offload
    from skyrl_mega.megatron.fp8_parameters import storage_tensors
    from tests.cuda.syncs import AsCuda

    layers = chunk.decoder.layers
    watch = Watch({t.untyped_storage().data_ptr() for t in storage_tensors(chunk.parameters())}, [{} for _ in layers])
    torch_hooks = torch.autograd.graph.saved_tensors_hooks

    class Hooks(torch_hooks):
        """Hooks for saved tensors that also record every tensor."""

        def __init__(self, pack: Any, unpack: Any) -> None:
            def noted(tensor: Any) -> Any:
                watch.saved(tensor)
                with AsCuda():  # a mode is inactive within functions called by the mode
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

    def experts(_: Any, inputs: tuple[Any, ...]) -> None:
        watch.routed = len(inputs[0])

    hooks.append(layers[-1].mlp.experts.linear_fc1.register_forward_pre_hook(experts))
    activation_offload.saved_tensors_hooks = Hooks
    with Hooks(lambda t: t, lambda t: t):
        yield watch
    activation_offload.saved_tensors_hooks = torch_hooks
    for hook in hooks:
        hook.remove()


def go(case: Case, waits: Any) -> list[Answer]:
    """Runs forward and backward through all layers with each policy."""
    programs.join(case)
    return [answer(case, policy, waits) for policy in case.policies]


def answer(case: Case, policy: PolicyConfig, waits: Any) -> Answer:
    """Runs three passes: the first allocates buffers, the second is counted, the third is recorded."""
    from skyrl_mega.megatron import activation_offload
    from skyrl_mega.megatron.host_memory import HostMemory
    from tests.cuda.syncs import CUDA, AsCuda, counting
    from tests.megatron import layouts

    layers = te_layers.ready(case, policy, waits, layouts.some_batch(90, count=6, longest=LONGEST))
    activation_offload.SMALLEST["cuda"], activation_offload.PAGE["cuda"] = 1, 2**20
    module: Any = activation_offload
    module.HostMemory = lambda size, device: HostMemory(size, layouts.CPU)
    pages = activation_offload.offload([layers.chunk.decoder.layers], policy.offload_layers, CUDA)
    with AsCuda():
        layers.once()
        with counting(waits):
            layers.once()
        with watching(layers.chunk) as watch:
            hidden = layers.forward()
            between = watch.there()
            saved = [sum(size for _, size in of.values()) for of in watch.layers]
            layers.backward(hidden)
    flat, gradients = te_layers.real(layers, hidden, case), layers.gradients()
    tokens = layers.micro.tokens.numel()
    host = pages.count * pages.page
    return Answer(Counter(waits.found), flat, gradients, saved, between, watch.most, host, tokens, watch.routed)
