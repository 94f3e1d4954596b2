"""Stage 3: a real vLLM engine takes the policy's weights and computes the same log-probs as transformers.

CUDA graphs are on, Ray is absent, and the engine sleeps between syncs: the next sync restores the weights.

`prove` computes in float32 without torch.compile: the numbers are exact, and the start is short. `prove_bfloat16` uses
the settings of a run: torch.compile, piecewise CUDA graphs and FlashAttention if vLLM brings it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import limits, parts
from benchmarks.gpu.proof import Bench
from benchmarks.gpu.runner import there
from skyrl_mega.config.residency import ENGINE
from skyrl_mega.engines.presence import CACHE, WEIGHTS

PROMPTS = [[5, 20 + i, 40 + 3 * i, 60, 7] for i in range(8)]
EXACT = {"cpu": 1e-4, "cuda": 5e-3}
"""Tolerance of float32 log-probs, in nats: CUDA's libraries may multiply in TF32."""
NOISE = 3.0
"""Tolerance of bfloat16 log-probs: a multiple of the mean error of transformers in bfloat16."""
ORDER = (("model", False), ("other", False), ("model", True), ("other", True))
"""Weights of each sync, and True if the engine sleeps before the sync."""
GRAPHS: dict[str, Any] = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
"""vLLM's options for CUDA graphs of whole decoding steps without torch.compile."""
IEEE = {"TRITON_F32_DEFAULT": "ieee"}
"""Environment variable of Triton: a float32 product is not rounded to TF32, as in vLLM's kernels by default."""
NO_FLASHINFER = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""Environment variable of vLLM without FlashInfer: vLLM samples with its own kernels."""


def prove(bench: Bench) -> None:
    if not bench.cuda:
        from skyrl_mega.cli.prepare import check_vllm
        from skyrl_mega.common.errors import UserError

        try:
            check_vllm(bench.device.type)
        except UserError as error:
            bench.left_out(str(error))
            return
    os.environ.update(IEEE)
    _prove(bench, "float32", ORDER, GRAPHS if bench.cuda else {})
    if not bench.cuda:
        bench.left_out("CUDA graphs, and memory that sleep gives back")


def prove_bfloat16(bench: Bench) -> None:
    if not bench.cuda:
        bench.left_out("torch.compile, CUDA graphs and FlashAttention")
        return
    _prove(bench, "bfloat16", ORDER[1:3], {})


def _prove(bench: Bench, dtype: str, order: Sequence[tuple[str, bool]], options: dict[str, Any]) -> None:
    hf = parts.tiny_model(bench.folder / "model", seed=0, head_dim=64)
    parts.tiny_model(bench.folder / "other", seed=1, head_dim=64)
    _entry_point(bench.folder / "plugin")
    from skyrl_mega.config.schema import RolloutConfig
    from skyrl_mega.engines.vllm.actor import VllmEngine
    from skyrl_mega.engines.vllm.spec import EngineSpec, environment

    rollout = RolloutConfig(
        kv_cache_gib=0.1, memory_fraction=0.05, eager=not bench.cuda, concurrency=16, options=options
    )
    spec = EngineSpec(str(bench.folder / "model"), dtype, bench.device.type, rollout, 128, sleeps=ENGINE)
    os.environ.update(environment(spec))
    if not there("flashinfer"):
        os.environ.update(NO_FLASHINFER)
    asyncio.run(_syncs(bench, hf, VllmEngine(spec), order))


def _entry_point(folder: Path) -> None:
    """Creates the metadata of an installed package in a folder: vLLM finds the weight transfer through an entry
    point."""
    metadata = folder / "skyrl_mega_proof-0.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: skyrl-mega-proof\nVersion: 0.0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nskyrl_mega = skyrl_mega.engines.vllm.plugin:register\n"
    )
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(folder))


async def _syncs(bench: Bench, hf: dict[str, Any], engine: Any, order: Sequence[tuple[str, bool]]) -> None:
    from skyrl_mega.hf_checkpoint import load
    from skyrl_mega.models.registry import architecture
    from skyrl_mega.parallel.dims import ParallelDims
    from skyrl_mega.weights.transports.group import host_store

    start = time.perf_counter()
    await engine.start()
    bench.figure("starting the engine", time.perf_counter() - start, "s")
    compilation = engine.llm.vllm_config.compilation_config
    bench.note("compilation", f"{compilation.mode}, {compilation.cudagraph_mode}")
    store = host_store("127.0.0.1", parts.TIMEOUT_S)
    met = parts.connection(
        hf, store.port, "weights", bucket_bytes=1 << 20, timeout_s=parts.TIMEOUT_S, plans=bench.folder / "plans",
        dtype=engine.spec.dtype,
    )  # fmt: skip
    joining = asyncio.create_task(asyncio.to_thread(met.join, bench.device, source=0))
    await engine.connect_weights({"connection": asdict(met), "engine_index": 0})
    exchange = await joining
    shard = architecture(hf).megatron_shard(hf, ParallelDims(), 0, "local")
    dtype = getattr(torch, engine.spec.dtype)
    params = {name: torch.zeros(shape, device=bench.device, dtype=dtype) for name, shape in shard.params.items()}
    for version, (name, asleep) in enumerate(order, 1):
        path = bench.folder / name
        if asleep:
            await _sleep(bench, engine)
        with torch.no_grad():
            load.load(path, shard, params)
        start = time.perf_counter()
        await engine.begin_update()
        sending = asyncio.create_task(asyncio.to_thread(exchange.run, params, checksums=True))
        await engine.update_weights(True)
        await sending
        await engine.end_update(version)
        if asleep:
            await engine.wake([CACHE])
        bench.figure(f"sync {version}", time.perf_counter() - start, "s")
        await _compare(bench, engine, path, f"sync {version}{' and sleep' if asleep else ''}")
    await _speed(bench, engine)
    engine.llm.shutdown()


async def _sleep(bench: Bench, engine: Any) -> None:
    """Sleeps as on a shared GPU, overwrites the freed memory, and wakes the weights for a sync."""
    free = torch.cuda.mem_get_info()[0] if bench.cuda else 0
    start = time.perf_counter()
    await engine.sleep(ENGINE)
    bench.figure("falling asleep", time.perf_counter() - start, "s")
    if bench.cuda:
        gained = (torch.cuda.mem_get_info()[0] - free) / 2**30
        bench.figure("memory that sleep gives back", gained, "GiB", at_least=1.0)
        torch.empty(int(gained * 0.9 * 2**30), dtype=torch.uint8, device=bench.device).fill_(0xA5)
        torch.cuda.empty_cache()  # a stale read of the freed memory now gives wrong numbers
    start = time.perf_counter()
    await engine.wake([WEIGHTS])
    bench.figure("waking for a sync", time.perf_counter() - start, "s")


async def _answers(engine: Any, requests: list[Any]) -> list[Any]:
    from skyrl_mega.engines.base import Sampling

    return [c async for some in engine.generate_many(requests, Sampling()) for c in some]


async def _compare(bench: Bench, engine: Any, path: Path, after: str) -> None:
    """Compares the engine's log-probs of its own tokens with transformers' in float32, on the engine's weights."""
    from skyrl_mega.engines.base import Request

    requests = [Request(str(i), prompt, 24, seed=i) for i, prompt in enumerate(PROMPTS)]
    completions = await _answers(engine, requests)
    texts = [(PROMPTS[int(c.id)], list(c.tokens)) for c in completions]
    got = [torch.tensor(c.logprobs) for c in completions]
    dtype = getattr(torch, engine.spec.dtype)
    exact = _by_transformers(path, dtype, torch.float32, texts)
    off = torch.cat([(a - b).abs() for a, b in zip(got, exact, strict=True)])
    name = f"log-probs after {after}: off transformers by"
    if dtype == torch.float32:
        bench.figure(name, float(off.max()), "nats", at_most=EXACT[bench.device.type])
        return
    rounded = _by_transformers(path, dtype, dtype, texts)
    noise = float(torch.cat([(a - b).abs() for a, b in zip(rounded, exact, strict=True)]).mean())
    bench.figure(f"{name} (largest)", float(off.max()), "nats")
    bench.figure(f"{name} (mean)", float(off.mean()), "nats", limit=noise, limit_of="transformers in bfloat16",
                 at_most=NOISE * noise)  # fmt: skip


def _by_transformers(
    path: Path, rounding: torch.dtype, computing: torch.dtype, texts: Sequence[tuple[list[int], list[int]]]
) -> list[torch.Tensor]:
    """Returns transformers' log-probs of the tokens after each prompt, on the CPU.

    Args:
        path: Hugging Face directory.
        rounding: Type to which the weights are rounded.
        computing: Type of the computation.
        texts: Prompt and following tokens of each text.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=rounding).to(computing)
    result = []
    for prompt, tokens in texts:
        with torch.no_grad():
            table = model(torch.tensor([[*prompt, *tokens]])).logits[0].float().log_softmax(-1)
        result.append(table[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0])
    return result


async def _speed(bench: Bench, engine: Any) -> None:
    """Measures the time of a token in a single sequence: the overhead of a decoding step."""
    from skyrl_mega.engines.base import Request

    start = time.perf_counter()
    (done,) = await _answers(engine, [Request("one", PROMPTS[0], 100, seed=0)])
    seconds = time.perf_counter() - start
    bench.figure("one sequence, a token", seconds / max(1, len(done.tokens)) * 1e3, "ms")
    bench.note("copy bandwidth beside it, GB/s", limits.copy_gb_s(bench))
