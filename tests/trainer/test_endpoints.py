"""Runs whose engines are servers outside of the run: a real vLLM, direct and by file, and SGLang's interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.config.compose import compose
from skyrl_mega.models import tiny
from tests.conftest import ROOT
from tests.support.sglang_server import SglangStandIn, sglang_server
from tests.support.vllm_server import vllm_server
from tests.trainer import quickstart

NEAR = 1e-3
"""Largest accepted mismatch of log-probs in nats; usual are 1e-7 in float32."""
STEPS = (*quickstart.LEARNS, "run.steps=3", "rollout.engines=0", "evaluation.every=0", "checkpoint.every=0")


DENSE = ("model.build.architecture=qwen3", "policy.layout.expert=1")
"""Settings of the quickstart with a model without experts."""


def build_quickstart_model(folder: Path, *settings: str) -> Path:
    """Builds the model of the small quickstart before the run does, and returns its folder."""
    config = compose(ROOT / "configs" / "quickstart.yaml", [*quickstart.SMALL, *settings])
    assert config.model.build is not None
    tiny.build(config.model.build, folder / "model", config.run.seed)
    return folder / "model"


def rows(folder: Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run's steps."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "time/sync" in row]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the run's events of a kind."""
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sync", "plugin"), [("group", True), ("files", True), ("directory", True), ("directory", False)]
)
def test_a_vllm_server_trains_with_the_policys_log_probs(tmp_path: Path, sync: str, plugin: bool) -> None:
    """The model without the plug-in is dense: vLLM on a CPU does not pack reloaded experts."""
    settings = () if plugin else DENSE
    model = build_quickstart_model(tmp_path, *settings)
    with vllm_server(model, tmp_path / "server.log", plugin=plugin) as url:
        entry = f"rollout.endpoints=[{{url: '{url}', sync: {sync}}}]"
        quickstart.finish(tmp_path, "run.name=run", *STEPS, *settings, entry)
    steps = rows(tmp_path)
    assert len(steps) == 3
    assert max(row["mismatch/logprob_abs_max"] for row in steps) < NEAR
    assert not events(tmp_path, "engine_differs")


class Transformer:
    """The quickstart's model by transformers, in float32."""

    def __init__(self, path: Path) -> None:
        self.load(path)

    def load(self, path: Path) -> None:
        """Loads a Hugging Face directory."""
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Returns the logits of the next token."""
        with torch.no_grad():
            values: np.ndarray = self.model(torch.tensor([tokens])).logits[0, -1].numpy()
        return values


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["off", "full"])
def test_a_server_with_sglangs_interface_trains_with_the_policys_log_probs(tmp_path: Path, mode: str) -> None:
    model = build_quickstart_model(tmp_path)
    with sglang_server(SglangStandIn(Transformer(model))) as url:
        entry = f"rollout.endpoints=[{{url: '{url}', kind: sglang, concurrency: 4}}]"
        ahead = ["asynchrony.mode=full", "asynchrony.max_staleness=1"] if mode == "full" else []
        small = ("data.prompts_per_step=4", "environment.processes=1")
        quickstart.finish(tmp_path, "run.name=run", *STEPS, *small, *ahead, entry)
    steps = rows(tmp_path)
    assert len(steps) == 3
    if mode == "off":
        assert max(row["mismatch/logprob_abs_max"] for row in steps) < NEAR


@pytest.mark.nightly
def test_a_run_leaves_out_a_server_that_keeps_its_old_weights(tmp_path: Path) -> None:
    """Beside an engine of the run; the server states each new version and loads none."""
    model = build_quickstart_model(tmp_path)
    with sglang_server(SglangStandIn(Transformer(model), loads=False)) as url:
        entry = f"rollout.endpoints=[{{url: '{url}', kind: sglang, concurrency: 4}}]"
        small = ("data.prompts_per_step=4", "rollout.engines=1")
        quickstart.finish(tmp_path, "run.name=run", *STEPS, *small, entry)
    found = events(tmp_path, "engine_differs")
    assert found
    assert found[0]["actor"] == "engine-1"
    assert [row["sync/engines"] for row in rows(tmp_path)] == [1.0] * 3
    assert max(row["mismatch/logprob_abs_max"] for row in rows(tmp_path)) < NEAR
