"""A run from a model directory in block FP8: engines in the model's type, a step, and both exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_mega.cli.export import main
from skyrl_mega.config.compose import compose
from skyrl_mega.hf_checkpoint.index import check_files, read_config
from skyrl_mega.models.tiny import build
from tests.export.test_layouts import tensors_of
from tests.support.fp8_files import FP8, dequantised, extra_layer, prediction_layer, rewrite, same_bits
from tests.trainer import quickstart


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3"])
def test_a_step_from_fp8_files_and_back(architecture: str, tmp_path: Path) -> None:
    """Trains a step: engine and policy agree, so vLLM computes with the dequantised weights, not with FP8."""
    kind = f"model.build.architecture={architecture}"
    built = compose(quickstart.ROOT / "configs" / "quickstart.yaml", [*quickstart.SMALL[:2], kind]).model.build
    assert built is not None
    build(built, tmp_path / "plain", seed=0)
    latent = architecture == "deepseek_v3"
    extra = prediction_layer(tmp_path / "plain") if latent else extra_layer(built.layers, built.hidden)
    tensors = rewrite(tmp_path / "plain", tmp_path / "model", extra=extra)
    settings = (kind, "run.steps=1", "warmup.steps=0", "checkpoint.export=true")
    out = quickstart.finish(tmp_path, *quickstart.LEARNS, *settings)
    assert f"{len(extra)} tensors" in out and f"model.layers.2.*{'' if latent else ', mtp.*'}" in out
    (run,) = {path.parent for path in tmp_path.glob("*/config.yaml")}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (mismatch,) = {row["mismatch/logprob_abs_mean"] for row in rows if "mismatch/logprob_abs_mean" in row}
    assert mismatch < 1e-3

    check_files(run / "model")
    assert "quantization_config" not in read_config(run / "model")
    plain = tensors_of(run / "model")
    assert same_bits({name: plain.pop(name) for name in extra}, extra)
    dtype = plain["lm_head.weight"].dtype
    start = dequantised({name: t for name, t in tensors.items() if name not in extra}, dtype)
    assert plain.keys() == start.keys() and not all(plain[name].equal(start[name]) for name in plain)

    assert (
        main([str(run), "--output", str(tmp_path / "fp8"), "--dtype", "block-fp8", "--verify", "--workers", "1"]) == 0
    )
    check_files(tmp_path / "fp8")
    again = tensors_of(tmp_path / "fp8")
    assert again.keys() == tensors.keys()
    assert {name for name, t in again.items() if t.dtype == FP8} == {n for n, t in tensors.items() if t.dtype == FP8}
    assert same_bits({name: again[name] for name in extra}, extra)
