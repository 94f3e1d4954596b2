"""Test of the head with masked tokens: only requested tokens are computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.models.tiny import build
from tests.megatron import layouts
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(("ranks", "sizes"), [(1, {}), (2, {"tensor": 2}), (2, {"context": 2})])
def test_masked_tokens_get_the_same_log_probs_and_others_none(
    tmp_path: Path, ranks: int, sizes: dict[str, int]
) -> None:
    build(BuildConfig(), tmp_path / "m", seed=4)
    batch = layouts.some_batch(100, seed=8)
    parallel, policy = layouts.layout(ranks, **sizes), layouts.policy_config()

    def values() -> np.ndarray:
        values_T = np.full(len(batch.tokens), np.nan)
        for answer in run_ranks(ranks, layouts.logprobs, tmp_path / "m", parallel, policy, batch):
            for rows, (logprobs, _) in answer or []:
                values_T[batch.index(rows).numpy()] = logprobs
        return values_T

    batch.columns = {}
    everywhere = values()
    mask = np.random.default_rng(1).random(len(batch.tokens)) < 0.4
    mask[: batch.lengths[0]] = False  # a sequence without requested tokens
    starts = batch.starts.numpy()
    mask[starts] = False
    batch["mask"] = torch.from_numpy(mask)
    np.testing.assert_allclose(values(), np.where(mask, everywhere, 0.0), atol=1e-5)
    assert (everywhere[~mask & ~np.isin(np.arange(len(mask)), starts)] != 0).all()
