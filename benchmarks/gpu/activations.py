"""Proof: layers with activations in host memory give the same results, within the planned memory, compared with
recomputing.

The batch is one long sequence, the intended use: a long sequence gives the copies most work to overlap with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import limits, parts
from benchmarks.gpu.proof import Bench
from skyrl_mega.config.derived import fused, logit_chunk
from skyrl_mega.planner.activations import LongestRow, activations, kept_layer

if TYPE_CHECKING:
    from skyrl_mega.megatron.worker import ModelWorker

GIB = 2**30
LAYERS, TOKENS = 8, 32_768
WAYS: dict[str, dict[str, Any]] = {
    "all kept": {},
    "half in host memory": {"offload_layers": LAYERS // 2},
    "all in host memory": {"offload_layers": LAYERS},
    "recomputed": {"recompute": "full"},
}
ALIKE = 1e-3
"""Tolerance on a GPU, relative: sums over experts have no fixed order."""
WITHIN = 0.2
"""Tolerance of the peak, as a share of the planned memory."""


def prove(bench: Bench) -> None:
    """Trains the same weights on the same sequence in each way, with the local layers."""
    _prove(bench, "local")


def prove_te(bench: Bench) -> None:
    """Trains the same weights on the same sequence in each way, with Transformer Engine's layers."""
    if not bench.cuda:
        bench.left_out("all of it: Transformer Engine computes on CUDA alone")
        return
    _prove(bench, "te")


def _prove(bench: Bench, spec: str) -> None:
    from skyrl_mega.megatron.objectives import supervised

    hf, parallel = parts.slice_of_30b(tiny_size=bench.tiny, layers=LAYERS)
    tokens = 512 if bench.tiny else TOKENS
    decoder, batch = parts.described(hf), parts.rows([tokens], hf["vocab_size"])
    first: dict[str, float] = {}
    before: dict[str, Any] = {}
    for name, settings in WAYS.items():
        policy = parts.policy_config(spec, micro_tokens=tokens, **settings)
        rank = parts.open_rank(hf, parallel, device=bench.device, policy=policy)
        before = before or {key: p.detach().cpu().clone() for key, p in rank.params.items()}
        _take(rank, before)
        metrics = rank.train([batch], supervised)  # warm-up: also creates the optimizer state
        first = first or metrics
        for what in ("loss", "grad_norm"):
            off = abs(metrics[what] - first[what]) / abs(first[what])
            bench.figure(f"{name}: {what} off the first", off, "", at_most=ALIKE if bench.cuda else 0.0)
        seconds = bench.seconds(lambda rank=rank: rank.train([batch], supervised), repeats=3, warm=1)
        bench.figure(f"{name}: a step of {tokens} tokens, {LAYERS} layers", seconds, "s")
        if bench.cuda:
            how: dict[str, Any] = dict(recompute=policy.recompute, offload_layers=policy.offload_layers)
            how |= dict(spec=spec, fused=fused(policy, spec, True))
            chunk = logit_chunk(policy, bench.device.type)
            sizes = activations(decoder, parallel, 0, LongestRow(tokens, 1), 2, logit_chunk=chunk, **how)
            planned = sizes.train + sizes.train_logits
            base = torch.cuda.memory_allocated()
            peak = bench.peak(lambda rank=rank: rank.train([batch], supervised)) - base
            bench.figure(f"{name}: activations at the peak", peak / GIB, "GiB", limit=planned / GIB,
                         limit_of="sizing, estimated", at_most=(1 + WITHIN) * planned / GIB)  # fmt: skip
        del rank
    if not bench.cuda:
        bench.left_out("memory at the peak")
        return
    kept = kept_layer(
        decoder, parallel, 0, tokens, 2, recompute="none", spec=spec, fused=fused(parts.policy_config(spec), spec, True)
    )
    rate = limits.host_gb_s(bench, pinned=True, to_device=True)
    bench.figure("a layer's copy, one way, by the link", kept / rate / 1e9, "s")


def _take(rank: ModelWorker, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for key, p in rank.params.items():
            p.copy_(weights[key])
    rank.optimizer.reload_model_params()
