"""`policy.micro_tokens=null`: the largest fitting value, chosen alike by dry run and run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import micro_tokens
from skyrl_mega.config.schema import BuildConfig, Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.planner import fit
from skyrl_mega.planner.micro_tokens import FILE, for_run, note, with_micro_tokens
from tests.planner.test_residency import shared
from tests.weights.grids import REAL

HF = REAL["30B"]
D = architecture(HF).describe(HF)


def settings(tokens: int | None, recompute: str = "none", gib: float = 79.1) -> Config:
    c = shared([], 0.6, kl=0.0)
    c.policy.micro_tokens, c.policy.recompute, c.cluster.gpu_memory_gib = tokens, recompute, gib
    return c


@pytest.mark.parametrize(
    ("recompute", "gib", "expected", "why"),
    [
        ("full", 79.1, 32768, "the largest of 4096, 8192, 16384, 32768"),
        ("none", 100.0, 8192, "the largest that fits of 4096,"),
        ("none", 79.1, 4096, "the largest that fits of 4096,"),
        ("none", 40.0, 4096, "the least of 4096,"),
    ],
)
def test_it_is_the_largest_that_fits(recompute: str, gib: float, expected: int, why: str) -> None:
    given = settings(None, recompute, gib)
    config = with_micro_tokens(given, HF)
    assert config == settings(expected, recompute, gib)
    fits = [n for n in (4096, 8192, 16384, 32768) if fit.problem(settings(n, recompute, gib), D, strict=True) is None]
    assert max(fits, default=4096) == expected
    assert f"is {expected} here: {why}" in str(note(given, config, D))


def test_a_number_that_is_given_stays() -> None:
    given = settings(1000)
    assert with_micro_tokens(given, HF) is given and note(given, given, D) is None


def test_a_cpu_has_small_rows() -> None:
    config = Config()
    config.cluster.device, config.policy.ranks, config.policy.micro_tokens = "cpu", 1, None
    assert micro_tokens(with_micro_tokens(config, hf_config(BuildConfig())).policy) == 8192


def test_a_run_that_goes_on_has_what_it_had(tmp_path: Path) -> None:
    first = for_run(settings(None), HF, tmp_path, resumes=False)
    assert json.loads((tmp_path / FILE).read_text()) == {"policy.micro_tokens": 4096}
    larger = settings(None, "full")
    assert for_run(larger, HF, tmp_path, resumes=True) == replace(
        larger, policy=replace(first.policy, recompute="full")
    )
    assert micro_tokens(for_run(settings(1000), HF, tmp_path, resumes=True).policy) == 1000
    (tmp_path / FILE).write_text('{"policy.micro_tokens": "many"}')
    with pytest.raises(
        UserError, match=r"micro_tokens\.json: its policy\.micro_tokens is none of 4096, .*; remove the file"
    ):
        for_run(larger, HF, tmp_path, resumes=True)
    assert micro_tokens(for_run(larger, HF, tmp_path, resumes=False).policy) == 32768


def test_nothing_is_computed_with_a_number_that_nobody_has_decided() -> None:
    with pytest.raises(ValueError, match="has not been decided"):
        micro_tokens(settings(None).policy)
