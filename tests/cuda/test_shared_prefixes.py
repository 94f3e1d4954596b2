"""Transformer Engine's layers compute rows with shared prefixes as local layers compute whole sequences.

Python of Transformer Engine and megatron-core is real; kernels are plain torch (`te_kernels`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from skyrl_mega.config.schema import BuildConfig, PolicyConfig
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from tests.cuda import te
from tests.cuda.programs import run

pytestmark = pytest.mark.skipif(bool(te.absent()), reason=te.absent())

POLICIES = {
    "whole": PolicyConfig(spec="local"),
    "shared": PolicyConfig(spec="te", share_prefixes=True),
}


@pytest.mark.parametrize("tensor", [1, 2])
def test_shared_prefixes_on_transformer_engine(tmp_path: Path, tensor: int) -> None:
    build(BuildConfig(layers=2), tmp_path / "model", seed=1)
    answers = run("te_shared", tmp_path, ParallelDims(tensor, tensor=tensor, expert=tensor), POLICIES)
    whole, shared = (sum(rank[0] for rank in answers[name]) for name in POLICIES)
    np.testing.assert_allclose(shared, whole, rtol=0, atol=1e-4 * np.abs(whole).max())
    for plain, fewer in zip(answers["whole"], answers["shared"], strict=True):
        assert fewer[2] < 0.85 * plain[2]
    # Names differ between the specs, so gradients are compared by their norms.
    norms = [[np.linalg.norm(g) for rank in answers[name] for g in rank[1].values()] for name in POLICIES]
    assert np.sqrt(np.square(norms[1]).sum()) == pytest.approx(np.sqrt(np.square(norms[0]).sum()), rel=1e-4)
