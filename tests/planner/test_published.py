"""Layouts of published models that need many nodes: each passes every check of a plan, and fits by the estimates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyrl_mega.cli.train import main
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.derived import engine_data, engine_ranks
from skyrl_mega.config.schema import Config
from skyrl_mega.models.published import known
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner.engine_search import engine_choices
from skyrl_mega.planner.engine_weights import engine_bytes
from skyrl_mega.planner.fit import parallel_of, problem
from skyrl_mega.planner.memory import GIB
from skyrl_mega.planner.times import elements

RECIPE = Path(__file__).parents[2] / "configs" / "dapo.yaml"
STREAMED = ("cluster.nodes=32", "policy.optimizer.streamed=true", "policy.layout.tensor=8", "policy.layout.pipeline=4")
DEEPSEEK = (
    *STREAMED,
    *("policy.layout.expert=64", "policy.layout.first_stage_layers=17", "policy.layout.last_stage_layers=14"),
)
KIMI = (
    *STREAMED,
    *("policy.layout.expert=64", "policy.layout.first_stage_layers=16", "policy.layout.last_stage_layers=15"),
)
GLM = ("cluster.nodes=16", "policy.layout.tensor=8", "policy.layout.pipeline=4", "policy.layout.expert=32")
QWEN3_5 = (
    *("cluster.nodes=16", "policy.optimizer.streamed=true", "policy.layout.tensor=2", "policy.layout.pipeline=8"),
    *("policy.layout.expert=8", "policy.layout.first_stage_layers=6", "policy.layout.last_stage_layers=6"),
    *("policy.recompute=full", "policy.micro_tokens=4096"),
)
GPT_OSS = (
    *("cluster.nodes=4", "policy.optimizer.streamed=true", "policy.layout.expert=32", "policy.recompute=selective"),
    *("policy.micro_tokens=8192", "rollout.options.enable_expert_parallel=true"),
)
H200 = "cluster.gpu_memory_gib=139.8"


def engines(count: int, tensor: int, data: int = 1) -> tuple[str, ...]:
    """Returns the settings of engines; with data-parallel replicas, which share experts, of each."""
    dealt = ("rollout.options.enable_expert_parallel=true", f"rollout.options.data_parallel_size={data}")
    return (f"rollout.engines={count}", f"rollout.tensor={tensor}", *(dealt if data > 1 else ()))


CASES = {
    "DeepSeek-V3, H100, 8 × TP32": ("DeepSeek-V3", (*DEEPSEEK, *engines(8, 32))),
    "DeepSeek-V3, H200, 16 × TP16": ("DeepSeek-V3", (*DEEPSEEK, *engines(16, 16), H200)),
    "DeepSeek-V3, H100, 8 × TP8 DP4 EP32": ("DeepSeek-V3", (*DEEPSEEK, *engines(8, 8, 4))),
    "Kimi-K2, H100, 4 × TP8 DP8 EP64": ("Kimi-K2-Instruct", (*KIMI, *engines(4, 8, 8))),
    "GLM-4.5, H100, 8 × TP16": ("GLM-4.5", (*GLM, *engines(8, 16))),
    "Qwen3.5-397B, H100, 4 × TP8 DP4 EP32": ("Qwen3.5-397B-A17B", (*QWEN3_5, *engines(4, 8, 4))),
    "gpt-oss-120b, H100, 4 × TP8 EP8": ("gpt-oss-120b", (*GPT_OSS, *engines(4, 8))),
    "GLM-4.5, H200, 16 × TP8": ("GLM-4.5", (*GLM, *engines(16, 8), H200)),
}
"""Model and settings of `configs/dapo.yaml` for it."""


def overrides(model: str, given: tuple[str, ...]) -> list[str]:
    """Returns the settings as arguments of the command line."""
    return [f"model.path=models/{model}", "run.name=large", *given]


DEEPSEEK_V3 = architecture(known("DeepSeek-V3")).describe(known("DeepSeek-V3"))


def settings(model: str, given: tuple[str, ...]) -> Config:
    return compose(RECIPE, ["policy.micro_tokens=16384", *overrides(model, given)])


@pytest.mark.parametrize(("model", "given"), CASES.values(), ids=CASES)
def test_a_large_model_has_a_layout_that_fits(model: str, given: tuple[str, ...]) -> None:
    config, hf = settings(model, given), known(model)
    check(config, planned=True)
    decoder, (parallel, _) = architecture(hf).describe(hf), parallel_of(config)
    architecture(hf).check_layout(hf, parallel)
    assert problem(config, decoder) is None
    held = engine_bytes(config, decoder) * parallel.ranks / config.rollout.engines / (2 * elements(decoder))
    assert 1 <= held < 1.3, "an engine's workers hold the model, and small parts of it several times"


def test_sixteen_workers_of_deepseek_v3_do_not_fit_an_h100() -> None:
    """Checks the reason for 32 workers: 16 hold 84 GB each."""
    model, given = CASES["DeepSeek-V3, H200, 16 × TP16"]
    config, hf = settings(model, (*given, "cluster.gpu_memory_gib=79.1")), known(model)
    error = problem(config, architecture(hf).describe(hf))
    assert error is not None and "the weights of rollout.tensor 16 take 79.9" in str(error)


WITHOUT_ENGINE = {
    "DeepSeek-V3": ("32 GPUs of 79.1 GiB on 4 nodes, rollout.tensor=32", "16 H200s .* on 2 nodes, rollout.tensor=16"),
    "Kimi-K2-Instruct": (
        "32 GPUs of 79.1 GiB on 4 nodes, rollout.tensor=32",
        "32 H200s .* on 4 nodes, rollout.tensor=32",
    ),
    "GLM-4.5": ("16 GPUs of 79.1 GiB on 2 nodes, rollout.tensor=16", "8 H200s .* of a node, rollout.tensor=8"),
}
"""The smallest engines that hold the model: of H100s, and of H200s."""


@pytest.mark.parametrize("model", WITHOUT_ENGINE)
def test_a_model_without_an_engine_in_a_node_names_engines_that_hold_it(model: str) -> None:
    config, hf = settings(model, ()), known(model)
    here, other = WITHOUT_ENGINE[model]
    decoder = architecture(hf).describe(hf)
    line = (
        rf"^rollout.tensor = 8: no engine inside a node holds .*; engines that would: {here}, or {other}; a run refuses"
    )
    assert re.match(line, str(problem(config, decoder)))
    least = 2 * elements(decoder) / 8 / GIB
    weights = float(re.search(r"at least ([\d.]+) GiB of each of 8 GPUs", str(problem(config, decoder)))[1])
    assert least < weights < 1.03 * least, "all weights over eight workers, and small parts several times"


def test_engines_of_several_nodes_are_searched_only_where_none_fits_a_node() -> None:
    config = settings("DeepSeek-V3", ("cluster.nodes=32",))
    choices = engine_choices(config, DEEPSEEK_V3, 256)
    assert {engine_ranks(choice.config.rollout) for choice in choices} == {32, 64}
    assert {engine_data(choice.config.rollout) for choice in choices} == {1, 4, 8}
    for choice in choices:
        check(choice.config, planned=True)
    smaller = settings("Qwen3-30B-A3B", ("cluster.nodes=32",))
    hf = known("Qwen3-30B-A3B")
    assert max(engine_ranks(c.config.rollout) for c in engine_choices(smaller, architecture(hf).describe(hf), 256)) == 8


def test_an_engine_of_several_nodes_is_planned_and_refused_by_a_run() -> None:
    config = settings(*CASES["DeepSeek-V3, H100, 8 × TP32"])
    with pytest.raises(UserError, match=r"^rollout.tensor = 32: allowed is at most cluster.gpus_per_node = 8$"):
        check(config)
    config.rollout.tensor = 12
    with pytest.raises(UserError, match=r"^rollout.tensor = 12: .* = 8, and in --dry-run a multiple of 8$"):
        check(config, planned=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["DeepSeek-V3, H100, 8 × TP32", "Kimi-K2, H100, 4 × TP8 DP8 EP64"])
def test_its_dry_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--config", str(RECIPE), *overrides(*CASES[name]), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("it fits 32 nodes") and "works only in a plan" in output
    assert "each worker keeps the whole KV cache" in output
