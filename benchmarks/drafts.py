"""Draft tokens on a real CPU engine: equal greedy tokens, an equal distribution, and tokens per second.

    python -m benchmarks.drafts [--samples 50000] [--rounds 3] [--output benchmarks/results/drafts.json]

A small model with random weights soon repeats itself when greedy: that is the repetitive task, and sampling the other.
The model of `model` drafts is the policy itself, so nearly all of its drafts are accepted, and each costs as much as a
token. χ² compares the second tokens of `--samples` answers, each checked against a draft, with exact probabilities from
transformers. Greedy tokens are compared with those of the engine without drafts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema import RolloutConfig
from skyrl_mega.config.schema.drafts import DraftsConfig
from skyrl_mega.engines.base import Completion, Request, Sampling
from tests.support.engines import build_model, complete, spec_of, start_engine
from tests.weights.test_draft_engine import chi_squared, prompt

SIZES: dict[str, Any] = {"hidden": 64, "layers": 2}
SEQUENCES = (1, 16, 64)
TOKENS = 100
BLOCK = 5000
"""Requests of a call."""


def variants(path: Path) -> dict[str, DraftsConfig]:
    """Returns the drafts to compare, by name."""
    common: dict[str, Any] = {"max_tokens": 4, "adaptive": False}
    return {
        "none": DraftsConfig(),
        "ngram": DraftsConfig(method="ngram", **common),
        "ngram, adaptive": DraftsConfig(method="ngram", max_tokens=4),
        "model": DraftsConfig(method="model", path=str(path), **common),
        "ngram, shortest 1": DraftsConfig(method="ngram", shortest=1, **common),
    }


def speed(engine: ActorGroup, model: Any, sequences: int, sampling: Sampling, rounds: int) -> dict[str, Any]:
    """Returns the tokens per second of all sequences together, the counts of drafts, and the tokens of each answer."""
    requests = [Request(f"{i}/0", 3 * prompt(model, i)[:8], TOKENS, seed=i) for i in range(sequences)]
    engine.call_one(0, "drafts", timeout=60)
    rates = []
    for _ in range(rounds + 1):  # the first round compiles kernels
        engine.call_one(0, "forget", timeout=60)
        begun = time.perf_counter()
        answers = complete(engine, requests, sampling)
        rates.append(sum(len(a.tokens) for a in answers.values()) / (time.perf_counter() - begun))
    counts = engine.call_one(0, "drafts", timeout=60)
    return {
        "tokens_per_s": round(median(rates[1:]), 1),
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "suppressed": round(counts.suppressed / counts.steps, 3) if counts.steps else None,
        "tokens": [list(answers[r.id].tokens) for r in requests],
    }


def distribution(engine: ActorGroup, model: Any, samples: int) -> dict[str, Any]:
    """Returns the probability of a larger χ² by sampling parameters, and the number of sampled and drafted tokens."""
    start, result = prompt(model), {}
    for name, sampling in (("plain", Sampling()), ("cut", Sampling(temperature=0.7, top_p=0.9, top_k=20))):
        engine.call_one(0, "drafts", timeout=60)
        answers: list[Completion] = []
        for block in range(0, samples, BLOCK):
            requests = [Request(f"{i}/0", start, 2, seed=i) for i in range(block, min(samples, block + BLOCK))]
            answers += complete(engine, requests, sampling).values()
        counts = engine.call_one(0, "drafts", timeout=60)
        probability = round(chi_squared(model, start, answers, sampling), 4)
        result[name] = {"p": probability, "tokens": counts.written, "drafted": counts.drafted}
    return result


def main() -> None:
    """Runs the measurements and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, session(actors=2):
        from transformers import AutoModelForCausalLM

        path = build_model(Path(folder) / "model", "qwen3_moe", 0, **SIZES)
        model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
        for name, drafts in variants(path).items():
            rollout = RolloutConfig(kv_cache_gib=0.2, concurrency=256, drafts=drafts)
            engine = start_engine("engine", spec_of(path, rollout, weights="auto"), Path(folder))
            rows[name] = {
                f"{kind}, {n} sequences": speed(engine, model, n, sampling, args.rounds)
                for kind, sampling in (("greedy", Sampling(temperature=0)), ("sampled", Sampling()))
                for n in SEQUENCES
            }
            if name == "ngram, shortest 1":
                rows[name]["distribution"] = distribution(engine, model, args.samples)
            engine.shutdown()
            print(name, {key: {k: v for k, v in row.items() if k != "tokens"} for key, row in rows[name].items()})
    plain = {key: figures["tokens"] for key, figures in rows["none"].items()}
    for row in rows.values():
        for key, tokens in plain.items():
            own = row[key].pop("tokens")
            if key.startswith("greedy"):
                row[key]["equal"] = own == tokens
    result = {"cores": len(os.sched_getaffinity(0)), "model": SIZES, "rows": rows}
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
