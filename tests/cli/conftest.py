"""Inputs of a whole small run: a built model and real parquet files."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.cli import suggest_simulated
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.data.prepare import prepare
from skyrl_mega.models.tiny import build
from skyrl_mega.planner import fixes, search
from tests.cli import large
from tests.support.planned import remembered_plans  # noqa: F401  (for every module of this folder)

CONFIG = """\
run: {{name: r, directory: {folder}/runs}}
cluster: {{device: cpu}}
model: {{path: {folder}/model, dtype: float32}}
policy: {{ranks: 4, layout: {{expert: 2}}}}
rollout: {{max_prompt_tokens: 24, sampling: {{max_tokens: 8}}}}
data: {{train: [{folder}/data/train.parquet], eval: [{folder}/data/test.parquet], prompts_per_step: 4}}
"""


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a read-only folder with `config.yaml`, `model/` (a 4-layer Qwen3-MoE) and `data/`."""
    folder = tmp_path_factory.mktemp("inputs")
    build(BuildConfig(layers=4, max_length=64), folder / "model")
    prepare(["addition", "--output", str(folder / "data"), "--train", "20", "--test", "5", "--demonstrations", "5"])
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the settings file of a run of a published model on 64 GPUs (`large.SETTINGS`)."""
    return large.write(tmp_path_factory.mktemp("large"))


@pytest.fixture(autouse=True)
def _searches_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives searches ample processor time, so a slow or busy machine does not change the results, and leaves out the
    simulations of `--suggest`."""
    for module in (search, fixes):
        monkeypatch.setattr(module, "SECONDS", 120.0)
    monkeypatch.setattr(suggest_simulated, "SECONDS", -1.0)
