"""`asynchrony.mode: one_step`: while a step trains, the batch of the next one is generated, as a whole.

    engines   batch 1, batch 2 ······ sync 1, batch 3 ······ sync 2, batch 4 …
    policy             train on 1 ··········· train on 2 ··········· train on 3 …

Batch n + 1 begins once batch n is there and the engines are up to date with it, and a sync waits for its end: every
batch is of one version, and the same as long as seeds and engines are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.fleet import NobodyServes
from skyrl_mega.config.schema import Config
from skyrl_mega.rollout.generator import LOOK_EVERY_S
from skyrl_mega.rollout.trajectory import Group, Trajectory
from skyrl_mega.telemetry.console import Console, Phase
from skyrl_mega.trainer import kept_rollouts
from skyrl_mega.trainer.rollout_source import RolloutSource
from skyrl_mega.trainer.rollouts_ahead import Versions
from skyrl_mega.trainer.step import Step


@dataclass
class _Batch:
    """Of one step."""

    step: Step
    """What its generation has recorded."""
    place: dict[str, Any]
    """The stream's state before its prompts were drawn."""
    groups: Future[list[Group]]


class OneStepAhead:
    """Generates a step's batch in a thread, while the policy trains on the one before.

    Args:
        source: Generates a batch. Its generator is of the thread alone: it has no `refill`, as the policy trains.
        config: The run's settings.
        look: Raises where the run is to end.
        refill: Brings engines back to service where none is left.
    """

    def __init__(
        self, source: RolloutSource, config: Config, look: Callable[[], None], refill: Callable[[], object]
    ) -> None:
        self.source, self.config, self.look, self.refill = source, config, look, refill
        self.stream = source.stream
        self.batches: dict[int, _Batch] = {}
        """By step: the one that the loop has, and the one that is generated."""
        self.versions = Versions(config.asynchrony.max_staleness)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="next-batch")
        self._closing = threading.Event()
        source.generator.look = self._end_if_closing  # what the run is asked, its own thread finds out

    def next_groups(self, step: Step) -> list[Group]:
        """The step's batch; the next one's is begun."""
        self._forget(step.number)
        if step.number not in self.batches:
            self._begin(step.number)
        with step.phase("generate", total=self.config.data.prompts_per_step) as progress:
            groups = self._wait(step.number, progress)
        batch = self.batches[step.number].step
        step.trajectories += batch.trajectories
        step.greedy += batch.greedy
        taken = {name: value for name, value in batch.metrics.items() if name != "time/generate"}
        taken["asynchrony/generate_s"] = batch.metrics.get("time/generate", 0.0)
        step.record(taken | self.versions.measure(t for group in groups for t in group.trajectories))
        following = step.number + 1
        if self.config.asynchrony.max_staleness and following not in self.batches and self._more(step.number):
            self._begin(following)
        return groups

    def before_sync(self, step: Step) -> None:
        """The batch that is generated is finished with the weights that it began with."""
        if step.number + 1 in self.batches:
            with step.phase("generate") as progress:
                self._wait(step.number + 1, progress)

    def synced(self, version: int) -> None:
        """The next batch is of these weights."""
        self.versions.add(version)

    def prompts_left(self, done: int) -> int:
        """From the first batch on that no step has learned from."""
        waiting = [batch for number, batch in sorted(self.batches.items()) if number > done]
        if not waiting:
            return self.stream.remaining
        place = waiting[0].place
        return self.stream.count * self.stream.epochs - int(place["position"]) + len(place.get("returned", []))

    def keep(self, folder: Path, done: int) -> None:
        """Batches that are whole; one that is not is generated again."""
        rows: list[Trajectory] = []
        kept: list[dict[str, Any]] = []
        place = self.stream.state()
        for number, batch in sorted(self.batches.items()):
            if number <= done:
                continue
            if not _whole(batch.groups):
                place = batch.place
                break
            own = [*batch.step.trajectories, *batch.step.greedy]
            kept.append(
                {
                    "step": number,
                    "place": batch.place,
                    "metrics": batch.step.metrics,
                    "rows": [len(rows), len(batch.step.trajectories), len(batch.step.greedy)],
                    "groups": kept_rollouts.places(batch.groups.result(), own),
                }
            )
            rows += own
        places = {id(prompt): i for i, prompt in enumerate(self.source.prompts)}
        about = {
            "batches": kept,
            "versions": self.versions.known,
            "stream": place,
            "prompts": [places[id(t.prompt)] for t in rows if t.sample == 0],
        }
        kept_rollouts.write(folder, self.config, about, rows)

    def restore(self, folder: Path) -> str:
        """Batches that the run had before it ended."""
        kept = kept_rollouts.read(folder, self.config, self.stream, self.source.prompts)
        if not isinstance(kept, tuple):
            return str(kept or "")
        about, rows = kept
        self.versions.known = about["versions"]
        for batch in about["batches"]:
            step = _step(batch["step"])
            start, samples, greedy = batch["rows"]
            own = rows[start : start + samples + greedy]
            step.metrics.update(batch["metrics"])
            step.trajectories, step.greedy = own[:samples], own[samples:]
            groups: Future[list[Group]] = Future()
            groups.set_result(kept_rollouts.grouped(batch["groups"], own))
            self.batches[step.number] = _Batch(step, batch["place"], groups)
        steps = ", ".join(str(number) for number in sorted(self.batches))
        return f"taken up again: what was generated ahead for step {steps}" if steps else ""

    def close(self) -> None:
        """What is generated is abandoned; its thread has ended when this returns."""
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)

    def _end_if_closing(self) -> None:
        if self._closing.is_set():
            raise CancelledError

    def _forget(self, number: int) -> None:
        for old in [old for old in self.batches if old < number]:
            del self.batches[old]

    def _more(self, number: int) -> bool:
        """Whether there is a step after this one."""
        limit = self.config.run.steps
        return (limit is None or number < limit) and self.stream.remaining >= self.config.data.prompts_per_step

    def _begin(self, number: int) -> None:
        step = _step(number)
        place = self.stream.state()
        self.batches[number] = _Batch(step, place, self._thread.submit(self.source.next_groups, step))

    def _wait(self, number: int, progress: Phase) -> list[Group]:
        """A batch, once it is there."""
        while True:
            batch = self.batches[number]
            if not wait([batch.groups], LOOK_EVERY_S).done:
                self.look()
                progress.update(_shown(batch.step))
                continue
            try:
                return batch.groups.result()
            except NobodyServes:
                self.refill()
                self.stream.restore(batch.place)
                self._begin(number)


def _step(number: int) -> Step:
    """What is generated ahead has no line of its own."""
    return Step(number, Console(StringIO()))


def _whole(groups: Future[list[Group]]) -> bool:
    return groups.done() and not groups.cancelled() and groups.exception() is None


def _shown(step: Step) -> int:
    """Groups of a batch that have been played; those of a round are there once all of it is."""
    return len({id(t.prompt) for t in step.trajectories})
