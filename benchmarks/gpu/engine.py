"""Stage 3: a real vLLM engine takes the policy's weights and computes the same log-probs as transformers.

CUDA graphs are on, Ray is absent, and the engine sleeps between syncs: the next sync restores the weights.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import limits, parts
from benchmarks.gpu.proof import Bench
from skyrl_mega.config.residency import ENGINE
from skyrl_mega.engines.presence import CACHE, WEIGHTS

PROMPTS = [[5, 20 + i, 40 + 3 * i, 60, 7] for i in range(4)]
EXACT = {"cpu": 1e-4, "cuda": 5e-3}
"""Tolerance of float32 log-probs, in nats: CUDA's kernels may multiply in TF32."""
ORDER = (("model", False), ("other", False), ("model", True), ("other", True))
"""Weights of each sync, and True if the engine sleeps before the sync."""


def prove(bench: Bench) -> None:
    if not bench.cuda:
        from skyrl_mega.cli.prepare import check_vllm
        from skyrl_mega.common.errors import UserError

        try:
            check_vllm(bench.device.type)
        except UserError as error:
            bench.left_out(str(error))
            return
    hf = parts.tiny_model(bench.folder / "model", seed=0)
    parts.tiny_model(bench.folder / "other", seed=1)
    _entry_point(bench.folder / "plugin")
    from skyrl_mega.config.schema import RolloutConfig
    from skyrl_mega.engines.vllm.actor import VllmEngine
    from skyrl_mega.engines.vllm.spec import EngineSpec, environment

    rollout = RolloutConfig(kv_cache_gib=0.1, memory_fraction=0.3, eager=not bench.cuda, concurrency=16)
    spec = EngineSpec(str(bench.folder / "model"), "float32", bench.device.type, rollout, 128, sleeps=ENGINE)
    os.environ.update(environment(spec))
    asyncio.run(_syncs(bench, hf, VllmEngine(spec)))


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


async def _syncs(bench: Bench, hf: dict[str, Any], engine: Any) -> None:
    from skyrl_mega.hf_checkpoint import load
    from skyrl_mega.models.registry import architecture
    from skyrl_mega.parallel.dims import ParallelDims
    from skyrl_mega.weights.transports.group import host_store

    start = time.perf_counter()
    await engine.start()
    bench.figure("starting the engine", time.perf_counter() - start, "s")
    store = host_store("127.0.0.1", parts.TIMEOUT_S)
    met = parts.connection(
        hf, store.port, "weights", bucket_bytes=1 << 20, timeout_s=parts.TIMEOUT_S, plans=bench.folder / "plans",
        dtype="float32",
    )  # fmt: skip
    joining = asyncio.create_task(asyncio.to_thread(met.join, bench.device, source=0))
    await engine.connect_weights({"connection": asdict(met), "engine_index": 0})
    exchange = await joining
    shard = architecture(hf).megatron_shard(hf, ParallelDims(), 0, "local")
    params = {name: torch.zeros(shape, device=bench.device) for name, shape in shard.params.items()}
    for version, (name, asleep) in enumerate(ORDER, 1):
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
        off = max(await _off(engine, path))
        after = f"sync {version}{' and sleep' if asleep else ''}"
        bench.figure(f"log-probs after {after}: off transformers by", off, "nats",
                     at_most=EXACT[bench.device.type])  # fmt: skip
    await _speed(bench, engine)
    if not bench.cuda:
        bench.left_out("CUDA graphs, and memory that sleep gives back")
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


async def _off(engine: Any, path: Path) -> list[float]:
    """Returns the largest log-prob difference from transformers, for each completion."""
    from transformers import AutoModelForCausalLM

    from skyrl_mega.engines.base import Request

    requests = [Request(str(i), prompt, 24, seed=i) for i, prompt in enumerate(PROMPTS)]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    differences = []
    for completion in await _answers(engine, requests):
        prompt = PROMPTS[int(completion.id)]
        tokens = torch.tensor([[*prompt, *completion.tokens]])
        with torch.no_grad():
            table: Tensor = model(tokens).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        wanted = table.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        differences.append(float((wanted - torch.tensor(completion.logprobs)).abs().max()))
    return differences


async def _speed(bench: Bench, engine: Any) -> None:
    """Measures the time of a token in a single sequence: the overhead of a decoding step."""
    from skyrl_mega.engines.base import Request

    start = time.perf_counter()
    (done,) = await _answers(engine, [Request("one", PROMPTS[0], 100, seed=0)])
    seconds = time.perf_counter() - start
    bench.figure("one sequence, a token", seconds / max(1, len(done.tokens)) * 1e3, "ms")
    bench.note("copy bandwidth beside it, GB/s", limits.copy_gb_s(bench))
