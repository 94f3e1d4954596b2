"""A rank whose parameters are in FP8, as Transformer Engine's own tensors, over stand-ins of its kernels.

Run as a program it reads a pickled `Case` from standard input and writes what it found to the file that is named. Ranks
are processes on gloo; megatron-core's data parallelism and optimizer, and Transformer Engine's tensors, are real.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_mega.config.schema import PolicyConfig
from skyrl_mega.parallel.dims import ParallelDims
from tests.cuda.te_adam import multi_tensor_adam, multi_tensor_l2norm, multi_tensor_scale

BLOCK, LARGEST = 128, 448.0
STEPS = 2


@dataclass(frozen=True)
class Case:
    """What one rank is to do."""

    rank: int
    address: str
    folder: Path
    """With two models, `model` and `other`; a checkpoint goes to `<name>-checkpoint`, an export to `<name>-export`."""
    parallel: ParallelDims
    name: str
    policy: PolicyConfig


@dataclass
class Answer:
    """What it found: names → numpy arrays, by the moment."""

    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the sync takes, FP8 as uint8, bfloat16 as float32."""
    backward: dict[str, bool] = field(default_factory=dict)
    """Whether what a backward pass reads is what a forward pass reads, in all parameters."""
    masters: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    """Types of what data parallelism gathers."""
    gathered: int = 0
    """Bytes of it."""
    fp8: set[str] = field(default_factory=set)
    """Names of the parameters in FP8."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Of the parameters' memory, and of the reference's in host memory."""
    away: int = 0
    """Bytes of the parameters that the device holds while they are away."""
    excess: int = 0
    """Bytes of memory that master weights lie in and do not need."""
    pieces: list[int] = field(default_factory=list)
    """Numbers of the parameters that were rounded at once."""
    copies: int = 0
    """Storages that the parameters lie in."""


# ---- kernels -----------------------------------------------------------------------------------------------------


def _blocks(values: Tensor) -> Tensor:
    """Numbers of the blocks of a matrix's elements, int64 like it."""
    rows, columns = (torch.arange(n) // BLOCK for n in values.shape)
    return rows[:, None] * 10_000 + columns[None]


def _amax(values: Tensor, shape: tuple[int, int]) -> Tensor:
    found = torch.zeros(shape)
    for i in range(-(-values.shape[0] // BLOCK)):
        for j in range(-(-values.shape[1] // BLOCK)):
            block = values[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            found[i, j] = block.float().abs().max()
    return found


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    spread = scale.repeat_interleave(BLOCK, 0)[: values.shape[0]].repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
    return (values.float() * spread).to(torch.float8_e4m3fn).view(torch.uint8)


def multi_tensor_compute_scale_and_scale_inv(
    _chunk: int, _noop: Tensor, lists: list[list[Tensor]], largest: float, powers: bool, epsilon: float
) -> None:
    """common/multi_tensor/compute_scale.cu, float32 scales."""
    assert not powers and not epsilon, "scales are powers of two: NVTE_FP8_BLOCK_SCALING_FP32_SCALES was not read"
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(torch.where(amax > 0, largest / amax, torch.ones(())))
        inverse.copy_(1 / scale)


def fp8_block_scaling_compute_partial_amax(
    values: Tensor, amax: Tensor, rows: int, columns: int, start: int, block: int
) -> None:
    """Of a run of a flat matrix: its part of every block's largest magnitude."""
    whole = torch.zeros(rows * columns)
    whole[start : start + values.numel()] = values.float().view(-1)
    amax.copy_(_amax(whole.view(rows, columns), tuple(amax.shape)))


def fp8_block_scaling_partial_cast(
    values: Tensor, out: Tensor, scale: Tensor, rows: int, columns: int, start: int, block: int, dtype: Any
) -> None:
    """Rounds a run of a flat matrix."""
    whole = torch.zeros(rows * columns)
    whole[start : start + values.numel()] = values.float().view(-1)
    out.copy_(_scaled(whole.view(rows, columns), scale).view(-1)[start : start + values.numel()])


def fp8_transpose(numbers: Tensor, _dtype: Any, out: Tensor | None = None) -> Tensor:
    """Bytes, transposed."""
    return numbers.T.contiguous() if out is None else out.copy_(numbers.T)


def quantize(values: Tensor, quantizer: Any, out: Any = None, _noop: Any = None) -> Any:
    """A whole matrix, in blocks of 128 × 128."""
    assert quantizer.block_scaling_dim == 2 and not quantizer.force_pow_2_scales
    if out is None:
        out = create_empty_quantized_tensor(quantizer, list(values.shape), values.dtype, values.device, False)
    amax = _amax(values.detach(), tuple(quantizer.get_scale_shape(values.shape, False)))
    scale, inverse = torch.empty_like(amax), torch.zeros_like(amax)
    multi_tensor_compute_scale_and_scale_inv(0, amax, [[amax], [scale], [inverse]], LARGEST, False, 0.0)
    numbers = _scaled(values.detach(), scale)
    if out._rowwise_data is not None:
        out._rowwise_data.copy_(numbers)
        out._rowwise_scale_inv.copy_(inverse)
    if out._columnwise_data is not None:
        out._columnwise_data.copy_(numbers.T)
        _transposed(inverse, out._columnwise_scale_inv)
    return out


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, _pinned: bool
) -> Any:
    """As its own Python says of it: which tensors, of which shapes."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor

    made = dict.fromkeys(("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"))
    for name, (inner, kind) in quantizer.inner_tensor_specs(tuple(shape)).items():
        made[name] = torch.zeros(inner, dtype=kind, device=device)
    return Float8BlockwiseQTensor(
        shape=shape,
        dtype=dtype,
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        is_2D_scaled=quantizer.block_scaling_dim == 2,
        **{name.removeprefix("_"): t for name, t in made.items()},
    )


def _transposed(scales: Tensor, into: Tensor) -> None:
    i, j = (min(a, b) for a, b in zip(into.shape, scales.T.shape, strict=True))
    into[:i, :j].copy_(scales.T[:i, :j])


KERNELS = (
    multi_tensor_adam,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_compute_scale_and_scale_inv,
    fp8_block_scaling_compute_partial_amax,
    fp8_block_scaling_partial_cast,
    fp8_transpose,
    create_empty_quantized_tensor,
    quantize,
)


def one_by_one() -> None:
    """Collectives that megatron-core issues together are issued one after another: gloo lays what comes together into
    one tensor of one type, where NCCL sends each as it is."""
    from megatron.core.distributed import param_and_grad_buffer

    module: Any = param_and_grad_buffer
    module._coalescing_manager = lambda *_, **__: contextlib.nullcontext(Done())
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(module, name, _at_once(getattr(module, name)))


class Done:
    """What came together, and is over."""

    def wait(self) -> None:
        """There is nothing to wait for."""


def _at_once(collective: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> None:
        collective(*args, **kwargs | {"async_op": False})

    return run


# ---- the rank ----------------------------------------------------------------------------------------------------


PIECE = 300_000
"""More numbers than any parameter has, and fewer than all."""


def in_pieces(pieces: list[int]) -> None:
    """Notes what Transformer Engine is given at once, whoever gives it."""
    from transformer_engine.pytorch.tensor import utils

    from skyrl_mega.megatron import fp8_parameters

    module: Any = fp8_parameters
    module.PIECE = PIECE
    rounds = utils.cast_master_weights_to_fp8

    def noted(params: list[Tensor], *rest: Any, **more: Any) -> None:
        pieces.append(sum(p.numel() for p in params))
        rounds(params, *rest, **more)

    utils.cast_master_weights_to_fp8 = noted


def go(case: Case) -> Answer:
    """Loads, steps, exchanges with a reference, parks, resets, saves, restores."""
    import json

    import torch.distributed as dist

    from skyrl_mega.megatron import model
    from skyrl_mega.megatron.worker import ModelWorker
    from tests.cuda.as_cpu import CudaAsCpu
    from tests.megatron.layouts import CPU

    host, port = case.address.split(":")
    parallel = case.parallel
    store = dist.TCPStore(host, int(port), parallel.ranks, is_master=case.rank == 0, timeout=timedelta(seconds=120))
    hf = json.loads((case.folder / "model" / "config.json").read_text())
    answer = Answer()
    in_pieces(answer.pieces)
    with CudaAsCpu():
        model.join(case.rank, parallel, store, CPU, 120)
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
        with worker._weights(reference=True):
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
    """Writes down what a rank has."""

    def __init__(self, worker: Any, answer: Answer) -> None:
        from megatron.core.fp8_utils import is_float8tensor

        self.worker, self.answer = worker, answer
        self.fp8 = {name: p for name, p in worker.params.items() if is_float8tensor(p)}

    def look(self, moment: str, *, deep: bool = True) -> None:
        """Now; `deep`: masters and what a backward pass reads too."""
        from skyrl_mega.megatron.fp8_parameters import memory
        from skyrl_mega.megatron.moments import masters, parts

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
            for part in parts(worker.optimizer)
            for p, master in masters(part)
        }
        every = [master for part in parts(worker.optimizer) for _, master in masters(part)]
        answer.excess += sum(m.untyped_storage().nbytes() - m.nbytes for m in every)
        answer.backward[moment] = all(_agree(p) for p in self.fp8.values())
        held = [t.untyped_storage() for t in memory(worker.params.values())]
        answer.bytes["parameters"] = sum({s._cdata: s.nbytes() for s in held}.values())
        answer.copies = len({s._cdata for s in held})
        if worker._reference is not None:
            answer.bytes["reference"] = worker._reference.host_size
        buffers = [b for chunk in worker.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        answer.buffers = {str(b.param_data.dtype) for b in buffers}
        answer.gathered = sum(b.param_data.nbytes for b in buffers)

    def step(self, number: int) -> None:
        """An optimizer step with drawn gradients, of which every data rank has another."""
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
        """Parameters and optimizer leave, and come back after others had the memory."""
        from skyrl_mega.megatron.fp8_parameters import memory

        worker = self.worker
        worker.offload(["parameters", "gradients", "optimizer"])
        self.answer.away = sum(t.untyped_storage().nbytes() for t in memory(worker.params.values()))
        worker.onload(["parameters", "gradients", "optimizer"])


def _taken(worker: Any) -> dict[str, Tensor]:
    from skyrl_mega.megatron.fp8_parameters import on_the_wire

    return on_the_wire(worker.params)


def _agree(p: Any) -> bool:
    """A parameter's two sets of numbers and scales are one another's transpose."""
    rows, columns = (-(-n // BLOCK) for n in p.shape)
    scales = p._columnwise_scale_inv[:columns, :rows].T
    return torch.equal(p._columnwise_data.T, p._rowwise_data) and torch.equal(scales, p._rowwise_scale_inv[:, :columns])


def main() -> None:
    """Answers for the case on standard input."""
    case: Case = pickle.load(sys.stdin.buffer)
    from tests.cuda import te

    te.install({kernel.__name__: kernel for kernel in KERNELS})
    from skyrl_mega.megatron import cpu

    torch.set_num_threads(1)
    cpu.stand_in()
    one_by_one()
    answer = go(case)
    with open(sys.argv[1], "wb") as file:
        pickle.dump(answer, file)


if __name__ == "__main__":
    # Under the name by which whoever reads the answers imports it.
    from tests.cuda import te_fp8

    te_fp8.main()
