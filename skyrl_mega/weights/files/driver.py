"""The driver's side of a sync by files: policy ranks publish, engines fetch, old publications are removed.

A new driver is a new publisher and begins with a full image: after a resume, or in another layout, no rank has the
bytes of an earlier publication.
"""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from skyrl_mega.cluster.calls import gather, settle
from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.config.schema import Config
from skyrl_mega.weights.files.collect import collect
from skyrl_mega.weights.files.manifest import Manifest, publication, write_manifest
from skyrl_mega.weights.files.publish import Publication, PublishReport, file_inputs
from skyrl_mega.weights.files.source import Source
from skyrl_mega.weights.files.store import SCHEME, StoreError, open_store
from skyrl_mega.weights.plan.sync_plan import SyncInputs

MARGIN_S = 15.0
"""Seconds added to the time limit of a fetch in the driver's wait, so that the engine's own error arrives first."""
PLAN_S = 20.0
"""Seconds allowed for computing the plan of a publication."""


def store_address(config: Config, run_folder: Path) -> str:
    """Returns the address of a run's store: a folder in `weights.files.folder`, by default `weight_files` in the run's
    folder.

    Two runs of one name would remove each other's weights: see `_unique_name`.
    """
    folder = config.weights.files.folder
    if not folder:
        return str(run_folder / "weight_files")
    name = _unique_name(config, run_folder)
    return f"{folder.rstrip('/')}/{name}" if SCHEME in folder else str(Path(folder).absolute() / name)


def _unique_name(config: Config, run_folder: Path) -> str:
    """Returns the run's name with a checksum of the run's folder, which no two runs share."""
    return f"{config.run.name}-{zlib.crc32(str(run_folder.absolute()).encode()):08x}"


@dataclass
class _Published:
    """The latest publication."""

    version: int
    source: Source
    full: bool


class FileSync:
    """The publisher of a run.

    Args:
        policy: Actors with `publish_weights(publication, name, base) -> PublishReport`.
        fleet: The engines.
        config: The run's settings.
        folder: The run's folder, with the cached plans in `plans`.
        say: Function for user-facing lines.
    """

    def __init__(
        self, policy: ActorGroup, fleet: Fleet, config: Config, folder: Path, say: Callable[[str], None]
    ) -> None:
        self.policy, self.fleet, self.config, self.say = policy, fleet, config, say
        self.plans = folder / "plans"
        self.cache = config.weights.files.cache and str(Path(config.weights.files.cache) / _unique_name(config, folder))
        self.store = open_store(store_address(config, folder))
        self.publisher = secrets.token_hex(8)
        self.number = 0
        """Number of the next publication."""
        self.fulls: list[int] = []
        """Numbers of the full images."""
        self.latest: _Published | None = None

    def sync(self, version: int, members: Sequence[int], inputs: SyncInputs) -> tuple[dict[int, str], dict[str, float]]:
        """Publishes the policy's present weights as `version` unless done already, lets engines fetch the weights, and
        removes old publications. If an engine cannot fetch changes, because it may have lost the earlier weights,
        prints this and publishes the same version again as a full image, which the engines that failed then fetch.

        Args:
            version: Number of the weights.
            members: Ranks of the engines.
            inputs: Inputs of a sync's plan, with the policy's layout.

        Returns:
            The engines that could not fetch a full image: rank → cause; and metrics by name: `time/sync/fetch` in
            seconds, and if this call published, `time/sync/publish` and `sync/files/*` of the last publication:
            `bytes_written`, `share` of the uncompressed bytes, `changed` share of the elements, and `full` (1 or 0).

        Raises:
            ActorFailed: A policy rank could not write or did not answer in time, or the manifest could not be written.
                A failed removal of old publications is only printed.
            UserError: On a policy rank: fsspec lacks a package for the store, or the model cannot be split into a
                layout.
        """
        metrics: dict[str, float] = {}
        if self.latest is None or self.latest.version != version:
            metrics = self._publish(version, inputs, full=self._full_due)
        start, failed = time.monotonic(), self._fetch(members)
        if failed and self.latest is not None and not self.latest.full:
            causes = "; ".join(f"engine {rank}: {cause}" for rank, cause in failed.items())
            self.say(f"weights are published in full, because an engine could not read the changes ({causes})")
            metrics = self._publish(version, inputs, full=True)
            failed = self._fetch([*failed])
        self._collect()
        return failed, metrics | {"time/sync/fetch": time.monotonic() - start}

    @property
    def _full_due(self) -> bool:
        every = self.config.weights.files.full_every
        return not self.fulls or self.number - self.fulls[-1] >= every

    def _publish(self, version: int, inputs: SyncInputs, *, full: bool) -> dict[str, float]:
        start = time.monotonic()
        settings, limit = self.config.weights.files, self.config.weights.timeout_s
        name = publication(self.publisher, self.number)
        base = "" if full else publication(self.publisher, self.number - 1)
        shared = Publication(
            inputs=asdict(file_inputs(inputs)),
            plans=str(self.plans),
            folder=self.store.address,
            publisher=self.publisher,
            keep=settings.full_every > 1,
        )
        calls = self.policy.submit_all("publish_weights", asdict(shared), name, base)
        reports: list[PublishReport] = gather(calls, limit + PLAN_S)
        files, layouts = tuple(r.file for r in reports), tuple(r.layout for r in reports)
        try:
            write_manifest(self.store, Manifest(name, version, base, inputs.fp8, files, layouts))
        except StoreError as error:
            raise ActorFailed(self.policy.name, None, "publish_weights", str(error)) from error
        self.latest = _Published(version, Source(self.store.address, name, limit), full)
        if full:
            self.fulls.append(self.number)
        self.number += 1
        written = sum(file.nbytes for file in files)
        return {
            "time/sync/publish": time.monotonic() - start,
            "sync/files/bytes_written": float(written),
            "sync/files/share": written / sum(r.plain_bytes for r in reports),
            "sync/files/changed": sum(r.changed for r in reports) / sum(r.elements for r in reports),
            "sync/files/full": float(full),
        }

    def _fetch(self, members: Collection[int]) -> dict[int, str]:
        """Lets engines fetch the latest publication; returns the engines that failed, each with the cause."""
        assert self.latest is not None
        source, limit = self.latest.source, self.latest.source.timeout_s + MARGIN_S
        calls = [
            self.fleet.group.submit(
                rank, "fetch_weights", asdict(replace(source, cache=self._cache(rank))), self.latest.version
            )
            for rank in members
        ]
        return settle(calls, limit, after_failure=limit).causes

    def _cache(self, rank: int) -> str:
        return str(Path(self.cache) / f"engine-{rank}") if self.cache else ""

    def _collect(self) -> None:
        """Keeps the last `weights.files.keep` full images with their changes."""
        assert self.latest is not None
        if not self.latest.full:
            return
        try:
            collect(self.store, self.publisher, self.fulls[-self.config.weights.files.keep :][0])
        except StoreError as error:
            self.say(f"old weight files could not be removed: {error}")
