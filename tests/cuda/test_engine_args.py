"""Tests of the engine arguments of every GPU recipe, resolved by vLLM's configuration classes for a node of H100s.

Tests with real engines run on CPUs. There vLLM differs from a GPU in these points:

| | CPU, in tests | CUDA |
|---|---|---|
| model runner | V1 (no Triton) | V2 |
| sampler, seeded | a torch generator for each request | Gumbel noise from seed and position, in Triton |
| compilation, graphs | none (`rollout.eager`) | piecewise compilation; full graphs for decoding, piecewise else |
| scheduling | waits for each step's tokens | asynchronous: the next step is scheduled before the tokens arrive |
| long prompts | whole in one step | in chunks, together with the decoding of other requests |
| cache | `rollout.kv_cache_gib` | the rest of `rollout.memory_fraction`, measured at the first start |
| worker | `uni` in the engine's process with one | `mp`, a process each |

The tests check that vLLM accepts and resolves our arguments. Only a GPU can show that the kernels compute the right
numbers.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import BuildConfig, RolloutConfig
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.spec import EngineSpec, arguments, scales
from skyrl_mega.models.tiny import hf_config
from tests.conftest import ROOT
from tests.cuda.engine_config import TOTAL
from tests.support.recipes import GPU_RECIPES

OTHERS: list[tuple[str, list[str], int | None]] = [
    ("dapo", ["rollout.eager=true"], None),
    ("dapo", [], 11 * 2**30),
    ("dapo", ["rollout.tensor=4", "rollout.engines=4"], None),
    ("dapo", ["rollout.options={enable_expert_parallel: true}"], None),
]


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns the configurations by recipe and by index in `OTHERS`. All resolve in two processes, because importing
    vLLM takes most of the time."""
    cases: list[tuple[str, list[str], int | None]] = [(str(file), [], None) for file in GPU_RECIPES]
    cases += [(str(ROOT / "configs" / f"{name}.yaml"), settings, former) for name, settings, former in OTHERS]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)}
    environment["VLLM_CACHE_ROOT"] = str(tmp_path_factory.mktemp("vllm"))
    for what in ("inspect", json.dumps(cases)):
        command = [sys.executable, "-m", "tests.cuda.engine_config", what]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    configurations = json.loads(done.stdout)
    names = [file.stem for file in GPU_RECIPES] + [str(i) for i in range(len(OTHERS))]
    return dict(zip(names, configurations, strict=True))


@pytest.mark.parametrize("file", GPU_RECIPES, ids=lambda file: file.stem)
def test_a_recipes_engine_on_h100s(resolved: dict[str, dict[str, Any]], file: Path) -> None:
    config, v = compose(file), resolved[file.stem]
    rollout = config.rollout
    assert (v["device"], v["worker"], v["executor"]) == ("cuda", "vllm.v1.worker.gpu_worker.Worker", "mp")
    assert v["v2"], "the runner for which seeds and log-probs were read through"
    assert not v["eager"]
    assert (v["compilation"], v["graphs"]) == ("VLLM_COMPILE", "FULL_AND_PIECEWISE")
    assert v["largest_graph"] == (1024 if "gpt-oss" in config.model.path else 512), "vLLM's own choice"
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
    assert (v["tensor"], v["expert_parallel"]) == (rollout.tensor, "enable_expert_parallel" in rollout.options)


def test_eager_takes_compilation_and_graphs_away(resolved: dict[str, dict[str, Any]]) -> None:
    eager = resolved["0"]
    assert (eager["eager"], eager["compilation"], eager["graphs"]) == (True, "NONE", "NONE")


def test_an_engine_that_is_started_again_takes_the_cache_it_had_and_asks_for_no_more(
    resolved: dict[str, dict[str, Any]],
) -> None:
    """Restarts an engine with less free memory. `dapo` needs 0.7 of a GPU, 55.4 GiB, at its first start; after the
    policy has grown, less is free. vLLM's memory check decides."""
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
    """Starts an engine for CUDA on a CPU node. vLLM would accept the CPU, and a run for GPUs would be served by a
    CPU."""
    (tmp_path / "config.json").write_text("{}")
    engine = VllmEngine(EngineSpec(str(tmp_path), "bfloat16", "cuda", RolloutConfig(), 64))
    with pytest.raises(UserError, match=r"^cluster.device = cuda: vLLM computes on cpu on this node; give the env"):
        asyncio.run(engine.start())


def test_files_in_block_fp8_make_an_engine_without_quantisation(tmp_path: Path) -> None:
    """Checks the change of config.json beside changes of the run and of the user, and that vLLM reads no FP8."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config(BuildConfig())))
    extra = {"hf_overrides": {"max_position_embeddings": 99}}
    rollout = RolloutConfig(options={"hf_overrides": {"rope_theta": 5.0}})
    plain = EngineSpec(str(tmp_path), "bfloat16", "cpu", rollout, 64, weights="auto", extra=extra)
    changed = {"max_position_embeddings": 99, "rope_theta": 5.0}
    assert (arguments(plain)["load_format"], arguments(plain)["hf_overrides"]) == ("auto", changed)
    fp8 = arguments(replace(plain, dequantised=True))
    assert (fp8["load_format"], fp8["hf_overrides"]) == ("dummy", {"quantization_config": None, **changed})
    assert "hf_overrides" not in arguments(EngineSpec(str(tmp_path), "bfloat16", "cpu", RolloutConfig(), 64))
    (tmp_path / "config.json").write_text(json.dumps(hf_config(BuildConfig(architecture="deepseek_v3"))))
    latent = arguments(replace(plain, dequantised=True))
    assert latent["hf_overrides"] == {"moe_router_dtype": "float32", "quantization_config": None, **changed}
    assert latent["load_format"] == "dummy" and latent["attention_config"] == {"backend": "CPU_MLA"}


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
    """Checks the variable that keeps block scales unrounded. vLLM's DeepGEMM would round scales to powers of two, and
    so change the weights: `is_deep_gemm_e8m0_used` in vLLM."""
    spec: Any = SimpleNamespace(rollout=RolloutConfig(options=options))
    name = "VLLM_USE_DEEP_GEMM_E8M0"
    assert scales(spec, hopper) == ({name: "0"} if told else {})
    configurations = find_spec("vllm")
    assert configurations is not None and configurations.origin is not None
    vllm = Path(configurations.origin).parent
    assert f'"{name}": lambda' in (vllm / "envs.py").read_text(), "vLLM reads another variable"
    assert f"if envs.{name}:" in (vllm / "utils" / "deep_gemm.py").read_text()
