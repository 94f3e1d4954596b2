"""Stage 2, Transformer Engine, used by most GPU runs. Its extension comes as a wheel or is compiled by this proof."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import attention as ours
from benchmarks.gpu import limits, parts, slice, training
from benchmarks.gpu.processes import Job, together
from benchmarks.gpu.proof import Bench
from benchmarks.gpu.runner import SITE, WHEELS, there
from benchmarks.gpu.wheels import EXTENSION, HELD, brings, compile_extension, compiled, held, into
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.flops import flops

FUSIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("no fusion", {}),
    ("rotation", {"apply_rope_fusion": True}),
    ("permutation", {"moe_permute_fusion": True}),
    ("router", {"moe_router_fusion": True}),
    ("activation", {"bias_activation_fusion": True}),
)
"""Fields of Megatron's configuration (docs/gpu.md, F11)."""
NOT_ON_CPU = "all of it: Transformer Engine computes on CUDA alone"
SHARE = 12
"""Layers of the slice for a single fusion; all fusions together run on the whole slice."""


def build(bench: Bench) -> None:
    """Checks that Transformer Engine can be imported: an installed version, else the prepared files.

    Prepared files are installed in a separate folder, with the extension compiled from source if needed. After a
    successful import the complete installation moves to the proofs' import folder.
    """
    if there(HELD) and there(EXTENSION):
        _imports(bench, os.environ)
        return
    files, aside = held(Path(os.environ[WHEELS])), bench.folder / "aside"
    packages = [f for f in files if f.suffix == ".whl"]
    if not compiled(brings(Path(os.environ[WHEELS]), EXTENSION)):
        packages += _compiled(bench, [f for f in files if f.suffix != ".whl"])
    refused = into(aside, packages)
    bench.holds("what was brought can be installed", not refused, refused[-1500:])
    path = os.pathsep.join([str(aside), os.environ.get("PYTHONPATH", "")])
    if not _imports(bench, {**os.environ, "PYTHONPATH": path}):
        return
    site = Path(os.environ[SITE])
    for item in sorted(aside.iterdir(), key=lambda item: item.name == HELD):  # the package last
        shutil.rmtree(site / item.name, ignore_errors=True)
        shutil.move(item, site / item.name)


def _compiled(bench: Bench, sources: list[Path]) -> list[Path]:
    """Compiles a wheel of the extension's latest source distribution."""
    if not sources:
        raise FileNotFoundError(f"neither a wheel nor the source of {EXTENSION} lies in {os.environ[WHEELS]}")
    where = bench.folder / "compiled"
    complaint = compile_extension(sys.executable, sources[-1], where, os.cpu_count() or 1)
    bench.holds("the extension compiles", not complaint, complaint[-1500:])
    return sorted(where.glob("*.whl"))


def _imports(bench: Bench, env: Mapping[str, str]) -> bool:
    """Returns True if Transformer Engine can be imported in an environment."""
    imported = subprocess.run(
        [sys.executable, "-c", f"import torch, {HELD}.pytorch"], env=env, capture_output=True, text=True, timeout=120
    )
    bench.holds("transformer_engine.pytorch can be imported", imported.returncode == 0, imported.stderr[-1500:])
    return imported.returncode == 0


def spec(bench: Bench) -> None:
    """Compares the parameters of a real model of these layers with the `models` package."""
    if not bench.cuda:
        bench.left_out(NOT_ON_CPU)
        return
    hf = training.cases(bench)[1].hf
    rank = parts.open_rank(hf, ParallelDims(), device=bench.device, policy=parts.policy_config("te"))
    wanted = architecture(hf).megatron_shard(hf, ParallelDims(), 0, "te").params
    actual = {name: tuple(p.shape) for name, p in rank.params.items()}
    bench.figure("parameters", len(actual), "")
    absent = sorted(wanted.keys() - actual.keys()) + sorted(actual.keys() - wanted.keys())
    bench.holds("their names are those of models.megatron", not absent, absent[:6])
    other = [name for name, shape in actual.items() if tuple(wanted.get(name, shape)) != shape]
    bench.holds("and their shapes", not other, other[:6])
    experts = [p for name, p in rank.params.items() if ".mlp.experts." in name]
    marked = all(getattr(p, "tensor_model_parallel", False) for p in experts)
    bench.holds("experts' weights are marked for the gradient norm (F5)", bool(experts) and marked)


def attention(bench: Bench) -> None:
    """Compares forward and backward of packed rows, 16 heads on 2 groups, with `PackedAttention`."""
    if not bench.cuda:
        bench.left_out(NOT_ON_CPU)
        return
    import transformer_engine.pytorch as te

    gemm = limits.gemm_tflops(bench)
    for name, lengths in {**ours.shapes(bench), "many": [136] * 60}.items():
        q, k, v, row = ours.inputs(bench, lengths)
        heads, width = q.shape[1:]
        fused = te.DotProductAttention(
            heads, width, num_gqa_groups=k.shape[1], attn_mask_type="padding_causal", qkv_format="thd"
        )
        grid = ours.packed_attention(bench)

        def theirs(fused: Any = fused, q: Tensor = q, k: Tensor = k, v: Tensor = v, row: Any = row) -> Tensor:
            cu, longest = row.cu_seqlens_q, row.max_seqlen_q
            where = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest)
            out: Tensor = fused(q, k, v, **where)
            return out.reshape(len(q), -1)

        def local(grid: Any = grid, q: Tensor = q, k: Tensor = k, v: Tensor = v, row: Any = row) -> Tensor:
            out: Tensor = grid(q, k, v, None, packed_seq_params=row)
            return out

        for kind, run in (("Transformer Engine", theirs), ("PackedAttention", local)):
            ours.close(bench, f"{name}, {kind}", run().detach(), local().detach().float())
            ours.speed(bench, f"{name}, {kind}", run, (q, k, v), lengths, gemm)
        slopes = [torch.autograd.grad(run().float().square().sum(), (q, k, v)) for run in (theirs, local)]
        off = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*slopes, strict=True))
        bench.figure(f"{name}: gradients off each other by", off, "", at_most=0.02)


def slice_fusions(bench: Bench) -> None:
    """Measures the slice without fusions, with each fusion alone and with all; the figures decide F11."""
    if not bench.cuda:
        bench.left_out(NOT_ON_CPU)
        return
    together_: dict[str, Any] = {key: value for _, fields in FUSIONS for key, value in fields.items()}
    gemm = limits.gemm_tflops(bench)
    for name, fields, layers in (*((n, f, SHARE) for n, f in FUSIONS), ("all", together_, 48)):
        (measured,) = together(Job(_steps, (bench.tiny, str(bench.folder), fields, layers)), timeout_s=90)
        rate = measured["flops"] / measured["seconds"] / 1e12
        bench.figure(f"{name}, {layers} layers: forward and backward", rate, "TFLOP/s", limit=gemm,
                     limit_of="a large matrix product")  # fmt: skip
        for what, count in measured["counts"].items():
            bench.figure(f"{name}: {what} of a layer in training", count / layers, "")


def _steps(tiny: bool, folder: str, fusions: dict[str, Any], layers: int) -> dict[str, Any]:
    from skyrl_mega.megatron.objectives import supervised

    bench = Bench(Path(folder) / "unread", Path(folder), tiny=tiny)
    rank = slice.open_slice(bench, "te", layers, fusions)
    decoder = parts.described(rank.hf)
    batch = parts.rows([slice.EACH] * (slice.TOKENS // slice.EACH), rank.vocab)
    watched = slice.Watched(bench, rank)

    def step() -> None:
        rank.train([batch], supervised)

    step()
    whole = bench.seconds(step, repeats=3)
    work = flops(decoder)
    body = slice.TOKENS * (work.matrices + work.attention * slice.EACH / 2)
    return {"flops": 3 * body, "seconds": whole - watched.seconds, "counts": slice.counts(bench, step)}


def adam(bench: Bench) -> None:
    """Compares three steps of the fused Adam with the CPU's, and reads the checkpoint in another process."""
    if not bench.cuda:
        bench.left_out(NOT_ON_CPU)
        return
    by_cpu, on_gpu = training.cases(bench)
    on_gpu = replace(on_gpu, spec="te", dtypes=("bfloat16",))
    from_cpu, from_gpu = together(
        Job(training.train, (by_cpu,), training.HIDE_THE_GPU), Job(training.train, (on_gpu,)), timeout_s=100
    )
    training.compare(bench, from_gpu, from_cpu)
    (read,) = together(Job(training.go_on, (on_gpu,)), timeout_s=60)
    training.read_again(bench, from_gpu, read)


def fp8(bench: Bench) -> None:
    """Compares a linear layer in block-scaled FP8 with the bfloat16 product: accuracy and speed."""
    if not bench.cuda:
        bench.left_out(NOT_ON_CPU)
        return
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    rows, inner, columns = 8192, 2048, 6144
    layer = te.Linear(inner, columns, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(rows, inner, device=bench.device).to(torch.bfloat16)

    def quantised() -> Tensor:
        with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
            out: Tensor = layer(x)
            return out

    def plain() -> Tensor:
        with torch.no_grad():
            return x @ layer.weight.T

    off = float((quantised().float() - plain().float()).norm() / plain().float().norm())
    bench.figure("off bfloat16 by", off, "", at_most=0.06)
    rates: dict[str, Callable[[], Tensor]] = {"block FP8, quantising the input": quantised, "bfloat16": plain}
    gemm = limits.gemm_tflops(bench)
    for name, work in rates.items():
        rate = 2 * rows * inner * columns / bench.seconds(work, repeats=10, warm=3) / 1e12
        bench.figure(name, rate, "TFLOP/s", limit=gemm, limit_of="a large bfloat16 product")
