"""The arguments of every GPU recipe's engines, as vLLM's own configuration classes take them for a node of H100s.

Tests with real engines run on CPUs, where vLLM differs from what a GPU runs in these points:

| | CPU, in tests | CUDA |
|---|---|---|
| model runner | V1 (no Triton) | V2 |
| sampler, seeded | a torch generator for each request | Gumbel noise from seed and position, in Triton |
| compilation, graphs | none (`rollout.eager`) | piecewise compilation; full graphs for decoding, piecewise else |
| scheduling | waits for each step's tokens | asynchronous: the next step is scheduled before the tokens are there |
| long prompts | whole in one step | in chunks, beside the decoding of others |
| cache | `rollout.kv_cache_gib` | what is left of `rollout.memory_fraction`, measured at the first start |
| worker | `uni` in the engine's process with one | `mp`, a process each |

What is checked here is that vLLM accepts our arguments there and resolves them so; that the kernels compute the right
numbers, only a GPU can show.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.config.compose import compose
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.spec import EngineSpec, scales
from tests.conftest import ROOT
from tests.cuda.engine_config import TOTAL

RECIPES = [file for file in sorted((ROOT / "configs").glob("*.yaml")) if compose(file).cluster.device != "cpu"]
OTHERS: list[tuple[str, list[str], int | None]] = [
    ("dapo", ["rollout.eager=true"], None),
    ("dapo", [], 11 * 2**30),
    ("dapo", ["rollout.tensor=4", "rollout.engines=4"], None),
    ("dapo", ["rollout.options={enable_expert_parallel: true}"], None),
]


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By recipe, and by number of `OTHERS`; two processes for all, as importing vLLM takes most of its time."""
    asked: list[tuple[str, list[str], int | None]] = [(str(file), [], None) for file in RECIPES]
    asked += [(str(ROOT / "configs" / f"{name}.yaml"), settings, former) for name, settings, former in OTHERS]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)}
    environment["VLLM_CACHE_ROOT"] = str(tmp_path_factory.mktemp("vllm"))
    for what in ("inspect", json.dumps(asked)):
        command = [sys.executable, "-m", "tests.cuda.engine_config", what]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    names = [file.stem for file in RECIPES] + [str(i) for i in range(len(OTHERS))]
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipes_engine_on_h100s(resolved: dict[str, dict[str, Any]], file: Path) -> None:
    config, v = compose(file), resolved[file.stem]
    rollout = config.rollout
    assert (v["device"], v["worker"], v["executor"]) == ("cuda", "vllm.v1.worker.gpu_worker.Worker", "mp")
    assert v["v2"], "the runner for which seeds and log-probs were read through"
    assert not v["eager"]
    assert (v["compilation"], v["graphs"]) == ("VLLM_COMPILE", "FULL_AND_PIECEWISE")
    assert v["largest_graph"] == 512
    assert v["async"]
    assert v["chunked"]
    assert v["batched_tokens"] == max(v["limit"], 8192)
    assert (v["sequences"], v["length"]) == (rollout.concurrency, v["limit"])
    assert v["prefixes"]
    assert (v["fraction"], v["cache_bytes"]) == (rollout.memory_fraction, None)
    assert v["logprobs"] == "processed_logprobs"
    assert (v["seed"], v["generation_config"]) == (config.run.seed, "vllm")
    assert v["transfer"] == "skyrl_mega"
    assert v["extension"] == "skyrl_mega.engines.vllm.transfer.WorkerExtension"
    assert (v["tensor"], v["expert_parallel"]) == (rollout.tensor, False)


def test_eager_takes_compilation_and_graphs_away(resolved: dict[str, dict[str, Any]]) -> None:
    eager = resolved["0"]
    assert (eager["eager"], eager["compilation"], eager["graphs"]) == (True, "NONE", "NONE")


def test_an_engine_that_is_started_again_takes_the_cache_it_had_and_asks_for_no_more(
    resolved: dict[str, dict[str, Any]],
) -> None:
    """`dapo` wants 0.7 of a GPU, 55.4 GiB, to be free at its first start; beside a policy that has grown since then it
    is not. vLLM's own check of the memory is asked."""
    from vllm.v1.worker.utils import request_memory

    def start(engine: dict[str, Any], free_gib: int) -> None:
        at_start: Any = SimpleNamespace(total_memory=TOTAL, free_memory=free_gib * 2**30, device_="cuda:0")
        cache: Any = SimpleNamespace(gpu_memory_utilization=engine["fraction"])
        request_memory(at_start, cache)

    first, again = resolved["dapo"], resolved["1"]
    start(first, 60)
    with pytest.raises(ValueError, match="Free memory on device"):
        start(first, 50)
    start(again, 50)
    assert again["cache_bytes"] == 11 * 2**30
    same = first.keys() - {"arguments", "fraction", "cache_bytes"}
    assert {key: again[key] for key in same} == {key: first[key] for key in same}


def test_other_cuts_of_the_30b_engines_are_taken(resolved: dict[str, dict[str, Any]]) -> None:
    assert resolved["2"]["tensor"] == 4
    assert resolved["3"]["expert_parallel"]


def test_an_engine_refuses_another_device_than_the_runs(tmp_path: Path) -> None:
    """vLLM takes what it finds: on a node whose environment is for CPUs a run for GPUs would be served by a CPU."""
    (tmp_path / "config.json").write_text("{}")
    engine = VllmEngine(EngineSpec(str(tmp_path), "bfloat16", "cuda", RolloutConfig(), 64))
    with pytest.raises(UserError, match=r"^cluster.device = cuda: vLLM computes on cpu on this node; give the env"):
        asyncio.run(engine.start())


@pytest.mark.parametrize(
    ("options", "hopper", "told"),
    [
        ({"quantization": "fp8_per_block"}, True, True),
        ({"hf_overrides": {"quantization_config": {"quant_method": "fp8"}}}, True, True),
        ({"quantization": "fp8_per_block"}, False, False),
        ({}, True, False),
    ],
)
def test_engines_on_hopper_keep_a_blocks_scale_as_it_is(options: dict[str, Any], hopper: bool, told: bool) -> None:
    """vLLM's DeepGEMM would round it to a power of two, and the weights with it: `is_deep_gemm_e8m0_used` in vLLM."""
    spec: Any = SimpleNamespace(rollout=RolloutConfig(options=options))
    name = "VLLM_USE_DEEP_GEMM_E8M0"
    assert scales(spec, hopper) == ({name: "0"} if told else {})
    found = find_spec("vllm")
    assert found is not None and found.origin is not None
    vllm = Path(found.origin).parent
    assert f'"{name}": lambda' in (vllm / "envs.py").read_text(), "vLLM reads another variable"
    assert f"if envs.{name}:" in (vllm / "utils" / "deep_gemm.py").read_text()
