"""Measures tokens per second of whole RL steps on a CPU, next to TRL's GRPO, in turn.

    python -m benchmarks.step --trl PYTHON [--only moe smollm2] [--rounds 2] [--steps 6] [--output FILE.json]
        [--set policy.micro_tokens=4096 …]

Both sides use the same model, prompts, lengths and batch. PYTHON is an interpreter of a separate environment with TRL:
`pip install torch==2.13.0 trl==1.16.0 transformers accelerate datasets`. Without `--trl` only this project is measured.

- moe: a Qwen3-MoE of 1M parameters, 256 responses of 128 tokens.
- smollm2: SmolLM2-135M-Instruct, 16 responses of 128 tokens.

Every response reaches the full length: the model's directory names no end token (TRL also gets `min_new_tokens`).
Rewards are pseudo-random, from the answer's letters; the dtype is float32, with an optimizer step per generation,
without reference and dynamic sampling. A step includes generation, log-probs if any, training and weight sync. The
first steps are left out; the median of the others, over all rounds, counts. Both sides use all cores. `--set` adds
settings for this project.

Seconds need a quiet machine; CPU seconds, of all processes of a side, depend less on other load. Steps of SmolLM2 are
bound by the memory, so the bandwidth of the machine is measured with each case.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.host import cpu_seconds, read_bandwidth
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.models import smollm2, tiny
from skyrl_mega.telemetry.metrics import read

ROOT = Path(__file__).parents[1]
WARM = 2
"""Number of first steps left out of each run: caches fill, and memory is allocated."""
COMMON = ("policy.ranks=2", "policy.share_prefixes=true", "rollout.eager=false")
"""Settings of both cases."""
PHASES = ("generate", "logprobs", "train", "sync", "other")
MOE = BuildConfig(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, experts=8, expert_ffn=128, max_length=256)


@dataclass(frozen=True)
class Case:
    """A model and a batch."""

    model: str
    """Directory of the model; at first the name."""
    prompts: int
    samples: int
    """Responses per prompt."""
    length: int
    """Tokens of a response."""
    settings: tuple[str, ...]
    """Settings suited to two cores, all public: data-parallel replicas of the whole model, no messages inside a layer,
    shared prompts, logits of a micro-batch in one chunk, compiled engines. Engines for the tiny model are bound by
    Python, hence two; an engine of SmolLM2 is bound by reading the weights, hence one with two threads, which reads
    them once."""
    trl_micro: int
    """Sequences of TRL's micro-batch: a first choice, not tuned."""
    trl_model: dict[str, Any] = field(default_factory=dict)
    """More of TRL's `model_init_kwargs`."""
    steps: int = 6

    @property
    def questions(self) -> list[str]:
        """Returns additions, enough for all steps."""
        return [f"{12 + i % 83}+{17 + i % 79}=" for i in range(self.prompts * self.steps)]

    @property
    def tokens(self) -> int:
        """Returns the number of response tokens of a step."""
        return self.prompts * self.samples * self.length


CASES = {
    "moe": Case(
        *("moe", 32, 8, 128),
        settings=(*COMMON, "policy.micro_tokens=8192", "policy.logit_chunk=8192", "rollout.engines=2"),
        trl_micro=256,
    ),
    "smollm2": Case(
        *("smollm2", 4, 4, 128),
        settings=(*COMMON, "policy.micro_tokens=1024", "rollout.engines=1", "rollout.threads=2"),
        trl_micro=16,
    ),
}


def make_model(name: str, folder: Path) -> Path:
    """Writes the model's directory, without an end token."""
    path = folder / name
    if name == "moe":
        tiny.build(MOE, path)
    else:
        smollm2.write(path)
    for file in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"):
        if (path / file).is_file():
            kept = json.loads((path / file).read_text())
            (path / file).write_text(json.dumps({k: v for k, v in kept.items() if not k.startswith("eos_token")}))
    return path


def ours(case: Case, folder: Path, more: list[str]) -> list[dict[str, float | None]]:
    """Returns the metrics of the steps of a run of `skyrl_mega`."""
    model = Path(shutil.copytree(case.model, folder / "model"))
    (model / "generation_config.json").write_text('{"eos_token_id": []}')  # turns end only by the limit
    config = {
        "run": {"name": "run", "directory": str(folder), "steps": case.steps},
        "cluster": {"device": "cpu"},
        "model": {"path": str(model), "dtype": "float32"},
        "policy": {"optimizer": {"lr": 1e-5}},
        "rollout": {
            "max_prompt_tokens": 64,
            "concurrency": case.prompts * case.samples,
            "sampling": {"max_tokens": case.length},
        },
        "environment": {"default": "parity", "classes": {"parity": f"{ROOT}/benchmarks/fault_env.py:ParityEnv"}},
        "data": {
            "train": [str(folder / "prompts.parquet")],
            "prompts_per_step": case.prompts,
            "samples_per_prompt": case.samples,
            "shuffle": False,
        },
        "evaluation": {"every": 0, "before": False},
        "checkpoint": {"every": 0},
        "telemetry": {"trackers": []},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    rows = [
        {"prompt": [{"role": "user", "content": text}], "reward_spec": {"ground_truth": "0"}} for text in case.questions
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    command = [sys.executable, "-m", "skyrl_mega.launch", "--config", str(folder / "config.yaml")]
    metrics = folder / "run" / "metrics.jsonl"
    with (folder / "log").open("w") as log:
        run = psutil.Popen([*command, *case.settings, *more], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        cpu = cpu_seconds_by_step(run, metrics)
    if run.returncode:
        sys.exit(f"ours ended with {run.returncode}:\n{(folder / 'log').read_text()}")
    step_rows = [row for row in read(metrics) if row["step"]]
    assert all(row["rollout/tokens"] == case.tokens for row in step_rows), "a response has another length"
    for row in step_rows[1:]:
        row["cpu"] = cpu[int(row["step"] or 0)] - cpu[int(row["step"] or 0) - 1]
    return step_rows[WARM:]


def cpu_seconds_by_step(run: psutil.Popen, metrics: Path) -> dict[int, float]:
    """Waits for the end of a run; returns the CPU seconds that its processes had used at the end of each step."""
    used: dict[int, float] = {}
    size = 0
    while run.poll() is None:
        time.sleep(0.02)
        if metrics.is_file() and metrics.stat().st_size != size:
            seconds = cpu_seconds([run, *run.children(recursive=True)])
            size = metrics.stat().st_size
            used |= {int(row["step"]): seconds for row in read(metrics) if row["step"] and row["step"] not in used}
    return used


def trls(case: Case, folder: Path, python: Path) -> list[tuple[float, float]]:
    """Runs TRL; returns seconds and CPU seconds of the steps."""
    file = folder / "trl.json"
    file.write_text(json.dumps({**asdict(case), "questions": case.questions}))
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "trl.log").open("w") as log:
        # -P: this folder contains modules with names of packages imported by transformers.
        command = [str(python), "-P", str(ROOT / "benchmarks" / "step_trl.py"), str(file)]
        ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    if ended.returncode:
        sys.exit(f"TRL ended with {ended.returncode}:\n{(folder / 'trl.log').read_text()}")
    answer = json.loads(ended.stdout.splitlines()[-1])
    return list(zip(answer["seconds"], answer["cpu_seconds"], strict=True))[WARM:]


def compare(case: Case, rounds: int, python: Path | None, more: list[str]) -> dict[str, Any]:
    """Measures both sides in turn."""
    rows: list[dict[str, float | None]] = []
    peer: list[tuple[float, float]] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            rows += ours(case, Path(folder), more)
            peer += trls(case, Path(folder), python) if python else []
    steps = [row["time/step"] or 0.0 for row in rows]
    result: dict[str, Any] = {
        "tokens": case.tokens,
        "settings": [*case.settings, *more],
        "memory_gb_s": read_bandwidth(),
        "ours_s": statistics.median(steps),
        "ours_steps_s": steps,
        "ours_cpu_s": statistics.median(row["cpu"] or 0.0 for row in rows),
        "phases_s": {name: statistics.median(row.get(f"time/{name}") or 0.0 for row in rows) for name in PHASES},
    }
    result["ours_tokens_s"] = case.tokens / result["ours_s"]
    if peer:
        seconds, cpu = (list(column) for column in zip(*peer, strict=True))
        result |= {"trl_s": statistics.median(seconds), "trl_steps_s": seconds, "trl_micro": case.trl_micro}
        result["trl_cpu_s"] = statistics.median(cpu)
        result |= {"trl_tokens_s": case.tokens / result["trl_s"], "ratio": result["trl_s"] / result["ours_s"]}
    return result


def rates(result: dict[str, Any], side: str) -> str:
    """Returns a side's tokens per second and CPU seconds as text."""
    return f"{result[f'{side}_tokens_s']:.0f} tokens/s, {result[f'{side}_cpu_s']:.2f} CPU s a step"


def main() -> None:
    """Measures the cases and prints a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trl", type=Path, metavar="PYTHON", help="interpreter of an environment with TRL")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help=f"of a round; the first {WARM} are left out")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more settings of ours")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            model = str(make_model(name, Path(folder)))
            case = Case(**{**vars(CASES[name]), "model": model, "steps": args.steps})
            results[name] = result = compare(case, args.rounds, args.trl and args.trl.absolute(), args.set)
            phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result["phases_s"].items())
            print(f"{name}: memory {result['memory_gb_s']:.0f} GB/s")
            print(f"{name}: ours {result['ours_s']:.2f} s a step ({phases}), {rates(result, 'ours')}")
            if args.trl:
                print(f"{name}: TRL {result['trl_s']:.2f} s a step, {rates(result, 'trl')}")
                print(f"{name}: {result['ratio']:.2f}x TRL's tokens a second", flush=True)
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
