"""Draft tokens in plans: seconds per token, and the memory of a draft model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_mega.cli.draft_checks import check_draft_model, check_suffix
from skyrl_mega.cli.dry_run_notes import _on_drafts
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import BuildConfig, Config
from skyrl_mega.config.schema.drafts import DraftsConfig
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import build, hf_config
from skyrl_mega.planner.memory import engine_memory
from skyrl_mega.planner.times import decoding

LARGE = BuildConfig(architecture="qwen3", hidden=4096, layers=40, heads=32, kv_heads=8, head_dim=128, ffn=12288)


def described(sizes: BuildConfig) -> Decoder:
    hf = hf_config(sizes)
    return architecture(hf).describe(hf)


def config_of(**drafts: object) -> Config:
    config = Config()
    config.rollout.drafts = DraftsConfig(**drafts)  # type: ignore[arg-type]
    return config


def test_accepted_drafts_save_steps_while_reading_weights_takes_the_time() -> None:
    """Computes one sequence of a dense model: a step with drafts reads the same weights once."""
    model = described(LARGE)
    plain = decoding(config_of(), model, 1000)(1)
    for acceptance in (0, 0.25, 1):
        drafted = decoding(config_of(method="ngram", adaptive=False, acceptance=acceptance), model, 1000)(1)
        assert drafted == pytest.approx(plain / (1 + 4 * acceptance), rel=0.01)


def test_drafts_cost_time_in_large_batches_unless_left_out() -> None:
    model = described(LARGE)
    plain = decoding(config_of(), model, 1000)(4096)
    always, adaptive = (
        decoding(config_of(method="ngram", adaptive=adaptive, acceptance=0.1), model, 1000)(4096)
        for adaptive in (False, True)
    )
    assert always > 1.5 * plain and adaptive == plain


def test_a_draft_model_takes_time_and_memory(tmp_path: Path) -> None:
    build(BuildConfig(architecture="qwen3"), tmp_path / "small")
    model, config = described(LARGE), config_of(method="model", path=str(tmp_path / "small"), acceptance=1.0)
    without, with_model = engine_memory(config_of(), model), engine_memory(config, model)
    size = (tmp_path / "small" / "model.safetensors").stat().st_size // 2  # written in float32
    assert with_model.weights - without.weights == pytest.approx(size, rel=0.05), "the vocabulary is padded"
    assert with_model.per_token - without.per_token == 2 * 2 * 2 * 32 * 2, "layers · (K and V) · heads · width · bytes"
    ngram = replace(config, rollout=replace(config.rollout, drafts=DraftsConfig(method="ngram", acceptance=1.0)))
    assert decoding(config, model, 1000)(1) > decoding(ngram, model, 1000)(1)


def test_a_draft_model_has_the_policys_vocabulary(tmp_path: Path) -> None:
    build(BuildConfig(architecture="qwen3"), tmp_path / "small")
    config, hf = config_of(method="model", path=str(tmp_path / "small")), hf_config(BuildConfig())
    assert check_draft_model(config, hf) == []
    with pytest.raises(UserError, match=r"rollout.drafts.path = .*small: its vocabulary has \d+ tokens, and the pol"):
        check_draft_model(config, {**hf, "vocab_size": 7})
    absent = config_of(method="model", path=str(tmp_path / "absent"))
    assert check_draft_model(absent, hf, planned=True) == [str(tmp_path / "absent")]
    with pytest.raises(UserError):
        check_draft_model(absent, hf)


def test_suffix_drafts_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    check_suffix(config_of(method="ngram"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"rollout.drafts.method = suffix: vLLM needs the package arctic-inference"):
        check_suffix(config_of(method="suffix"))


def test_a_dry_run_says_what_it_assumes() -> None:
    assert list(_on_drafts(Config())) == []
    (note,) = _on_drafts(config_of(method="ngram"))
    assert note.startswith("rollout.drafts.acceptance=0.2: times assume 0.8 of 4 draft tokens accepted in a step")
