"""The full-sized recipes against the published settings, number by number."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.config.compose import compose

CONFIGS = Path(__file__).parents[2] / "configs"

RECIPES = ("searchr1_30b", "searchr1_3b", "skyrl_sql_7b", "dapo", "dapo_7b", "dapo_1.7b", "dapo_4b", "gsm8k")
NOT_SAID = object()
_ = NOT_SAID

MODELS = [
    *("Qwen3-30B-A3B", "Qwen2.5-3B-Instruct", "Qwen2.5-Coder-7B-Instruct"),
    *("Qwen3-30B-A3B-Base", "Qwen2.5-Math-7B", "Qwen3-1.7B-Base", "Qwen3-4B-Base", "Qwen2.5-1.5B-Instruct"),
]
SEARCH, SQL = ["</search>", "</answer>"], ["</sql>", "</solution>"]

# The rows are those of the published tables, in their order; the columns are RECIPES.
PUBLISHED: dict[str, list[Any]] = {
    #                                   search 30B  search 3B  SQL 7B   DAPO 30B  7B     1.7B   4B      GSM8K
    "cluster.nodes":                    [4,         1,         1,       2,        1,     1,     2,      1],
    "cluster.gpus_per_node":            [8,         8,         8,       8,        8,     8,     8,      4],
    "policy.layout.tensor":             [2,         _,         _,       4,        _,     _,     _,      _],
    "policy.layout.pipeline":           [1,         _,         _,       1,        _,     _,     _,      _],
    "policy.layout.context":            [1,         _,         _,       1,        _,     _,     _,      _],
    "policy.layout.expert":             [8,         _,         _,       8,        _,     _,     _,      _],
    "rollout.engines":                  [4,         4,         2,       2,        2,     8,     16,     4],
    "rollout.tensor":                   [8,         2,         4,       8,        4,     1,     1,      1],
    "data.prompts_per_step":            [512,       512,       256,     512,      512,   512,   512,    1024],
    "data.mini_batch_prompts":          [256,       256,       256,     32,       32,    32,    32,     256],
    "data.samples_per_prompt":          [5,         5,         5,       16,       16,    16,    16,     5],
    "rollout.max_turns":                [4,         4,         6,       1,        1,     1,     1,      1],
    "algorithm.advantage":              ["grpo"] * 8,
    "algorithm.clip_low":               [0.2] * 8,
    "algorithm.clip_high":              [0.2,       0.2,       _,       0.28,     0.28,  0.28,  0.28,   _],
    "algorithm.dual_clip":              [None,      None,      None,    10.0,     10.0,  10.0,  10.0,   None],
    "algorithm.kl.coefficient":         [0.001,     0.001,     0.0,     0.0,      0.0,   0.0,   0.0,    0.001],
    "algorithm.kl.estimator":           ["k3",      "k3",      _,       _,        _,     _,     _,      _],
    "algorithm.importance_cap":         [None,      2.0,       None,    2.0,      None,  None,  None,   None],
    "algorithm.loss_mean":              ["sequences", "sequences", _] + ["tokens"] * 5,
    "algorithm.dynamic_sampling.enabled": [False] * 8,
    "policy.optimizer.lr":              [1e-6] * 8,
    "policy.optimizer.schedule":        ["constant"] * 8,
    "policy.optimizer.warmup_steps":    [94,        94,        0,       160,      160,   160,   160,    _],
    "policy.optimizer.clip_grad":       [0.5,       0.5,       0.5,     1.0,      1.0,   1.0,   1.0,    _],
    "policy.optimizer.weight_decay":    [_,         _,         _,       0.1,      0.1,   0.1,   0.1,    _],
    "rollout.max_prompt_tokens":        [2048,      2048,      6000,    2048,     2048,  2048,  2048,   512],
    "rollout.max_length":               [4096 + 500, 4096 + 500, 29000 + 3000, None, None, None, None, None],
    "rollout.sampling.max_tokens":      [500,       500,       3000,    8192,     8192,  8192,  8192,   1024],
    "algorithm.overlong.filter":        [_,         _,         _,       True,     True,  True,  True,   _],
    "algorithm.overlong.buffer":        [0,         0,         0,       4096,     4096,  4096,  4096,   0],
    "algorithm.overlong.penalty":       [_,         _,         _,       1.0,      1.0,   1.0,   1.0,    _],
    "rollout.sampling.temperature":     [1.0,       1.0,       0.6,     1.0,      1.0,   1.0,   1.0,    1.0],
    "rollout.sampling.top_p":           [1.0,       1.0,       0.95,    1.0,      1.0,   1.0,   1.0,    _],
    "rollout.sampling.stop":            [SEARCH,    SEARCH,    SQL,     [],       [],    [],    [],     []],
    "evaluation.samples":               [_,         _,         _,       32,       32,    32,    32,     _],
    "evaluation.top_p":                 [_,         _,         _,       0.7,      0.7,   0.7,   0.7,    _],
    "environment.retriever.topk":       [3,         3,         _,       _,        _,     _,     _,      _],
    "run.epochs":                       [1,         1,         30,      20,       20,    20,    20,     20],
    "evaluation.every":                 [50,        50,        5,       5,        10,    5,     5,      5],
}  # fmt: skip


SHARES = [0.6, 0.5, 0.7, 0.7, 0.8, 0.8, 0.8, 0.8]
"""The published `rollout.memory_fraction`. There policy and engines take turns in a GPU's memory; here both stay."""


def settings(name: str, *overrides: str) -> dict[str, Any]:
    """A recipe's settings by dotted key."""

    def flat(group: dict[str, Any], prefix: str) -> dict[str, Any]:
        found = {}
        for key, value in group.items():
            found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        return found

    return flat(asdict(compose(CONFIGS / f"{name}.yaml", overrides)), "")


@pytest.fixture(autouse=True)
def no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SKYRL_MEGA_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", RECIPES)
def test_every_number_is_the_published_one(name: str) -> None:
    column = RECIPES.index(name)
    published = {key: row[column] for key, row in PUBLISHED.items() if row[column] is not NOT_SAID}
    found = settings(name)
    assert {key: found[key] for key in published} == published
    assert found["model.path"] == f"models/{MODELS[column]}" and found["model.dtype"] == "bfloat16"
    # One tensor-parallel rank in an expert; policy and engines share all GPUs.
    assert found["policy.layout.expert_tensor"] is None and found["policy.ranks"] is None
    assert found["cluster.shared"] is True and found["cluster.device"] == "cuda"
    assert 0.25 <= found["rollout.memory_fraction"] <= SHARES[column]


def test_the_small_dapo_on_one_node() -> None:
    """With Megatron the 4B also ran on 8 GPUs, TP4 PP2, as the recipe's comment says."""
    comment = next(line for line in (CONFIGS / "dapo_4b.yaml").read_text().splitlines() if line.startswith("# cluster"))
    found = settings("dapo_4b", *comment.removeprefix("# ").split())
    assert (found["cluster.nodes"], found["cluster.gpus_per_node"]) == (1, 8)
    assert (found["policy.layout.tensor"], found["policy.layout.pipeline"]) == (4, 2)
    assert found["rollout.engines"] * found["rollout.tensor"] == 8


def test_folders_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_MEGA_MODELS", "/m")
    monkeypatch.setenv("SKYRL_MEGA_DATA", "/d")
    monkeypatch.setenv("SKYRL_MEGA_RETRIEVER", "http://10.0.0.1:1234")
    found = settings("searchr1_30b")
    assert found["model.path"] == "/m/Qwen3-30B-A3B"
    assert found["data.train"] == ["/d/searchr1/train.parquet"]
    assert found["environment.retriever.url"] == "http://10.0.0.1:1234"
    assert settings("skyrl_sql_7b", "data.folder=/x")["environment.options.text2sql.db_path"] == "/x/db_files/data"


SIZE = {
    *("run.name", "run.steps", "cluster.device", "cluster.nodes", "cluster.gpus_per_node", "cluster.shared"),
    *("cluster.gpu_memory_gib", "cluster.host_memory_gib", "cluster.start_timeout_s"),
    *("model.path", "model.dtype", "model.max_length", "policy.ranks", "policy.recompute", "policy.micro_tokens"),
    *("policy.logit_chunk", "policy.layout.tensor", "policy.layout.pipeline", "policy.layout.expert"),
    *("policy.optimizer.lr", "policy.optimizer.warmup_steps", "algorithm.importance_cap"),
    *("rollout.engines", "rollout.tensor", "rollout.memory_fraction", "rollout.kv_cache_gib", "rollout.concurrency"),
    *("rollout.max_length", "rollout.max_prompt_tokens", "rollout.max_response_tokens", "rollout.sampling.max_tokens"),
    *("data.folder", "data.prepare", "data.train", "data.eval"),
    *("data.prompts_per_step", "data.mini_batch_prompts", "data.samples_per_prompt"),
    *("evaluation.every", "evaluation.before", "evaluation.samples", "evaluation.limit", "checkpoint.every"),
}
"""Where a recipe of the CPU and the one of a cluster may differ: the machine, the model, lengths, counts, files."""


@pytest.mark.parametrize(
    "small, full, own",
    [
        ("gsm8k_cpu", "gsm8k", set()),
        (
            "searchr1_cpu",
            "searchr1_30b",
            {
                *(
                    "rollout.sampling.temperature",
                    "environment.options.search.reward",
                    "environment.options.search.wrong_answer",
                ),
                *(
                    f"environment.retriever.{key}"
                    for key in ("url", "index", "build", "serve", "topk", "passage_chars")
                ),
            },
        ),
        (
            "sql_cpu",
            "skyrl_sql_7b",
            {"rollout.max_turns", *(f"environment.options.text2sql.{key}" for key in ("db_path", "shown_characters"))},
        ),
        (
            "dapo_cpu",
            "dapo",
            {"algorithm.dynamic_sampling.enabled", "algorithm.overlong.buffer", "rollout.sampling.temperature"},
        ),
    ],
)
def test_a_small_recipe_differs_from_the_full_one_in_size_alone(small: str, full: str, own: set[str]) -> None:
    a, b = settings(small), settings(full)
    absent = object()
    different = {key for key in a | b if a.get(key, absent) != b.get(key, absent)}
    allowed = SIZE | own | {"algorithm.dynamic_sampling.max_rounds"}
    assert different <= allowed, different - allowed
    assert own <= different


@pytest.mark.parametrize("recipe", ["gsm8k", "searchr1_3b", "dapo", "searchr1_30b"])
def test_h100_recipes_are_for_gpus_and_wait_for_a_cold_start(recipe: str) -> None:
    """16 processes a node import torch and vLLM from a shared file system, and engines profile and capture graphs."""
    found = settings(recipe)
    assert found["cluster.device"] == "cuda"
    assert found["cluster.start_timeout_s"] >= 1800
    assert found["cluster.gpu_memory_gib"] < 80 and found["cluster.host_memory_gib"] > 0
