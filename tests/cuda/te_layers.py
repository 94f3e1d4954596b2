"""A rank of Transformer Engine layers runs forward and backward on a CPU, with the host's waits counted.

Python of Transformer Engine and megatron-core is real (`te`), kernels are plain torch (`te_kernels`), ranks are
processes on gloo, started by `programs.run`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from skyrl_mega.config.derived import shares_prefixes
from skyrl_mega.config.precision import row_multiple
from skyrl_mega.config.schema import PolicyConfig
from tests.cuda import programs
from tests.cuda.linears import Linear, watched
from tests.cuda.programs import Case


@dataclass
class Answer:
    """Results of a policy."""

    waits: Counter[tuple[str, str]]
    """(kind, place) → number of host waits for the device; counted for `te` layers only."""
    hidden: Any
    """Last hidden states of this rank's tokens without padding, numpy float32 [L, H]."""
    gradients: dict[str, Any]
    """Gradients by parameter name, numpy float32."""
    fields: dict[str, Any]
    """Fields of megatron-core's configuration."""
    kept: int
    """Bytes kept by the last layer for the backward pass, without parameters."""
    tokens: int
    """Tokens of the row."""
    routed: int
    """Rows of this rank's experts in the last layer, padding of an expert's rows included."""
    linears: dict[str, Linear]
    """Inputs and outputs of linear layers in the last `te` layer: attention's projection and the experts' products."""


@dataclass
class Kept:
    """Tensors saved by a layer."""

    storages: dict[int, Any] = field(default_factory=dict)
    """Storages by address, referenced here so that no address is reused."""
    bytes: int = 0
    routed: int = 0
    """Rows received by the layer's experts."""


def go(case: Case, waits: Any) -> list[Answer]:
    """Runs forward and backward through all layers with each policy."""
    programs.join(case)
    return [answer(case, policy, waits) for policy in case.policies]


@dataclass
class Ready:
    """A rank's layers and the inputs of the layers."""

    opened: Any
    """The `ModelWorker`."""
    chunk: Any
    """Model with trainable parameters."""
    micro: Any
    gradient: Any
    """Gradient of this rank's last hidden states."""

    def forward(self) -> Any:
        """Returns the last hidden states."""
        for p in self.chunk.parameters():
            p.grad = None
        self.chunk.set_is_first_microbatch()  # as in megatron-core's schedule
        micro = self.micro
        return self.chunk(micro.tokens, micro.positions, None, packed_seq_params=micro.row, padding_mask=micro.padding)

    def backward(self, hidden: Any) -> None:
        """Computes the parameters' gradients."""
        import torch

        gradient = self.gradient.view(hidden.shape).to(hidden.dtype)
        torch.autograd.backward([hidden], [gradient])  # `Tensor.backward` would leave the modes

    def once(self) -> Any:
        """Runs forward and backward and returns the last hidden states."""
        import torch

        fp8 = self.opened.fp8
        if fp8:  # local spec: the weights are rounded on the CPU, not by a Triton kernel
            with torch._C.DisableTorchFunction():
                fp8.begin()
        hidden = self.forward()
        self.backward(hidden)
        if fp8:
            fp8.end()
        return hidden

    def gradients(self) -> dict[str, Any]:
        """Returns the gradients by parameter name, numpy float32."""
        return {name: p.grad.float().numpy() for name, p in self.chunk.named_parameters() if p.grad is not None}


def ready(case: Case, policy: PolicyConfig, waits: Any, batch: Any, dtype: str = "bfloat16") -> Ready:
    """Opens the case's model, with weights of this type, for one row of the batch."""
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
    share = shares_prefixes(policy, parallel.context)
    micro = pack(batch, context=parallel.context, context_rank=at.cp, tensor=parallel.tensor, rows=rows, share=share)
    hf = json.loads((case.model / "config.json").read_text())
    with CudaAsCpu(), Counted(waits):  # `Counted` marks the tensors that stay on the host
        opened = ModelWorker(hf, policy, parallel, dtype=getattr(torch, dtype), device=layouts.CPU, trainable=False)
        opened.load(case.model)
        for_backward(opened)
    chunk = model.unwrap_gpt(opened.chunks[0]).train()
    chunk.requires_grad_()
    mark_device([*chunk.parameters(), *storage_tensors(chunk.parameters()), *chunk.buffers()])
    with waits.pause():
        gradient = drawn(~micro.padding.view(-1), chunk.config.hidden_size).chunk(parallel.tensor)[at.tp]
    return Ready(opened, chunk, micro, gradient)


def answer(case: Case, policy: PolicyConfig, waits: Any) -> Answer:
    """Runs three passes: the first allocates buffers, the second is counted, the third is recorded."""
    from tests.cuda.syncs import AsCuda, counting
    from tests.megatron import layouts

    at = case.parallel.coordinates(case.rank)
    layers = ready(case, policy, waits, layouts.some_batch(90, count=6, seed=at.dp))
    chunk, te_layers = layers.chunk, policy.spec == "te"
    with AsCuda():
        with keeping(chunk) as saved:  # also allocates work spaces and chooses kernels
            layers.once()
        with counting(waits) if te_layers else nullcontext():
            hidden = layers.once()
        with watched(linears(chunk) if te_layers else {}) as products:
            layers.once()
    fields = {k: v for k, v in vars(chunk.config).items() if isinstance(v, bool | int | str | list)}
    tokens, flat = layers.micro.tokens.numel(), real(layers, hidden, case)
    return Answer(Counter(waits.found), flat, layers.gradients(), fields, saved.bytes, tokens, saved.routed, products)


def real(layers: Ready, hidden: Any, case: Case) -> Any:
    """Returns the hidden states of this rank's tokens without padding, numpy float32 [L, H]."""
    is_token = ~layers.micro.padding.view(case.parallel.tensor, -1)[case.parallel.coordinates(case.rank).tp]
    return hidden.detach().float().view(-1, hidden.shape[-1])[is_token].numpy()


def for_backward(opened: Any) -> None:
    """Creates the backward copies of FP8 parameters: a worker without training has no such copies."""
    from megatron.core.fp8_utils import is_float8tensor, post_all_gather_processing

    if fp8 := [p for p in opened.params.values() if is_float8tensor(p)]:
        post_all_gather_processing(fp8)


def drawn(is_token: Any, width: int) -> Any:
    """Returns a gradient of the last hidden states [T, H] that is zero at padding."""
    import torch

    whole = torch.zeros(len(is_token), width)
    whole[is_token] = torch.linspace(-1, 1, int(is_token.sum()) * width).view(-1, width)
    return whole


def linears(chunk: Any) -> dict[str, Any]:
    """Returns the linear layers of the last layer."""
    layer = chunk.decoder.layers[-1]
    experts = layer.mlp.experts
    return {"proj": layer.self_attention.linear_proj, "fc1": experts.linear_fc1, "fc2": experts.linear_fc2}


@contextmanager
def keeping(chunk: Any) -> Iterator[Kept]:
    """Records the storages saved by the last layer for the backward pass, during a forward pass in the context."""
    import torch

    from skyrl_mega.megatron.fp8_parameters import storage_tensors

    saved, inside = Kept(), False
    layer = chunk.decoder.layers[-1]
    parameters = {t.untyped_storage().data_ptr() for t in storage_tensors(chunk.parameters())}

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False
        saved.bytes = sum(storage.nbytes() for storage in saved.storages.values())  # some storages are emptied later

    def save(t: Any) -> Any:
        if hasattr(t, "_fp8_dtype"):  # a weight or its copy: activations are saved as plain numbers and scales
            return t
        storage = t.untyped_storage()
        if inside and storage.data_ptr() not in parameters:
            saved.storages[storage._cdata] = storage
        return t

    def experts(_: Any, inputs: tuple[Any, ...]) -> None:
        saved.routed = len(inputs[0])

    hooks = [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    hooks.append(getattr(layer.mlp.experts, "linear_fc1", layer.mlp.experts).register_forward_pre_hook(experts))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        yield saved
    for hook in hooks:
        hook.remove()
