"""`asynchrony.mode: one_step`: generates the whole batch of the next step while the current step trains.

    engines   batch 1, batch 2 ······ sync 1, batch 3 ······ sync 2, batch 4 …
    policy             train on 1 ··········· train on 2 ··········· train on 3 …

Batch n + 1 starts once batch n is complete and the engines run the latest weights. A sync waits for the end of the
batch. Each batch is therefore of a single weight version, and reproducible as far as seeds and engines are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from skyrl_mega.cluster.fleet import NoServingActor
from skyrl_mega.config.schema import Config
from skyrl_mega.rollout.generator import LOOK_EVERY_S
from skyrl_mega.telemetry.console import Console, Phase
from skyrl_mega.trainer import saved_rollouts
from skyrl_mega.trainer.rollout_source import RolloutSource
from skyrl_mega.trainer.rollouts_ahead import Rollouts, Versions
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.trajectory import Group, Trajectory


@dataclass
class _Batch:
    """The batch of a step, possibly still in generation."""

    step: Step
    """Collects metrics and trajectories of the generation."""
    stream_state: dict[str, Any]
    """State of the prompt stream before the batch took prompts."""
    groups: Future[list[Group]]


class OneStepAhead(Rollouts):
    """Generates the next step's batch in a thread while the policy trains on the current batch.

    Args:
        source: Generates a batch. The generator belongs to the thread alone and must not restart engines by a `refill`,
            because the policy is training.
        config: The run's settings.
        look: Raises an exception if the run must end.
        refill: Restarts engines after all engines failed.
    """

    def __init__(
        self, source: RolloutSource, config: Config, look: Callable[[], None], refill: Callable[[], object]
    ) -> None:
        self.source, self.config, self.look, self.refill = source, config, look, refill
        self.stream = source.stream
        self.batches: dict[int, _Batch] = {}
        """Batches by step number: the loop's current batch and the next."""
        self.versions = Versions(config.asynchrony.max_staleness)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="next-batch")
        self._closing = threading.Event()
        source.generator.look = self._end_if_closing  # the main thread checks for signals; this thread only for closing

    def next_groups(self, step: Step) -> list[Group]:
        """Waits for the step's batch, generated now if not ahead, and returns the groups. The wait has no time limit,
        but `look` can end it. Also adds the trajectories and metrics to `step`, and starts the next batch unless
        `asynchrony.max_staleness` is 0 or no step follows.

        Raises:
            ActorFailed: An engine or a rollout worker failed, and none restarts.
            StaleTooFar: A token is older than allowed.
            WrongRoutes: An engine's expert routes do not match the tokens.
            UserError: A trajectory lacks the reward named by `algorithm.dynamic_sampling.reward`, or the generator or
                the chat template is unusable.
            Exception: `look` or `refill` raised it.
        """
        self._drop_before(step.number)
        if step.number not in self.batches:
            self._begin(step.number)
        with step.phase("generate", total=self.config.data.prompts_per_step) as progress:
            groups = self._wait(step.number, progress)
        batch = self.batches[step.number].step
        step.trajectories += batch.trajectories
        step.greedy += batch.greedy
        metrics = {name: value for name, value in batch.metrics.items() if name != "time/generate"}
        metrics["asynchrony/generate_s"] = batch.metrics.get("time/generate", 0.0)
        step.record(metrics | self.versions.measure(t for group in groups for t in group.trajectories))
        following = step.number + 1
        if self.config.asynchrony.max_staleness and following not in self.batches and self._has_next(step.number):
            self._begin(following)
        return groups

    def before_sync(self, step: Step) -> None:
        """Waits until the batch of the step after `step` is complete, because a batch must not see new weights.

        Does nothing if the batch has not been started.

        Args:
            step: The current step; the metric `time/generate` of this step includes the wait.

        Raises:
            ActorFailed: An engine or a rollout worker failed, and none restarts.
            WrongRoutes: An engine's expert routes do not match the tokens.
            UserError: A trajectory lacks the reward named by `algorithm.dynamic_sampling.reward`, or the generator or
                the chat template is unusable.
            Exception: `look` or `refill` raised it.
        """
        if step.number + 1 in self.batches:
            with step.phase("generate") as progress:
                self._wait(step.number + 1, progress)

    def synced(self, version: int) -> None:
        """Records the weight version that engines have received; the next batch is generated under these weights."""
        self.versions.add(version)

    def prompts_left(self, done: int) -> int:
        """Returns the number of prompts that no step up to number `done` has taken: prompts left in the data, and
        prompts of batches for later steps."""
        waiting = [batch for number, batch in sorted(self.batches.items()) if number > done]
        if not waiting:
            return self.stream.remaining
        state = waiting[0].stream_state
        return self.stream.count * self.stream.epochs - int(state["position"]) + len(state.get("returned", []))

    def save(self, folder: Path, done: int) -> None:
        """Saves the complete batches of steps after `done`, without waiting for an incomplete batch, which is generated
        again after a resume.

        Raises:
            ClusterError: The trajectories' arrays are lost, or writing took too long.
            OSError: A file could not be written, also because `folder` does not exist.
        """
        rows: list[Trajectory] = []
        saved: list[dict[str, Any]] = []
        stream_state = self.stream.state()
        for number, batch in sorted(self.batches.items()):
            if number <= done:
                continue
            if not _is_complete(batch.groups):
                stream_state = batch.stream_state
                break
            trajectories = [*batch.step.trajectories, *batch.step.greedy]
            saved.append(
                {
                    "step": number,
                    "place": batch.stream_state,
                    "metrics": batch.step.metrics,
                    "rows": [len(rows), len(batch.step.trajectories), len(batch.step.greedy)],
                    "groups": saved_rollouts.group_indices(batch.groups.result(), trajectories),
                }
            )
            rows += trajectories
        prompt_index = {id(prompt): i for i, prompt in enumerate(self.source.prompts)}
        state = {
            "batches": saved,
            "versions": self.versions.recent,
            "stream": stream_state,
            "prompts": [prompt_index[id(t.prompt)] for t in rows if t.sample == 0],
        }
        saved_rollouts.write(folder, self.config, state, rows)

    def restore(self, folder: Path) -> str:
        """Restores the batches saved in a checkpoint, and returns a line about the restored or discarded batches; empty
        if nothing was saved.

        Args:
            folder: The checkpoint's folder for rollouts.

        Raises:
            UserError: `rollouts.json` cannot be read, or the number of data rows, the seed or the shuffling differs
                from the saved run's.
            OSError, pyarrow.ArrowException, TypeError, ValueError: `rollouts.parquet` cannot be read.
        """
        saved = saved_rollouts.read(folder, self.config, self.stream, self.source.prompts)
        if not isinstance(saved, tuple):
            return str(saved or "")
        state, rows = saved
        self.versions.recent = state["versions"]
        for batch in state["batches"]:
            step = _step(batch["step"])
            start, samples, greedy = batch["rows"]
            trajectories = rows[start : start + samples + greedy]
            step.metrics.update(batch["metrics"])
            step.trajectories, step.greedy = trajectories[:samples], trajectories[samples:]
            groups: Future[list[Group]] = Future()
            groups.set_result(saved_rollouts.rebuild_groups(batch["groups"], trajectories))
            self.batches[step.number] = _Batch(step, batch["place"], groups)
        steps = ", ".join(str(number) for number in sorted(self.batches))
        return f"restored the groups generated ahead for step {steps}" if steps else ""

    def close(self) -> None:
        """Abandons the batch in generation and waits, without limit, for the end of the thread, which checks twice a
        second."""
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)

    def _end_if_closing(self) -> None:
        if self._closing.is_set():
            raise CancelledError

    def _drop_before(self, number: int) -> None:
        for old in [old for old in self.batches if old < number]:
            del self.batches[old]

    def _has_next(self, number: int) -> bool:
        """Returns True if another step follows this one."""
        limit = self.config.run.steps
        return (limit is None or number < limit) and self.stream.remaining >= self.config.data.prompts_per_step

    def _begin(self, number: int) -> None:
        step = _step(number)
        stream_state = self.stream.state()
        self.batches[number] = _Batch(step, stream_state, self._thread.submit(self.source.next_groups, step))

    def _wait(self, number: int, progress: Phase) -> list[Group]:
        """Waits for a batch and returns the groups."""
        while True:
            batch = self.batches[number]
            if not wait([batch.groups], LOOK_EVERY_S).done:
                self.look()
                progress.update(_finished_groups(batch.step))
                continue
            try:
                return batch.groups.result()
            except NoServingActor:
                self.refill()
                self.stream.restore(batch.stream_state)
                self._begin(number)


def _step(number: int) -> Step:
    """Returns a step without console output, for generation in the background."""
    return Step(number, Console(StringIO()))


def _is_complete(groups: Future[list[Group]]) -> bool:
    return groups.done() and not groups.cancelled() and groups.exception() is None


def _finished_groups(step: Step) -> int:
    """Returns the number of finished groups of a batch. A round's groups appear only at the end of the round."""
    return len({id(t.prompt) for t in step.trajectories})
