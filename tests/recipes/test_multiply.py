"""`configs/multiply*.yaml`: the checks pass, and demonstrations fit into the rollout limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_mega.cli.inputs import check_inputs
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.derived import length_limit, response_limit
from skyrl_mega.data.prepare import prepare
from skyrl_mega.data.rows import load_demonstrations
from skyrl_mega.models.tiny import build
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trainer.sft_warmup import encode
from tests.support.engines import LOADING

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_full_size_passes_the_checks(tmp_path: Path) -> None:
    config = compose(CONFIGS / "multiply.yaml")
    check(config)
    assert config.rollout.max_turns == 5 and config.algorithm.advantage == "grpo"
    # Every turn may use its full length, and the replies between turns fit too.
    assert response_limit(config.rollout) > 3 * config.rollout.sampling.max_tokens
    assert config.data.prepare is not None
    prepare(config.data.prepare.replace("data/multiply", str(tmp_path)) + " --train 20 --test 5")


def test_what_is_demonstrated_fits_the_cpu_recipes_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose(CONFIGS / "multiply_cpu.yaml")
    check(config)
    check_inputs(config)
    assert config.data.prepare is not None and config.model.build is not None
    prepare(config.data.prepare.replace("--demonstrations 20000", "--demonstrations 1000"))
    check_inputs(config)
    build(replace(config.model.build, hidden=8, layers=1, experts=2), tmp_path / "model")
    with LOADING:
        chat = Renderer(str(tmp_path / "model"))
    demonstrations = load_demonstrations(config.warmup.files)
    lengths = encode(demonstrations, chat).lengths
    prompts = [len(chat.first(d.messages)) for d in demonstrations]
    turns = [len(chat.encode(m["content"])) + 1 for d in demonstrations for m in d.turns if m["role"] == "assistant"]
    assert max(prompts) <= config.rollout.max_prompt_tokens
    assert max(turns) <= config.rollout.sampling.max_tokens
    assert max(n - p for n, p in zip(lengths, prompts, strict=True)) < response_limit(config.rollout)
    assert max(lengths) < length_limit(config.rollout) <= config.model.build.max_length
    assert max(sum(m["role"] == "assistant" for m in d.turns) for d in demonstrations) == config.rollout.max_turns
