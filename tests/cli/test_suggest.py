"""What `--suggest` finds where policy and engines take turns, and how long it takes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from skyrl_mega.cli import dry_run, refusal
from skyrl_mega.cli.train import main
from skyrl_mega.config.compose import compose
from tests.cli import large

SHARED_235B = ["model.path=models/Qwen3-235B-A22B", "cluster.nodes=32", "cluster.shared=true", "policy.ranks=256"]
SECONDS = 60


def test_235b_fits_256_gpus_that_policy_and_engines_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, start = large.write(tmp_path), time.process_time()
    assert main(["--config", str(file), *SHARED_235B, "--suggest", "--json"]) == 0
    assert time.process_time() - start < SECONDS
    found = json.loads(capsys.readouterr().out)
    assert found["complete"] and found["gpus"] == 256 and len(found["found"]) >= 10
    for suggestion in found["found"][:: len(found["found"]) // 2]:
        config = compose(file, [*SHARED_235B, *suggestion["overrides"]])
        hf, _ = dry_run.checked(config)
        assert refusal.wrong(config, hf, planned=True, strict=True) is None
        assert config.residency.keep is not None, "an engine's weights alone take 55 GiB of eight GPUs"
        assert config.cluster.nodes == 32 and config.policy.ranks == 256


def test_hosts_without_memory_for_what_leaves_are_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = large.write(tmp_path)
    given = ["cluster.nodes=2", "cluster.shared=true", "policy.ranks=16", "algorithm.kl.coefficient=0"]
    keeps = []
    for gib in (2000, 110):
        settings = [*given, f"cluster.host_memory_gib={gib}"]
        assert main(["--config", str(file), *settings, "--suggest", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["found"]
        for suggestion in found[:: max(1, len(found) // 4)]:
            config = compose(file, [*settings, *suggestion["overrides"]])
            hf, _ = dry_run.checked(config)
            assert refusal.wrong(config, hf, planned=True, strict=True) is None
        keeps.append({text for s in found for text in s["overrides"] if text.startswith("residency.keep")})
    enough, little = keeps
    assert enough > little > set() and 'residency.keep=["optimizer"]' in enough - little
