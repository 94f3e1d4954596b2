"""The driver's side of a sync by files, with policy ranks and engines in this process."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_mega.cluster.calls import Outcomes
from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.run_placement import plan_placement
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import BuildConfig, Config, ModelConfig, RolloutConfig, WeightsConfig
from skyrl_mega.config.schema.weights import FilesConfig
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.parallel.box import Box, Piece, Shard
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.files import driver, image, store
from skyrl_mega.weights.files.publish import Publication, Publisher
from skyrl_mega.weights.files.source import Source
from skyrl_mega.weights.plan.sync_plan import SyncInputs
from tests.support.shards import cut
from tests.support.weight_files import CPU, local, random_weights, step, workers

HF = hf_config(BuildConfig(architecture="qwen3_moe", hidden=64, experts=4, layers=2))
PARALLEL = ParallelDims(ranks=2, expert=2)


class Run:
    """A policy, two engines and the driver's `FileSync`; calls are answered at once.

    Args:
        folder: The run's folder.
        monkeypatch: Replaces the waits for Ray.
        files: Settings of the weight files.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, files: FilesConfig) -> None:
        monkeypatch.setattr(store, "PAUSE_S", 0.001)
        monkeypatch.setattr(driver, "gather", lambda calls, limit: [call() for call in calls])
        monkeypatch.setattr(driver, "settle", settle)
        weights = WeightsConfig(transport="files", files=files)
        model, rollout = ModelConfig(dtype="bfloat16"), RolloutConfig(engines=2)
        self.config = cut(Config(model=model, rollout=rollout, weights=weights), PARALLEL)
        self.layout = architecture(HF).megatron_layout(HF, PARALLEL, "local")
        self.weights = random_weights(HF, torch.Generator().manual_seed(0))
        self.publishers: list[Publisher | None] = [None, None]
        self.engines = [worker for _ in range(2) for worker in workers(HF, 1, dtype="bfloat16")]
        self.broken: set[int] = set()
        self.messages: list[str] = []
        group: Any = SimpleNamespace(submit=self.fetch)
        policy: Any = SimpleNamespace(
            name="policy", submit_all=lambda _, *args: [lambda r=r: self.publish(r, *args) for r in (0, 1)]
        )
        fleet: Any = SimpleNamespace(group=group)
        self.sync = driver.FileSync(policy, fleet, self.config, folder, self.messages.append)
        self.inputs = SyncInputs.of(self.config, HF, plan_placement(self.config))

    def publish(self, rank: int, publication: dict[str, Any], name: str, base: str) -> Any:
        """Publishes a rank's part, as a policy actor."""
        shared = Publication(**publication)
        publisher = self.publishers[rank] or Publisher(shared, rank, CPU)
        self.publishers[rank] = publisher
        return publisher.publish(local(self.layout.shards[rank], self.weights, torch.bfloat16), name, base)

    def fetch(self, engine: int, method: str, source: dict[str, Any], version: int) -> Any:
        """Returns the call of an engine actor's `fetch_weights`."""

        def call() -> int:
            if engine in self.broken:
                raise OSError("its link is down")
            self.engines[engine].fetch(Source(**source).folder, Source(**source).name)
            return engine

        call.rank = engine  # type: ignore[attr-defined]
        return call

    def take(self, version: int, engines: Sequence[int] = (0, 1)) -> tuple[dict[int, str], dict[str, float]]:
        """Changes the weights and syncs."""
        step(self.weights, 0.02, torch.Generator().manual_seed(version))
        return self.sync.sync(version, engines, self.inputs)


def settle(calls: list[Any], limit: float, after_failure: float) -> Outcomes:
    """Returns the outcomes of calls made at once."""
    outcomes = Outcomes(limit, {}, [], [])
    for call in calls:
        try:
            outcomes.answers[call] = call()
        except (OSError, RuntimeError) as error:
            outcomes.failures.append((call, error))
    return outcomes


def test_full_images_come_at_their_interval_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, FilesConfig(full_every=3, keep=1))
    full, share = [], []
    for version in range(1, 8):
        failed, metrics = run.take(version)
        assert failed == {} and all(engine.has(run.weights) for engine in run.engines)
        full.append(metrics["sync/files/full"])
        share.append(metrics["sync/files/share"])
        assert metrics["sync/files/changed"] == 1 or 0.01 < metrics["sync/files/changed"] < 0.03
    assert full == [1, 0, 0, 1, 0, 0, 1]
    assert max(share[i] for i in (1, 2, 4, 5)) < min(share[i] for i in (0, 3, 6)) / 5
    names = {key.partition("/")[2] for key in run.sync.store.list_keys()}
    assert {name for name in names if name.endswith(".json")} == {"000000006.json"}
    # The same weights again, as after the restart of an engine: nothing is written.
    assert set(run.sync.sync(7, [0], run.inputs)[1]) == {"time/sync/fetch"}


def test_an_engine_that_cannot_read_changes_gets_a_full_image_and_then_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, FilesConfig(full_every=10))
    run.take(1, [0])
    for file in (Path(run.sync.store.address)).glob("*/000000000/rank-*"):
        file.unlink()
    failed, metrics = run.take(2)  # engine 1 has no base, and the full image is lost
    assert failed == {} and metrics["sync/files/full"] == 1
    assert all(engine.has(run.weights) for engine in run.engines)
    assert len(run.messages) == 1 and "engine 1" in run.messages[0]
    run.broken = {1}
    failed, _ = run.take(3)
    assert list(failed) == [1] and "its link is down" in failed[1]
    assert run.engines[0].has(run.weights)


def test_a_store_that_takes_no_manifest_is_a_fault_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, FilesConfig())

    def refuse(*_: Any) -> None:
        raise store.StoreError("bucket/x: access denied")

    monkeypatch.setattr(driver, "write_manifest", refuse)
    with pytest.raises(ActorFailed, match="access denied"):
        run.take(1)


def test_two_runs_of_one_name_have_stores_of_their_own() -> None:
    config = Config(weights=WeightsConfig(files=FilesConfig(folder="s3://bucket/weights")))
    addresses = {driver.store_address(config, Path(folder)) for folder in ("/home/a/runs/x", "/home/b/runs/x")}
    assert len(addresses) == 2
    assert all(address.startswith("s3://bucket/weights/") for address in addresses)


def test_a_full_disk_under_the_cache_is_an_error_that_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shard = Shard({"w": (8,)}, (Piece("w", Box((0,), (8,)), "w", (0,)),))
    with monkeypatch.context() as patch:
        patch.setattr(image.os, "posix_fallocate", full)
        with pytest.raises(UserError, match="No space left") as error:
            image.Image(shard, {"w": torch.bfloat16}, tmp_path / "image")
    assert error.value.key == "weights.files.cache"
    image.Image(shard, {"w": torch.bfloat16}, tmp_path / "image").close()  # once there is space, in the same process
