"""Tests of the policy on a simulated CUDA device: the tensors of a rank and their devices, and the result of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_mega.config.derived import logit_chunk
from skyrl_mega.config.schema import BuildConfig, MoeConfig
from skyrl_mega.megatron import heads, objectives, packed_attention
from skyrl_mega.megatron.packing import MicroBatch, pack
from skyrl_mega.megatron.worker import ModelWorker
from skyrl_mega.models.tiny import build, hf_config
from skyrl_mega.parallel.dims import ParallelDims
from tests.cuda.fake_cuda import CUDA, CpuAsCuda, fake_cuda, with_values
from tests.cuda.ranks import fake_rank
from tests.megatron import layouts
from tests.support.ranks import run_ranks

pytest.importorskip("triton", reason="Triton is not installed: the head's kernels cannot be imported")

from skyrl_mega.kernels import linear_logprobs_triton

MOE = BuildConfig(layers=2)
DENSE = BuildConfig(architecture="qwen2", head_dim=16, layers=2, tied=True)


def opened(config: BuildConfig, parallel: ParallelDims, dtype: torch.dtype, **changes: Any) -> ModelWorker:
    policy = layouts.policy_config(spec="local", **changes)
    return ModelWorker(hf_config(config), policy, parallel, dtype=dtype, device=CUDA)


def tensors_of(rank: ModelWorker) -> dict[str, Tensor]:
    """Returns all tensors of a rank allocated before its first step, except Adam's moments."""
    tensors = {f"parameter {name}": p for name, p in rank.params.items()}
    tensors |= {f"gradient {name}": p.main_grad for name, p in rank.params.items()}  # type: ignore[attr-defined]
    for i, chunk in enumerate(rank.chunks):
        tensors |= {f"buffer {i} {name}": b for name, b in chunk.named_buffers()}
    for i, part in enumerate(rank.optimizer.chained_optimizers):
        for j, group in enumerate(part.optimizer.param_groups):
            tensors |= {f"master {i} {j} {k}": p for k, p in enumerate(group["params"])}
        for j, state in enumerate(part.optimizer.state.values()):
            tensors |= {f"moment {i} {j} {kind}": t for kind, t in state.items() if kind != "step"}
    return tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("config", "parallel", "rank"),
    [
        (MOE, ParallelDims(), 0),
        (MOE, ParallelDims(4, tensor=2, expert=4), 3),
        (MOE, ParallelDims(4, pipeline=2, virtual_pipeline=1), 3),
        (DENSE, ParallelDims(2, pipeline=2, virtual_pipeline=1), 1),
        (DENSE, ParallelDims(4, tensor=2, context=2), 2),
    ],
    ids=["moe", "moe TP2 EP4", "moe PP2", "dense PP2", "dense TP2 CP2"],
)
def test_all_that_a_rank_holds_is_on_its_device(
    config: BuildConfig, parallel: ParallelDims, rank: int, dtype: torch.dtype
) -> None:
    with fake_cuda(), fake_rank(rank, parallel):
        worker = opened(config, parallel, dtype)
        assert {name: tuple(p.shape) for name, p in worker.params.items()} == dict(worker.shard.params)
        for name, tensor in tensors_of(worker).items():
            assert tensor.device == CUDA, name
            wanted = dtype if name.startswith("parameter") else torch.float32
            assert tensor.dtype == wanted, name
        for chunk in worker.chunks:  # CUDA's default
            assert chunk.ddp_config.overlap_grad_reduce and chunk.ddp_config.overlap_param_gather


@pytest.mark.parametrize("context", [1, 2])
def test_a_packed_row_is_on_the_device(context: int) -> None:
    batch = layouts.some_batch(100)
    with fake_cuda():
        micro = with_values(pack)(batch, context=context, context_rank=0, tensor=2).to(CUDA)
        row = micro.row
        tensors = [micro.tokens, micro.positions, micro.targets, micro.source, *micro.columns.values()]
        tensors += [row.cu_seqlens_q, row.cu_seqlens_kv, row.sequence_L, row.position_L]
        tensors += [row.global_L] if context > 1 else []
        assert all(t.device == CUDA for t in tensors)
        assert all(t.dtype == torch.float32 for t in micro.columns.values())
        assert row.cu_seqlens_q.dtype == torch.int32 and micro.tokens.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("parallel", "rank", "changes"),
    [
        (ParallelDims(), 0, {}),
        (ParallelDims(2, tensor=2), 1, {"recompute": "full"}),
        (ParallelDims(2, context=2), 1, {}),
    ],
    ids=["one", "TP2", "CP2"],
)
def test_forward_through_layers_and_head(
    parallel: ParallelDims, rank: int, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    """Runs forward: attention is torch's variable-length kernel in half precision, the padded grid in float32."""
    batch = layouts.some_batch(100)
    micros = [batch.take(range(0, 6)), batch.take(range(6, 13))]
    seen: list[tuple[Tensor, Tensor, MicroBatch]] = []

    def finish(model: Any, micro: MicroBatch, _: int, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        head = dict(vocab=worker.vocab, temperature=1.0, chunk=logit_chunk(worker.policy, "cuda"))
        logprobs, entropy = heads.logprobs_of(model, hidden, micro, **head)
        seen.append((logprobs, entropy, micro))
        loss, metrics = objectives.supervised(objectives.inputs_of(logprobs, entropy, micro))
        return loss, {"loss": loss.detach(), **metrics}

    kernel = mock.Mock(side_effect=packed_attention.varlen_attn)
    sums = mock.MagicMock()  # the launch has fake tensors without memory
    with (
        fake_cuda(),
        fake_rank(rank, parallel),
        mock.patch.object(packed_attention, "varlen_attn", kernel),
        mock.patch.object(linear_logprobs_triton, "_sums", sums),
    ):
        worker = opened(DENSE, parallel, dtype, **changes)
        from megatron.core.pipeline_parallel import schedules

        with mock.patch.object(schedules, "backward_step", return_value=None):
            outputs = worker._run(micros, finish, forward_only=False)
        assert len(seen) == len(micros) == len(outputs)
        for logprobs, entropy, micro in seen:
            assert logprobs.shape == entropy.shape == micro.targets.shape
            assert logprobs.device == entropy.device == CUDA and logprobs.dtype == torch.float32
            assert logprobs.requires_grad
    assert sums.__getitem__.call_count == len(micros)
    assert kernel.call_count == (DENSE.layers * len(micros) if dtype == torch.bfloat16 else 0)


# ---- with values ---------------------------------------------------------------------------------------------------


def steps(rank: int, address: str, path: Path, parallel: ParallelDims, dtype: torch.dtype, as_cuda: bool) -> Any:
    """Returns losses, norms and log-probs of a rank with tensors that report CUDA, or the CPU."""
    # Only tests/kernels runs the fused head's kernels.
    changes: dict[str, Any] = {"spec": "local", "recompute": "full", "head": "chunked"} if as_cuda else {}
    changes |= {"moe": MoeConfig(aux_loss=0.1)}
    if not as_cuda:
        return run_steps(layouts.open_rank(rank, address, path, parallel, layouts.policy_config(**changes), dtype))
    with (
        mock.patch.object(layouts, "CPU", CUDA),
        CpuAsCuda(),
        mock.patch.object(dist, "init_process_group", on_gloo(dist.init_process_group)),
        mock.patch.object(dist, "batch_isend_irecv", as_they_are(dist.batch_isend_irecv)),
        mock.patch.object(packed_attention, "varlen_attn", one_by_one),
    ):
        worker = layouts.open_rank(rank, address, path, parallel, layouts.policy_config(**changes), dtype)
        assert all(c.ddp_config.overlap_param_gather for c in worker.chunks)
        return run_steps(worker)


def on_gloo(init: Any) -> Any:
    def join(backend: str, *args: Any, device_id: torch.device | None, **options: Any) -> None:
        assert (backend, device_id) == ("nccl", CUDA)
        init("gloo", *args, **options)

    return join


def as_they_are(send: Any) -> Any:
    """Returns the function wrapped to ask the group for a backend by the real device of the tensors, the CPU for
    gloo."""

    def bare(operations: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return send(operations)

    return bare


def run_steps(worker: ModelWorker) -> Any:
    _, micros = layouts.deal(layouts.some_batch(100), worker)
    trained = [worker.train(micros, objectives.supervised) for _ in range(3)]
    pairs = worker.logprobs(micros) or []
    return trained, [(np.array(values), np.array(entropy)) for values, entropy in pairs]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int,
               *, window_size: tuple[int, int], enable_gqa: bool, scale: float | None = None) -> Tensor:  # fmt: skip
    """Computes the attention of each sequence alone, as documented for torch's kernel: the causal mask ends at the last
    key."""
    assert window_size == (-1, 0) and enable_gqa and cu_q.dtype == cu_k.dtype == torch.int32
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    assert ends_q[-1] == len(q) and ends_k[-1] == len(k) == len(v) and q.shape[-1] == k.shape[-1] == v.shape[-1]
    outs = []
    for i in range(len(ends_q) - 1):
        a, b, c, d = ends_q[i], ends_q[i + 1], ends_k[i], ends_k[i + 1]
        assert b - a <= longest_q and d - c <= longest_k
        groups = q.shape[1] // k.shape[1]
        keys, values = (x[c:d].float().repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys) * (scale or q.shape[-1] ** -0.5)
        allowed = np.arange(d - c)[None] <= np.arange(b - a)[:, None] + (d - c) - (b - a)
        scores = scores.masked_fill(~torch.from_numpy(allowed), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype))
    return torch.cat(outs)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in (("moe", MOE), ("dense", DENSE)):
        build(config, folder / name, seed=1)
    return {name: folder / name for name in ("moe", "dense")}


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("moe", ParallelDims(2, expert=2)),
        ("dense", ParallelDims(2, tensor=2, expert_tensor=2)),
        ("dense", ParallelDims(2, pipeline=2)),
    ],
    ids=["moe EP2", "dense TP2", "dense PP2"],
)
def test_steps_on_cuda_are_those_on_a_cpu(models: dict[str, Path], model: str, parallel: ParallelDims) -> None:
    """Compares float32 steps with all CUDA branches except the half-precision kernel; overlap and recomputation are
    on."""
    actual, expected = (
        run_ranks(parallel.ranks, steps, models[model], parallel, torch.float32, as_cuda) for as_cuda in (True, False)
    )
    compare(actual, expected, 1e-4)


@pytest.mark.parametrize("parallel", [ParallelDims(), ParallelDims(2, context=2)], ids=["one", "CP2"])
def test_the_kernel_for_half_precision_attends_as_the_grid(models: dict[str, Path], parallel: ParallelDims) -> None:
    """Compares in bfloat16, with a noise of about 1e-2; `tests/megatron/test_attention.py` compares to 1e-6 in
    float32."""
    actual, expected = (
        run_ranks(parallel.ranks, steps, models["dense"], parallel, torch.bfloat16, as_cuda)
        for as_cuda in (True, False)
    )
    compare(actual, expected, 5e-2)


def compare(actual: list[Any], expected: list[Any], rel: float) -> None:
    for (one, logprobs), (other, others) in zip(actual, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.keys() == b.keys()
            for name in set(a) & {"loss", "grad_norm", "lr"}:
                assert a[name] == pytest.approx(b[name], rel=rel), name
        for pair, same in zip(logprobs, others, strict=True):
            for x, y in zip(pair, same, strict=True):
                np.testing.assert_allclose(x, y, rtol=rel, atol=10 * rel)
