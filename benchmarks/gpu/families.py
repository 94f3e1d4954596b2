"""Proofs `families` and `te_families`: a small model of every family on CUDA against the CPU, forward and backward.

Widths of heads, positions and routing are those of a published model; counts and other widths are cut. The CPU's
numbers come from a process without a GPU, with the local layer spec. In bfloat16 every token takes all experts, because
rounding changes some choices; the model's own choice is compared by a median, which a few tokens do not move.
"""

from __future__ import annotations

import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import parts
from benchmarks.gpu.processes import KILLED, Job, together
from benchmarks.gpu.proof import Bench
from benchmarks.gpu.te import NOT_ON_CPU
from benchmarks.gpu.training import HIDE_THE_GPU, Told
from skyrl_mega.config.schema import OptimizerConfig
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims

MODELS = (
    *("Qwen/Qwen3-Next-80B-A3B-Instruct", "openai/gpt-oss-20b", "Qwen/Qwen3.5-35B-A3B", "deepseek-ai/DeepSeek-V3"),
    *("Qwen/Qwen3-30B-A3B", "zai-org/GLM-4.7-Flash", "moonshotai/Moonlight-16B-A3B", "deepseek-ai/DeepSeek-V2-Lite"),
    *("moonshotai/Kimi-K2-Instruct", "MiniMaxAI/MiniMax-M2", "zai-org/GLM-4.5", "zai-org/GLM-4.5-Air"),
    *("Qwen/Qwen2-57B-A14B", "mistralai/Mixtral-8x7B-v0.1", "allenai/OLMoE-1B-7B-0924", "Qwen/Qwen3-0.6B"),
    *("Qwen/Qwen2-0.5B-Instruct", "meta-llama/Llama-3.1-8B"),
)
"""A model of every family, and of variants with other blocks. Models that compile many kernels come first."""
SIZES: dict[str, Any] = {
    **dict(num_hidden_layers=2, hidden_size=256, vocab_size=512, intermediate_size=256, moe_intermediate_size=128),
    **dict(num_experts=8, num_local_experts=8, n_routed_experts=8, num_experts_per_tok=4, first_k_dense_replace=1),
    **dict(shared_expert_intermediate_size=128, q_lora_rank=128, full_attention_interval=2, linear_num_key_heads=2),
    **dict(linear_num_value_heads=4, num_nextn_predict_layers=0),
}
"""Sizes in place of a published model's, for the keys that it has."""
LENGTHS = (2, 200, 1, 63, 64, 65, 17, 3, 130)
AT_ONCE, EACH_S = 9, 100.0
"""Number of models computed at a time, and the time limit of each."""
EXACT = {"log-probs": 3e-5, "worst gradient": 3e-4}
"""Tolerance in float32: root mean square in nats; a parameter's gradient relative."""
NOISE, LEAST = 3.0, 0.02
"""Upper bound in bfloat16: difference from the CPU's float32, as a multiple of the CPU's own difference. A gradient's
own difference counts as at least `LEAST`, relative, because rounding errors of few numbers can cancel by chance."""


@dataclass(frozen=True)
class Case:
    """Inputs of a process."""

    hf: dict[str, Any]
    model: Path
    device: str
    spec: str = "local"
    lengths: tuple[int, ...] = LENGTHS


def prove(bench: Bench) -> None:
    _prove(bench, "local")


def prove_te(bench: Bench) -> None:
    if not bench.cuda:
        bench.left_out(NOT_ON_CPU)
        return
    _prove(bench, "te")


def _prove(bench: Bench, spec: str) -> None:
    """Reports each model as soon as its processes end. A model that raises or crashes fails alone."""
    with ThreadPoolExecutor(AT_ONCE if bench.cuda else 1) as pool:
        runs = {pool.submit(_both, bench, spec, name): name for name in (MODELS if bench.cuda else MODELS[1:2])}
        for done in as_completed(runs):
            name = runs[done].partition("/")[2]
            try:
                compare(bench, name, *done.result())
            except Exception as error:
                bench.holds(f"{name} computes", False, (str(error).strip().splitlines() or [repr(error)])[-1])
                bench.note(f"{name}: traceback", str(error)[-2000:])


def _both(bench: Bench, spec: str, name: str) -> list[Told]:
    hf, path = cut(name), bench.folder / name.replace("/", "-")
    write(hf, path)
    case = Case(hf, path, str(bench.device), spec, LENGTHS if bench.cuda else (2, 20, 1, 7))
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else every process starts a pool of compilers
    on_cpu = Job(run, (replace(case, device="cpu", spec="local"),), HIDE_THE_GPU | env)
    answers = together(Job(run, (case,), env), on_cpu, timeout_s=EACH_S)
    if KILLED in answers:
        raise RuntimeError(f"the process on {('this device', 'the CPU')[answers.index(KILLED)]} was ended by a signal")
    return answers


def cut(name: str) -> dict[str, Any]:
    """Returns a published model's config.json with `SIZES`, two or four heads, and the first two layers' types."""
    hf = known(name)
    text = dict(hf.get("text_config", hf))
    heads = 4 if text.get("head_dim") or text.get("kv_lora_rank") else 2
    grouped = text["num_key_value_heads"] < text["num_attention_heads"]
    text |= {key: value for key, value in SIZES.items() if text.get(key)}
    text |= {"num_attention_heads": heads, "num_key_value_heads": heads // 2 if grouped else heads}
    if text.get("n_group", 1) > 1:
        text |= {"n_group": 4, "topk_group": 2}
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:2]
    return hf | {"text_config": text} if "text_config" in hf else text


def with_all_experts(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the same weights with every token sent to all experts; a dense model's unchanged."""
    text = dict(hf.get("text_config", hf))
    if "num_experts_per_tok" in text:
        text["num_experts_per_tok"] = SIZES["num_experts"]
    if "n_group" in text:
        text["topk_group"] = text["n_group"]
    return hf | {"text_config": text} if "text_config" in hf else text


def write(hf: dict[str, Any], path: Path) -> None:
    """Writes random weights, uneven in every tensor, with which hidden states keep their size."""
    from safetensors.torch import save_file

    path.mkdir()
    generator, forms, weights = torch.Generator().manual_seed(0), architecture(hf).describe(hf).disk_forms, {}
    for name, shape in architecture(hf).tensors(hf).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            noise = 0.5 * noise - 2
        elif name.endswith("bias"):
            noise *= 0.2
        elif noise.dim() == 1:
            noise = 1 + 0.2 * noise
        else:
            noise *= 1.2 / shape[-1] ** 0.5
        weights[name] = forms[name].to_disk(noise) if name in forms else noise
    (path / "config.json").write_text(json.dumps(hf))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def run(case: Case) -> Told:
    """Returns log-probs and gradients by kind: exact (float32), spread and rounded (all experts, in float32 and
    bfloat16), chosen (bfloat16)."""
    on_cpu, delta = case.device == "cpu", "linear_num_key_heads" in case.hf.get("text_config", case.hf)
    torch.set_num_threads(1 if on_cpu else 2)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    gradients = on_cpu or not (delta and refuses_backward())
    if delta and not on_cpu:
        _tune_nothing()
    spread, told = with_all_experts(case.hf), Told()
    if on_cpu or (case.spec == "local" and not delta):  # the other kernels take bfloat16 only
        told["exact"] = _passes(case, case.hf, torch.float32, gradients)
    if on_cpu:
        told["spread"] = _passes(case, spread, torch.float32, gradients)
    told["rounded"] = _passes(case, spread, torch.bfloat16, gradients)
    return told | {"chosen": _passes(case, case.hf, torch.bfloat16, gradients=False)}


def refuses_backward() -> bool:
    """Returns True if flash-linear-attention's backward pass raises: Triton 3.4 to 3.7.0 compiles it wrong for Hopper,
    and tilelang's kernel is not there."""
    import triton

    version = tuple(int(part) for part in triton.__version__.partition("+")[0].split(".")[:3])
    return (3, 4, 0) <= version < (3, 7, 1) and torch.cuda.get_device_capability()[0] == 9


def _tune_nothing() -> None:
    """Makes Triton take the first configuration of each kernel: trying all would compile for a minute per process."""
    import triton

    tune = triton.autotune
    triton.autotune = lambda configs, *more, **other: tune(configs[:1], *more, **other)


def _passes(case: Case, hf: dict[str, Any], dtype: torch.dtype, gradients: bool) -> Told:
    from skyrl_mega.megatron.objectives import supervised

    policy = parts.policy_config(
        case.spec, micro_tokens=1024, logit_chunk=64, optimizer=OptimizerConfig(lr=1e-3, clip_grad=0.0)
    )
    rank: Any = parts.open_rank(hf, ParallelDims(), device=torch.device(case.device), dtype=dtype, policy=policy)
    rank.load(case.model)
    batch = parts.rows(case.lengths, rank.vocab)
    ((logprobs, _),) = rank.logprobs([batch])
    told: Told = {"log-probs": logprobs.double().numpy()[batch["weights"].numpy() > 0], "gradients": {}}
    if gradients:
        rank.train([batch], supervised)
        holds = defaultdict(list)
        for piece in rank.shard.pieces:
            holds[piece.param].append(f"{piece.tensor} {piece.box} {piece.offset}")
        told["gradients"] = {  # by content: the layers' own names depend on the spec
            "; ".join(holds[name]): p.main_grad.float().cpu().numpy().ravel().copy()
            for name, p in rank.params.items()
            if p.requires_grad
        }
    return told


def compare(bench: Bench, name: str, here: Told, by_cpu: Told) -> None:
    """Records a model's figures."""
    exact, spread, rounded, chosen = (by_cpu[kind] for kind in ("exact", "spread", "rounded", "chosen"))
    if "exact" in here:
        bench.figure(f"{name}: float32, log-probs off by", _rms(here["exact"], exact), "nats",
                     at_most=EXACT["log-probs"])  # fmt: skip
        error = max(_gradients(here["exact"], exact).values())
        bench.figure(f"{name}: float32, worst gradient off by", error, "", at_most=EXACT["worst gradient"])
    bench.figure(f"{name}: bfloat16, log-probs over the CPU's error", _rms(here["rounded"], spread)
                 / _rms(rounded, spread), "", at_most=NOISE)  # fmt: skip
    own = _median(here["chosen"], exact) / _median(chosen, exact)
    bench.figure(f"{name}: bfloat16, chosen experts, log-probs over the CPU's error", own, "", at_most=NOISE)
    if not here["rounded"]["gradients"]:
        bench.left_out(f"{name}: gradients; flash-linear-attention needs Triton 3.7.1 or later on Hopper")
        return
    ours, noise = _gradients(here["rounded"], spread), _gradients(rounded, spread)
    ratios = {key: error / max(noise[key], LEAST) for key, error in ours.items()}
    worst = max(ratios, key=lambda key: ratios[key])
    bench.figure(f"{name}: bfloat16, worst gradient over the CPU's error", ratios[worst], "", at_most=NOISE)
    bench.note(f"{name}: worst gradient", f"{worst[:80]}: off by {ours[worst]:.2g}, the CPU by {noise[worst]:.2g}")


def _rms(actual: Told, wanted: Told) -> float:
    return float(np.sqrt(np.mean((actual["log-probs"] - wanted["log-probs"]) ** 2)))


def _median(actual: Told, wanted: Told) -> float:
    return float(np.median(np.abs(actual["log-probs"] - wanted["log-probs"])))


def _gradients(actual: Told, wanted: Told) -> dict[str, float]:
    """Returns the relative error of each parameter's gradient, by content. A parameter of one side alone raises."""
    if actual["gradients"].keys() != wanted["gradients"].keys():
        raise KeyError(str(sorted(actual["gradients"].keys() ^ wanted["gradients"].keys())[:4]))
    return {
        key: float(np.linalg.norm(actual["gradients"][key] - gradient) / np.linalg.norm(gradient))
        for key, gradient in wanted["gradients"].items()
    }
