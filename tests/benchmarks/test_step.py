"""The inputs of `benchmarks.step` for both sides. A whole round takes minutes, and TRL's environment."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from benchmarks import step


def test_the_model_has_a_million_parameters_and_no_end_token(tmp_path: Path) -> None:
    path = step.make_model("moe", tmp_path)
    assert AutoTokenizer.from_pretrained(path).eos_token_id is None
    assert AutoConfig.from_pretrained(path).eos_token_id is None
    assert 0.8e6 < (path / "model.safetensors").stat().st_size / 4 < 1.2e6


def test_cases_have_a_question_for_every_prompt() -> None:
    for case in step.CASES.values():
        assert len(case.questions) == case.prompts * case.steps
        assert case.tokens == case.prompts * case.samples * 128
        assert case.prompts * case.samples % case.trl_micro == 0
        json.dumps(vars(case))
