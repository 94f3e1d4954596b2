"""The full-sized recipes against the published settings, number by number."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.config.compose import compose
from tests.recipes.published import DEVIATIONS, RUNS

CONFIGS = Path(__file__).parents[2] / "configs"

SMALL = {
    "quickstart",
    "gsm8k_cpu",
    "searchr1_cpu",
    "sql_cpu",
    "dapo_cpu",
    "multiply_cpu",
    "calculator_cpu",
    "agent_cpu",
}
"""Recipes for a laptop, without a published counterpart."""

LAYOUT = {
    *("run.name", "model.path", "cluster.nodes"),
    *("policy.layout.tensor", "policy.layout.pipeline", "policy.layout.expert", "policy.recompute"),
    *("policy.layout.first_stage_layers", "policy.layout.last_stage_layers"),
    *("policy.optimizer.streamed", "policy.micro_tokens", "residency.keep"),
    *("rollout.engines", "rollout.tensor", "rollout.memory_fraction"),
}
"""Settings of a recipe for another model that may differ: the model, its layout and its memory."""
TEMPLATE = "rollout.chat_template_options"
OTHER_MODELS = {
    "dapo_glm_4_5_air": ("dapo", set[str]()),
    "dapo_gpt_oss_20b": ("dapo", {"rollout.options.enable_expert_parallel", f"{TEMPLATE}.reasoning_effort"}),
    "dapo_qwen3_5": ("dapo", {f"{TEMPLATE}.enable_thinking"}),
    # Moonlight is made for 8,192 tokens.
    "dapo_moonlight": ("dapo", {"rollout.sampling.max_tokens", "algorithm.overlong.buffer"}),
    "searchr1_glm_4_5_air": ("searchr1_30b", set[str]()),
    "searchr1_moonlight": ("searchr1_30b", set[str]()),
}
"""Recipe → the recipe with the settings of a published run, and the keys that differ beside `LAYOUT`."""


def settings(name: str, *overrides: str) -> dict[str, Any]:
    """Returns a recipe's settings by dotted key."""

    def flat(group: dict[str, Any], prefix: str) -> dict[str, Any]:
        by_key = {}
        for key, value in group.items():
            by_key |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        return by_key

    return flat(asdict(compose(CONFIGS / f"{name}.yaml", overrides)), "")


@pytest.fixture(autouse=True)
def no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SKYRL_MEGA_")]:
        monkeypatch.delenv(name)


def deviations(found: dict[str, Any], published: dict[str, Any]) -> dict[str, Any]:
    """Returns the recipe's differing values by key."""
    absent = object()
    return {key: found.get(key) for key, value in published.items() if found.get(key, absent) != value}


@pytest.mark.parametrize("name", RUNS)
def test_a_recipe_is_the_published_run_but_for_what_is_named(name: str) -> None:
    """Compares the deviations: unnamed deviations and obsolete names fail."""
    named = {key: deviation.ours for key, deviation in DEVIATIONS[name].items()}
    assert deviations(settings(name), RUNS[name].values) == named


@pytest.mark.parametrize("name", RUNS)
def test_a_deviation_is_named_beside_the_setting(name: str) -> None:
    """Searches the recipe and its group files for a line with the key and the word published."""
    recipe = (CONFIGS / f"{name}.yaml").read_text()
    groups = re.findall(r"^  - (\w+): ([\w.]+)$", recipe, re.MULTILINE)
    lines = [recipe, *((CONFIGS / group / f"{file}.yaml").read_text() for group, file in groups)]
    for key, deviation in DEVIATIONS[name].items():
        leaf = key.rpartition(".")[2]
        assert re.search(rf"{leaf}:.*published", "\n".join(lines)), f"{name}: {key} ({deviation.reason})"


def test_what_is_compared_can_differ() -> None:
    """Checks the keys against the settings and changes every value, to prove the comparison."""
    recipe_settings = settings("dapo")
    assert set(RUNS["dapo"].values) <= set(recipe_settings)
    for key in RUNS["dapo"].values:
        assert deviations({**recipe_settings, key: "another"}, RUNS["dapo"].values)[key] == "another"
    assert all(deviation.reason for one in DEVIATIONS.values() for deviation in one.values())
    assert set(DEVIATIONS) == set(RUNS) == {f.stem for f in CONFIGS.glob("*.yaml")} - SMALL - set(OTHER_MODELS)


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_a_recipe_of_another_model_differs_from_the_published_run_in_its_layout_alone(name: str) -> None:
    base, more = OTHER_MODELS[name]
    a, b = settings(name), settings(base)
    different = {key for key in a | b if a.get(key) != b.get(key)}
    assert {"run.name", "model.path"} | more <= different <= LAYOUT | more


def test_folders_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_MEGA_MODELS", "/m")
    monkeypatch.setenv("SKYRL_MEGA_DATA", "/d")
    monkeypatch.setenv("SKYRL_MEGA_RETRIEVER", "http://10.0.0.1:1234")
    recipe_settings = settings("searchr1_30b")
    assert recipe_settings["model.path"] == "/m/Qwen3-30B-A3B"
    assert recipe_settings["data.train"] == ["/d/searchr1/train.parquet"]
    assert recipe_settings["environment.retriever.url"] == "http://10.0.0.1:1234"
    assert settings("skyrl_sql_7b", "data.folder=/x")["environment.options.text2sql.db_path"] == "/x/db_files/data"


SIZE = {
    *(
        "run.name",
        "run.seed",
        "run.steps",
        "cluster.device",
        "cluster.nodes",
        "cluster.gpus_per_node",
        "cluster.shared",
    ),
    *("cluster.gpu_memory_gib", "cluster.host_memory_gib", "cluster.cores_per_node", "cluster.start_timeout_s"),
    *("model.path", "model.dtype", "model.max_length", "policy.ranks", "policy.recompute", "policy.micro_tokens"),
    *("policy.logit_chunk", "policy.layout.tensor", "policy.layout.pipeline", "policy.layout.expert"),
    *("policy.optimizer.lr", "policy.optimizer.warmup_steps", "algorithm.importance_cap"),
    *("rollout.engines", "rollout.tensor", "rollout.memory_fraction", "rollout.kv_cache_gib", "rollout.concurrency"),
    *("rollout.max_length", "rollout.max_prompt_tokens", "rollout.max_response_tokens", "rollout.sampling.max_tokens"),
    "residency.keep",
    *("data.folder", "data.prepare", "data.train", "data.eval"),
    *("data.prompts_per_step", "data.mini_batch_prompts", "data.samples_per_prompt"),
    *("evaluation.every", "evaluation.before", "evaluation.samples", "evaluation.limit", "checkpoint.every"),
    *("checkpoint.keep", "checkpoint.resume", "environment.workers"),
}
"""Settings that may differ between a CPU recipe and its cluster recipe: machine, model, lengths, counts, files."""


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
                    "rollout.conversation",
                    "environment.options.search.reward",
                    "environment.options.search.wrong_answer",
                    "environment.options.search.invalid",
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
            {
                "rollout.max_turns",
                "rollout.conversation",
                *(f"environment.options.text2sql.{key}" for key in ("db_path", "shown_characters")),
            },
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
    """Checks the start timeout: 16 processes per node import torch and vLLM from a shared file system, and engines
    profile and capture graphs.
    """
    recipe_settings = settings(recipe)
    assert recipe_settings["cluster.device"] == "cuda"
    assert recipe_settings["cluster.start_timeout_s"] >= 1800
    assert recipe_settings["cluster.gpu_memory_gib"] < 80 and recipe_settings["cluster.host_memory_gib"] > 0
