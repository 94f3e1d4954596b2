"""A rank with parameters in FP8, as Transformer Engine tensors, with kernels in plain torch.

Ranks are processes on gloo. megatron-core's data parallelism and optimizer, and Transformer Engine's tensors, are real.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_mega.config.schema import PolicyConfig
from skyrl_mega.parallel.dims import ParallelDims
from tests.cuda.te_fp8_kernels import BLOCK
from tests.cuda.together import one_by_one

LARGEST = 448.0
STEPS = 2


@dataclass(frozen=True)
class Case:
    """Work of the ranks."""

    folder: Path
    """Folder with the models `model` and `other`; gets a checkpoint `<name>-checkpoint` and an export
    `<name>-export`."""
    parallel: ParallelDims
    name: str
    policy: PolicyConfig


@dataclass
class Answer:
    """Results of a rank: name → numpy array, by moment."""

    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tensors of the weight sync, FP8 as uint8, bfloat16 as float32."""
    backward: dict[str, bool] = field(default_factory=dict)
    """True if backward and forward passes read the same values, in all parameters."""
    masters: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    """Dtypes of the data-parallel gather buffers."""
    gathered: int = 0
    """Bytes of the data-parallel gather buffers."""
    fp8: set[str] = field(default_factory=set)
    """Names of the parameters in FP8."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of the parameters' memory, and of the reference in host memory."""
    away: int = 0
    """Device bytes of the parameters while offloaded."""
    excess: int = 0
    """Unneeded bytes in the storages of master weights."""
    pieces: list[int] = field(default_factory=list)
    """Elements of each rounding call."""
    copies: int = 0
    """Number of storages that hold the parameters."""


PIECE = 300_000
"""Piece size: larger than any parameter, smaller than all parameters together."""


def in_pieces(pieces: list[int]) -> None:
    """Records the number of elements of every rounding call to Transformer Engine."""
    from transformer_engine.pytorch.tensor import utils

    from skyrl_mega.megatron import fp8_parameters

    module: Any = fp8_parameters
    module.PIECE = PIECE
    rounds = utils.cast_master_weights_to_fp8

    def noted(params: list[Tensor], *rest: Any, **more: Any) -> None:
        pieces.append(sum(p.numel() for p in params))
        rounds(params, *rest, **more)

    utils.cast_master_weights_to_fp8 = noted


def go(rank: int, address: str, case: Case) -> Answer:
    """Loads, steps, swaps in a reference, offloads, resets, saves and restores a rank, and records the tensors."""
    import json

    import torch.distributed as dist

    from skyrl_mega.megatron import model
    from skyrl_mega.megatron.worker import ModelWorker
    from tests.cuda.as_cpu import CudaAsCpu
    from tests.megatron.layouts import CPU

    one_by_one()
    host, port = address.split(":")
    parallel = case.parallel
    store = dist.TCPStore(host, int(port), parallel.ranks, is_master=rank == 0, timeout=timedelta(seconds=120))
    hf = json.loads((case.folder / "model" / "config.json").read_text())
    answer = Answer()
    in_pieces(answer.pieces)
    with CudaAsCpu():
        model.join(rank, parallel, store, CPU, 120)
        worker = ModelWorker(hf, case.policy, parallel, dtype=torch.bfloat16, device=CPU)
        watch = Watch(worker, answer)
        watch.look("built", deep=False)
        worker.load(case.folder / "model")
        watch.look("loaded")
        for step in range(STEPS):
            watch.step(step)
            watch.look(f"step {step}")
        worker.keep_reference(case.folder / "other")
        watch.look("reference kept")
        with worker._active_weights(reference=True):
            watch.look("reference", deep=False)
        watch.look("reference gone")
        watch.park()
        watch.look("back")
        worker.offload(["optimizer"])
        worker.reset_optimizer(case.policy.optimizer)
        worker.onload(["optimizer"])
        watch.look("reset")
        folder = case.folder / f"{case.name}-checkpoint"
        folder.mkdir(exist_ok=True)
        dist.barrier()
        worker.save(folder)
        dist.barrier()
        worker.export(case.folder / f"{case.name}-export", case.folder / "model")
        watch.step(9)
        worker.restore(folder)
        watch.look("restored")
        alone = ModelWorker(hf, case.policy, parallel, dtype=torch.bfloat16, device=CPU, trainable=False)
        alone.load(case.folder / "model")
        Watch(alone, answer).look("alone", deep=False)
    dist.barrier()
    return answer


class Watch:
    """Records a rank's tensors."""

    def __init__(self, worker: Any, answer: Answer) -> None:
        from megatron.core.fp8_utils import is_float8tensor

        self.worker, self.answer = worker, answer
        self.fp8 = {name: p for name, p in worker.params.items() if is_float8tensor(p)}

    def look(self, moment: str, *, deep: bool = True) -> None:
        """Records the present tensors; with `deep`, also masters and values read by a backward pass."""
        from skyrl_mega.megatron.fp8_parameters import storage_tensors
        from skyrl_mega.megatron.moments import inner_optimizers, master_weights

        def plain(t: Tensor) -> Any:
            t = t.detach()
            whole = t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t.float()
            return whole.clone().numpy()

        worker, answer = self.worker, self.answer
        taken = worker.weights() if moment != "reference" else _taken(worker)
        answer.weights[moment] = {name: plain(t) for name, t in taken.items()}
        answer.fp8 = set(self.fp8)
        if not deep:
            return
        names = {id(p): name for name, p in worker.params.items()}
        answer.masters[moment] = {
            names[id(p)]: master.detach().clone().numpy()
            for part in inner_optimizers(worker.optimizer)
            for p, master in master_weights(part)
        }
        every = [master for part in inner_optimizers(worker.optimizer) for _, master in master_weights(part)]
        answer.excess += sum(m.untyped_storage().nbytes() - m.nbytes for m in every)
        answer.backward[moment] = all(_agree(p) for p in self.fp8.values())
        storages = [t.untyped_storage() for t in storage_tensors(worker.params.values())]
        answer.bytes["parameters"] = sum({s._cdata: s.nbytes() for s in storages}.values())
        answer.copies = len({s._cdata for s in storages})
        if worker._reference is not None:
            answer.bytes["reference"] = worker._reference.host_size
        buffers = [b for chunk in worker.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        answer.buffers = {str(b.param_data.dtype) for b in buffers}
        answer.gathered = sum(b.param_data.nbytes for b in buffers)

    def step(self, number: int) -> None:
        """Takes an optimizer step with random gradients, different on every data rank."""
        worker = self.worker
        worker.optimizer.zero_grad()
        torch.manual_seed(100 * number + torch.distributed.get_rank())
        for p in worker.params.values():
            p.main_grad.normal_(0, 0.1)
        for chunk in worker.chunks:
            if chunk.ddp_config.overlap_grad_reduce:
                chunk.start_grad_sync()
            chunk.finish_grad_sync()
        updated, _, _ = worker.optimizer.step()
        assert updated

    def park(self) -> None:
        """Offloads parameters and optimizer and reloads both."""
        from skyrl_mega.megatron.fp8_parameters import storage_tensors

        worker = self.worker
        worker.offload(["parameters", "gradients", "optimizer"])
        self.answer.away = sum(t.untyped_storage().nbytes() for t in storage_tensors(worker.params.values()))
        worker.onload(["parameters", "gradients", "optimizer"])


def _taken(worker: Any) -> dict[str, Tensor]:
    from skyrl_mega.megatron.fp8_parameters import sync_tensors

    return sync_tensors(worker.params)


def _agree(p: Any) -> bool:
    """Returns True if a parameter's column-wise numbers and scales are the transposed row-wise numbers and scales."""
    rows, columns = (-(-n // BLOCK) for n in p.shape)
    scales = p._columnwise_scale_inv[:columns, :rows].T
    return torch.equal(p._columnwise_data.T, p._rowwise_data) and torch.equal(scales, p._rowwise_scale_inv[:, :columns])
