"""All proofs in the order of running: the most valuable figures come first, because a window may be short."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.proof import Proof
from benchmarks.gpu.wheels import EXTENSION, HELD

MEGATRON = ("megatron.core",)
TE = (*MEGATRON, HELD, EXTENSION)


def _proof(name: str, about: str, entry: str, seconds: float, limit_s: float, **more: Any) -> Proof:
    return Proof(name, about, f"benchmarks.gpu.{entry}", seconds, limit_s, **more)


PROOFS = (
    _proof("device", "what the GPU is, what it can do, and who NVML sees on it", "device:prove", 8, 60),
    _proof("te_build", "Transformer Engine, brought or compiled, can be imported", "te:build", 20, 540, stage=2,
           makes=HELD, compiles=EXTENSION, compile_s=270),
    _proof("te_numbers", "FP8 products and parameters give bfloat16's steps; a checkpoint", "te_step:prove_numbers",
           60, 240, stage=2, needs=TE),
    _proof("te_train", "the slice's FP8 step: memory and speed", "te_step:prove", 110, 300, stage=2, needs=TE),
    _proof("te_speed", "where a step's time goes: precision, size, launches, waits", "te_speed:prove", 75, 200, stage=2,
           needs=TE),
    _proof("exchange", "a TP8 worker's weights to a process on the same GPU", "exchange:prove", 35, 240),
    _proof("head", "log-probs at a vocabulary of 152k, fused and chunked", "head:prove", 15, 150),
    _proof("residency", "the policy leaves the GPU and returns: bytes, bits, seconds", "residency:prove", 50, 150,
           needs=MEGATRON),
    _proof("families", "every family's local layers beside the CPU", "families:prove", 80, 170, needs=MEGATRON),
    _proof("te_families", "every family on Transformer Engine beside the CPU", "families:prove_te", 80, 170, stage=2,
           needs=TE),
    _proof("vllm", "weights into a real engine, CUDA graphs on, asleep and awake", "engine:prove", 90, 400, stage=3,
           needs=("vllm",)),
    _proof("vllm_bfloat16", "… with torch.compile and FlashAttention, as a run", "engine:prove_bfloat16", 80, 400,
           stage=3, needs=("vllm",)),
    _proof("exchange_killed", "… whose receiver is killed in the middle", "exchange:prove_killed", 30, 90),
    _proof("exchange_segments", "… with expandable segments", "exchange:prove_segments", 30, 90),
    _proof("exchange_fp8", "… as block-scaled FP8", "exchange:prove_fp8", 40, 120),
    _proof("nccl", "a group of one: options, messages to itself, abort, a second group", "nccl:prove", 40, 120),
    _proof("slice", "one rank of Qwen3-30B-A3B at TP2 EP8: memory and speed", "slice:prove", 120, 300, needs=MEGATRON),
    _proof("te_spec", "Transformer Engine's layer: the real names and shapes", "te:spec", 20, 90, stage=2, needs=TE),
    _proof("te_attention", "its packed attention beside ours", "te:attention", 40, 120, stage=2, needs=TE),
    _proof("te_adam", "its Adam: a step, and a checkpoint there and back", "te:adam", 40, 120, stage=2, needs=TE),
    _proof("te_fp8", "its block FP8 matrix product", "te:fp8", 30, 90, stage=2, needs=TE),
    _proof("te_grouped", "the experts' grouped product, bfloat16 and FP8", "te_parts:grouped", 20, 90, stage=2,
           needs=TE),
    _proof("te_fusions", "megatron-core's fusions give the unfused numbers", "te_parts:fusions", 90, 240, stage=2,
           needs=TE),
    _proof("te_activations", "activations in host memory, with its layers", "activations:prove_te", 60, 180, stage=2,
           needs=TE),
    _proof("te_slice", "the slice on it, fusion by fusion", "te:slice_fusions", 200, 420, stage=2, needs=TE),
    _proof("training", "Megatron on CUDA beside Megatron on the CPU", "training:prove", 90, 240, needs=MEGATRON),
    _proof("reference", "the reference's weights in and out, at that size", "reference:prove", 60, 150, needs=MEGATRON),
    _proof("streamed", "an optimizer in host memory: bits, seconds, memory", "streamed:prove", 60, 150, needs=MEGATRON),
    _proof("activations", "layers' activations in host memory: results, seconds, memory", "activations:prove", 60, 180,
           needs=MEGATRON),
    _proof("kernels", "the Triton kernels, and packing a bucket, bit for bit", "kernels:prove", 90, 240),
    _proof("attention", "packed attention: variable lengths, and a grid", "attention:prove", 40, 120, needs=MEGATRON),
    _proof("fragmentation", "rows of random lengths: what the allocator cannot give back", "fragmentation:prove",
           120, 300, needs=MEGATRON),
)  # fmt: skip
