"""docs/models.md equals the refusals of the code and the models of the sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.models.registry import architecture
from tests.families.models import MODELS, read_hf
from tests.families.page import PAGE, accepts, renewed


def test_the_table_of_models_is_up_to_date(families: Path) -> None:
    text = PAGE.read_text()
    configs = {name: read_hf(families / f"{name}-0") for name in MODELS}
    assert text == renewed(text, configs), "run: python -m tests.families.page --write"


@pytest.mark.parametrize("name", MODELS)
def test_a_tied_head_that_vllm_does_not_tie_is_refused(families: Path, name: str) -> None:
    """vLLM's classes that tie the output projection read `tie_word_embeddings`; others leave random numbers."""
    hf = read_hf(families / f"{name}-0")
    tied = accepts(lambda: architecture(hf).check_engine({**hf, "tie_word_embeddings": True}, 1))
    assert tied == (hf["model_type"] in ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text"))
    architecture(hf).check_engine(hf, 1)
