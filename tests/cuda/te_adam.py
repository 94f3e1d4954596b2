"""Transformer Engine's Adam in megatron-core's distributed optimizer, with kernels in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skyrl_mega.config.schema import OptimizerConfig, PolicyConfig
from skyrl_mega.parallel.dims import ParallelDims

STEPS = 3
PIECE = 20_000
"""Bytes of a piece: the model's optimizer has dozens of pieces."""


@dataclass(frozen=True)
class Case:
    """Steps of a model's optimizer with random gradients."""

    hf: dict[str, Any]
    optimizer: OptimizerConfig
    engine: bool
    """True for Transformer Engine's Adam, False for megatron-core's without Transformer Engine."""


@dataclass(frozen=True)
class Answer:
    """Result of a case by parameter name; numpy, moments as float32."""

    adam: str
    """Class of the Adam."""
    start: dict[str, Any]
    """Weights before the first step."""
    masters: dict[str, Any]
    moments: dict[str, dict[str, Any]]
    types: set[str]
    """Dtypes of the moments."""
    weights: dict[str, Any]
    gradients: list[dict[str, Any]]
    """Gradients of each step."""
    away: int
    """Bytes of masters and moments outside the device."""


def multi_tensor_adam(
    _chunk: int, _noop: Tensor, lists: list[list[Tensor]], lr: float, beta1: float, beta2: float, eps: float, step: int,
    mode: int, correction: int, decay: float,
) -> None:  # fmt: skip
    """Computes common/multi_tensor/adam.cu with decoupled decay: float32 arithmetic, moments rounded when written."""
    assert mode == correction == 1
    for g, p, m, v in zip(*lists, strict=True):
        mean = beta1 * m.float() + (1 - beta1) * g.float()
        square = beta2 * v.float() + (1 - beta2) * g.float() ** 2
        update = (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + eps) + decay * p
        p.sub_(lr * update)
        m.copy_(mean)
        v.copy_(square)


def multi_tensor_l2norm(_chunk: int, _noop: Tensor, lists: list[list[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """Returns the norm of all tensors."""
    return torch.stack([t.float().square().sum() for t in lists[0]]).sum().sqrt().view(1), None


def multi_tensor_scale(_chunk: int, _noop: Tensor, lists: list[list[Tensor]], scale: float) -> None:
    """Writes each tensor of the first list times a number into the second list."""
    for source, to in zip(*lists, strict=True):
        to.copy_(source * scale)


KERNELS = {each.__name__: each for each in (multi_tensor_adam, multi_tensor_l2norm, multi_tensor_scale)}


def go(case: Case) -> Answer:
    """Steps the optimizer of a bfloat16 model on one rank."""
    from skyrl_mega.megatron import model as build
    from skyrl_mega.megatron.moments import MOMENTS, inner_optimizers, master_weights
    from skyrl_mega.megatron.optimizer import build_optimizer
    from skyrl_mega.megatron.streamed_optimizer import StreamedOptimizer
    from tests.cuda.ranks import fake_rank

    parallel, device = ParallelDims(), torch.device("cpu")
    policy = PolicyConfig(spec="te" if case.engine else "local", optimizer=case.optimizer)
    with fake_rank(0, parallel):
        torch.manual_seed(0)
        chunks = build.build_model(case.hf, policy, parallel, torch.bfloat16, device)
        named: dict[str, Any] = {name: p for chunk in chunks for name, p in chunk.named_parameters()}
        for p in named.values():
            p.data.normal_(0, 0.05)
        start = {name: p.detach().float().view(-1).numpy().copy() for name, p in named.items()}
        wrapped = build.wrap_ddp(chunks, overlap=False)
        optimizer = build_optimizer(case.optimizer, wrapped, torch.bfloat16)
        streamed = StreamedOptimizer(optimizer, device, PIECE) if case.optimizer.streamed else None
        drawn = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            for p in named.values():
                p.main_grad.normal_(0, 0.1)
            drawn.append({name: p.main_grad.clone().numpy() for name, p in named.items()})
            updated, _, _ = optimizer.step()
            assert updated
        names = {id(p): name for name, p in named.items()}

        def held(t: Tensor) -> Tensor:
            on_host = streamed.host_view(t) if streamed else None
            return (t if on_host is None else on_host).clone()

        state = [(part, p, master) for part in inner_optimizers(optimizer) for p, master in master_weights(part)]
        moments = {
            names[id(p)]: {kind: held(part.optimizer.state[master][kind]) for kind in MOMENTS}
            for part, p, master in state
        }
        every = [t for part, _, m in state for t in (m, *(part.optimizer.state[m][kind] for kind in MOMENTS))]
        return Answer(
            type(state[0][0].optimizer).__name__,
            start,
            {names[id(p)]: held(master.detach()).numpy() for _, p, master in state},
            {name: {kind: t.float().numpy() for kind, t in kinds.items()} for name, kinds in moments.items()},
            {str(t.dtype) for kinds in moments.values() for t in kinds.values()},
            {name: p.detach().float().numpy() for name, p in named.items()},
            drawn,
            sum(t.nbytes for t in every if not t.untyped_storage().nbytes()),
        )


def go_all(_rank: int, _address: str, cases: list[Case]) -> list[Answer]:
    """Answers the cases, either all with Transformer Engine or all without."""
    from skyrl_mega.megatron import cpu

    torch.set_num_threads(1)
    cpu.stand_in()
    return [go(case) for case in cases]
