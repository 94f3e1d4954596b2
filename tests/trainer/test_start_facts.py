"""Facts recorded at a start: source code, versions, algorithm, model and layout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from skyrl_mega.cluster.actor_process import Location
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.config.compose import compose
from skyrl_mega.models import published
from skyrl_mega.trainer import start_facts


def git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=n", "-c", "user.email=e@e", "-c", "commit.gpgsign=false"]
    line = ["git", "-C", str(folder), *settings, *words]
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def test_the_commit_of_a_checkout_and_changed_files(tmp_path: Path) -> None:
    package = tmp_path / "code" / "package"
    package.mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    assert start_facts.commit(package) is None, "no checkout"
    git(tmp_path / "code", "init", "-q")
    git(tmp_path / "code", "add", ".")
    git(tmp_path / "code", "commit", "-qm", "one")
    head = git(tmp_path / "code", "rev-parse", "HEAD")
    assert start_facts.commit(package) == head[:12]
    (package / "a.py").write_text("a = 2\n")
    assert start_facts.commit(package) == f"{head[:12]} + changes"
    installed = tmp_path / "code" / ".venv" / "package"
    installed.mkdir(parents=True)
    assert start_facts.commit(installed) is None, "the repository around an installation is not the code's"


def test_versions_are_those_that_run() -> None:
    assert torch.__version__.startswith(start_facts.versions()["torch"].partition("+")[0])
    assert {"python", "skyrl-mega"} <= {*start_facts.versions()}


def test_algorithm_and_layout_as_text() -> None:
    settings = ["policy.ranks=8", "policy.layout.tensor=2", "policy.layout.expert=4", "rollout.engines=3"]
    config = compose(None, [*settings, "algorithm.kl.coefficient=0.01", "asynchrony.mode=full"])
    assert start_facts.algorithm(config) == (
        f"grpo with loss {config.algorithm.loss}, KL coefficient 0.01, asynchrony full"
    )
    assert start_facts.layout(config) == {
        "policy": "8 ranks (tensor 2, expert 4, data 4)",
        "engines": "3 (tensor 1)",
    }


def test_the_sizes_of_a_model_are_those_of_its_model_card() -> None:
    path = "models/Qwen3-30B-A3B"
    facts = start_facts.model(compose(None, [f"model.path={path}"]), published.known(path))
    assert (facts["path"], facts["type"]) == (path, "qwen3_moe")
    assert facts["parameters"] == pytest.approx(30.5e9, rel=0.01)
    assert facts["active"] == pytest.approx(3.3e9, rel=0.1), "without the embedding"


def test_hosts_have_names_and_addresses() -> None:
    group = ActorGroup("policy", [None, None])
    group.where = [
        Location("boot-id node-7", 1, "10.0.0.7", "n", ()),
        Location("boot-id node-8", 2, "10.0.0.8", "m", ()),
    ]
    event = start_facts.placed_event({"policy ranks": group})
    assert event.facts == {
        "hosts": ["node-7 (10.0.0.7)", "node-8 (10.0.0.8)"],
        "policy ranks": "10.0.0.7: 0, 10.0.0.8: 1",
    }
