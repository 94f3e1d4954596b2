"""Real CPU engines with frozen drafts that read the policy's hidden states: heads, and multi-token prediction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema.drafts import DraftsConfig
from skyrl_mega.engines.base import Sampling
from tests.support.draft_heads import add_prediction_layer, build_head, favour
from tests.support.engines import LOADING, build_model
from tests.weights import test_draft_engine
from tests.weights.test_draft_engine import accepted, ask, logprobs, requests_of
from tests.weights.test_sleeping_engine import Place, place_of

pytestmark = pytest.mark.nightly
SIZES: dict[str, Any] = {"head_dim": 32}


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with session(actors=8):
        yield


def loaded(path: Path) -> Any:
    """Returns the policy in transformers."""
    with LOADING:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def check(place: Place, path: Path, name: str) -> float:
    """Compares greedy and sampled answers with transformers; returns the share of greedy drafts that were accepted."""
    model = loaded(path)
    requests = requests_of(model, 6, 50, name)
    accepted(place)
    for request, answer in zip(requests, ask(place, requests, Sampling(temperature=0)), strict=True):
        expected = logprobs(model, [*request.tokens, *answer.tokens], Sampling(temperature=0))[59:-1]
        assert list(answer.tokens) == expected.argmax(-1).tolist()
        assert np.abs(expected.max(-1).values.numpy() - np.array(answer.logprobs)).max() < 1e-4
    drafted, taken = accepted(place)
    assert drafted > 50
    for request, answer in zip(requests, ask(place, requests, Sampling()), strict=True):
        expected = logprobs(model, [*request.tokens, *answer.tokens], Sampling())[59:-1]
        chosen = expected.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert np.abs(chosen.numpy() - np.array(answer.logprobs)).max() < 1e-4
    return taken / drafted


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("eagle", "qwen3_moe"),
        ("eagle3", "qwen3_moe"),
        ("eagle3", "gpt_oss"),
        ("mtp", "glm4_moe"),
        ("mtp", "deepseek_v3"),
    ],
)
def test_drafts_follow_the_policys_embedding_and_head_through_syncs_and_a_sleep(
    ray: None, method: str, kind: str, tmp_path: Path
) -> None:
    """Gives the policy other favourite tokens in each sync: a head with an old output projection would propose the old
    ones, and none of them would be accepted."""
    drafts = DraftsConfig(method=method, max_tokens=3)
    if method != "mtp":
        hf = json.loads((build_model(tmp_path / "same", kind, 0, **SIZES) / "config.json").read_text())
        drafts.path = str(build_head(tmp_path / "head", hf, method))
    prepare = add_prediction_layer if method == "mtp" else None
    with place_of(tmp_path, kind, drafts=drafts, prepare=prepare, routes=method != "mtp", **SIZES) as place:
        for version, favourites in ((2, [5, 7]), (3, [11, 13])):
            path = build_model(tmp_path / f"version {version}", kind, version, **SIZES)
            favour(path, favourites)
            place.policy.call_all("load", path, timeout=120)
            if version == 3:
                place.rest_and_return(version)
            else:
                place.sync.sync(version)
            assert check(place, path, f"version {version}") > 0.01
        if method != "mtp":
            test_draft_engine.test_routes_are_those_of_the_accepted_tokens(place, loaded(path))


def test_a_draft_model_keeps_the_weights_of_its_files_through_syncs_and_a_sleep(ray: None, tmp_path: Path) -> None:
    """Gives the engine drafts of a copy of the policy: an engine that starts with random weights for the policy must
    read those of the draft model, or nothing is accepted."""
    path = build_model(tmp_path / "version 2", "qwen3_moe", 2, **SIZES)
    drafts = DraftsConfig(method="model", path=str(path), max_tokens=3)
    with place_of(tmp_path, "qwen3_moe", drafts=drafts, **SIZES) as place:
        place.policy.call_all("load", path, timeout=120)
        place.sync.sync(2)
        assert check(place, path, "synced") > 0.9
        place.rest_and_return(3)
        assert check(place, path, "slept") > 0.9
