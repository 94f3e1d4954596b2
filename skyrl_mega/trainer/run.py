"""A training run: parts, progress, and the metrics, trajectories and checkpoints written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from skyrl_mega.algorithms.entropy import EntropyCoefficient
from skyrl_mega.cluster import channel
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.derived import gpus_needed
from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.sandbox import budget
from skyrl_mega.hf_checkpoint.box_header import Damaged
from skyrl_mega.megatron.group import TrainGroup
from skyrl_mega.megatron.role import CRITIC, POLICY
from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.events import Event
from skyrl_mega.telemetry.trackers.base import TrajectoryText
from skyrl_mega.telemetry.trackers.trackers import Trackers
from skyrl_mega.trainer.checkpoints import Checkpoints, DiskFull
from skyrl_mega.trainer.evaluation import Evaluator
from skyrl_mega.trainer.health.failures import failures_event, refuse_broken
from skyrl_mega.trainer.health.mismatch import EngineDiffers, end_if_too_far
from skyrl_mega.trainer.health.watch import Health
from skyrl_mega.trainer.kl_reward import KlReward
from skyrl_mega.trainer.measurements import Measurements
from skyrl_mega.trainer.records import Records
from skyrl_mega.trainer.reference import ReferenceModel
from skyrl_mega.trainer.residency import Residency
from skyrl_mega.trainer.rollouts_ahead import Rollouts
from skyrl_mega.trainer.shutdown import ShutdownRequest
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.by_reference import fetch_arrays
from skyrl_mega.trajectories.trajectory import Group, Status, Trajectory
from skyrl_mega.weights.sync import WeightSync

ROLLOUTS = "rollouts"
"""Checkpoint folder for trajectories generated ahead of training."""


@dataclass
class Run:
    """All parts of a run, assembled by `setup.open_run`."""

    config: Config
    folder: Path
    console: Console
    trackers: Trackers
    policy: TrainGroup
    reference: ReferenceModel | None
    """The frozen model for the KL term; None without a KL coefficient."""
    critic: TrainGroup | None
    """The value model for advantages; None if the estimator needs none."""
    sync: WeightSync
    rollouts: Rollouts
    evaluator: Evaluator
    stream: PromptStream
    checkpoints: Checkpoints
    measurements: Measurements
    """Measures memory and speed of steps and records traces."""
    residency: Residency = field(default_factory=Residency)
    """Moves parts of policy, critic and engines on and off the devices."""
    step: int = 0
    """Completed RL steps."""
    version: int = 0
    """Number of the last step with an update of the policy's weights."""
    first_evaluation: dict[str, float] = field(default_factory=dict)
    """Scores of the run's first evaluation, kept in checkpoints; {} before."""
    last_evaluation: dict[str, float] = field(default_factory=dict)
    """Scores of the newest evaluation of this process; {} before."""
    checkpoint_metrics: dict[str, float] = field(default_factory=dict)
    """`time/checkpoint` of the last checkpoint, for the next step's row."""
    checkpoint_overdue: bool = False
    """True after a due checkpoint did not fit on the disk."""
    shutdown: ShutdownRequest = field(default_factory=ShutdownRequest)
    """The request to end the run early, if any."""
    stream_state: dict[str, Any] = field(default_factory=dict)
    """State of the prompt stream after the completed steps."""
    any_step_measured: bool = False
    """True once this process measured a step."""
    killed_for_memory: int = 0
    """Sandboxed programs killed for memory, counted up to the newest step."""
    handed_out: WeakValueDictionary[int, Group] = field(default_factory=WeakValueDictionary)
    """Groups given to a function of `run.loop` and still in use, by `id`."""
    records: Records = field(default_factory=Records)
    """Writes trajectory files."""
    health: Health = field(init=False)
    """Checks after each step if the policy can still learn."""

    kl: KlReward = field(init=False)
    """The KL penalty in the reward, and the coefficient."""
    entropy: EntropyCoefficient = field(init=False)
    """The coefficient of the entropy bonus."""

    def __post_init__(self) -> None:
        self.health = Health(self.config)
        self.entropy = EntropyCoefficient(self.config.algorithm.entropy)
        self.kl = KlReward(self.config.algorithm.kl)

    @property
    def trained_models(self) -> dict[str, TrainGroup]:
        """The trained models by name of the checkpoint folder: `policy`, and `critic` if the run has one."""
        return {POLICY.name: self.policy} | ({CRITIC.name: self.critic} if self.critic else {})

    @property
    def temperature(self) -> float:
        """The divisor of the logits for log-probs, equal to the sampler's; 1 for greedy sampling."""
        return self.config.rollout.sampling.temperature or 1.0

    @property
    def finished(self) -> bool:
        """True after `run.steps` steps, and once fewer prompts are left than a step needs."""
        limit = self.config.run.steps
        return (limit is not None and self.step >= limit) or self.rollouts.prompts_left(
            self.step
        ) < self.config.data.prompts_per_step

    def due(self, every: int, step: int) -> bool:
        """Returns True if an action is due after step `step`: every `every` steps, and after step `run.steps`.

        False if `every` is 0. The last step of a run that ends for lack of prompts is due only as a multiple.
        """
        return every > 0 and (step % every == 0 or step == self.config.run.steps)

    def next_step(self) -> Step:
        """Begins the next step: reports its number to the supervisor, starts the measurements and returns the `Step`.
        The run counts the step only in `complete`. Raises ActorFailed if an actor cannot start a trace."""
        channel.at_step(self.step + 1)
        self.stream_state = self.stream.state()
        self.measurements.begin(
            self.step + 1, discard_earlier=bool(self.checkpoint_metrics) or not self.any_step_measured
        )
        self.any_step_measured = True
        check, prepare, end = self.shutdown.raise_if_requested, self.residency.enter, self.measurements.end_phase
        return Step(
            self.step + 1,
            self.console,
            dict(self.checkpoint_metrics),
            raise_if_ending=check,
            prepare=prepare,
            on_phase_end=end,
        )

    def complete(self, step: Step) -> None:
        """Completes a step: waits for the trajectory file, checks health, counts the step, writes its metrics and
        prints the health findings. Does not save a checkpoint.

        Raises:
            ActorFailed: A policy rank could not write its part of a trace.
            ClusterError: The trajectories' arrays are lost, or writing took too long.
            OSError: The trajectory file, the timeline, the trace or the row of metrics could not be written.
        """
        self.checkpoint_metrics = {}
        self.records.wait()
        step.record(self.measurements.metrics_of(step))
        seconds = time.perf_counter() - step.start
        phases = {k: v for k, v in step.metrics.items() if k.startswith("time/") and k.count("/") == 1}
        phase_seconds = sum(phases.values()) - phases.get("time/checkpoint", 0.0)
        tokens = step.metrics.get("rollout/tokens", 0.0)
        step.record(
            {
                "time/step": seconds,
                "time/other": seconds - phase_seconds,
                "perf/tokens_per_s": tokens / seconds,
                "perf/tokens_per_s_per_rank": tokens / seconds / gpus_needed(self.config),
            }
        )
        step.record(self.measurements.write_recordings(step))
        if (killed := budget.ended()) is not None:
            step.record({"environment/ended_for_memory": float(killed - self.killed_for_memory)})
            self.killed_for_memory = killed
        verdict = self.health.check(step.number, step.metrics, step.trajectories)
        step.record(verdict.metrics)
        self.step, self.stream_state = step.number, self.stream.state()
        self.trackers.log(step.number, step.metrics)
        self.console.step(step.number, step.metrics)
        for line in filter(None, (*verdict.lines, self.measurements.draft_change(step))):
            self.console.say(line)

    def end_if_engine_differs(self, step: Step) -> None:
        """Raises an error, which ends the run, if the engine's log-probs are too far from the policy's. Before the
        error, completes the step (`complete`), so that its row is written; the updated weights are neither synced nor
        saved.

        Raises:
            EngineDiffers: The difference reaches a stop bound of `health.mismatch`.
            ActorFailed, ClusterError, OSError: The step could not be completed; raised in place of EngineDiffers.
        """
        try:
            end_if_too_far(self.config, step.number, step.metrics)
        except EngineDiffers:
            self.complete(step)
            raise

    def record_rollouts(self, step: Step) -> None:
        """Records metrics of the step's trajectories, and failed environments as an event. Every
        `telemetry.trajectories_every` steps (0: never) also starts to write the trajectories to disk, and sends the
        first `telemetry.tracked_trajectories` of them to trackers; `complete` waits for the file.

        Raises:
            UserError: All environments failed, or more than the share `environment.max_failed`.
            ClusterError, OSError: The trajectories' arrays are lost, or a file could not be written.
        """
        step.record(rollout_metrics(step.trajectories))
        every = self.config.telemetry.trajectories_every
        if every and step.number % every == 0:
            file = self.folder / "trajectories" / f"step_{step.number:06d}.parquet"
            trajectories, columns = step.trajectories + step.greedy, self.config.telemetry.trajectory_columns
            self.records.write(file, trajectories, columns=columns)
            if count := self.config.telemetry.tracked_trajectories:
                self.trackers.log_trajectories(step.number, [_text(t) for t in step.trajectories[:count]])
        if failed := failures_event(step.number, step.trajectories):
            self.console.record(failed)
        try:
            refuse_broken(step.trajectories, self.config.environment.max_failed)
        except UserError:
            self.records.wait()  # the file shows what failed
            raise

    def evaluate(self, step: Step) -> None:
        """Scores the evaluation prompts under the engines' weights and records the scores in `step`, `first_evaluation`
        (if empty) and `last_evaluation`.

        Raises:
            UserError: The environment of every trajectory failed.
            ActorFailed: An engine refused a request, or no engine is left and none restarts.
            Stopped: The run must end.
        """
        self.rollouts.before_sync(step)
        with step.phase("eval", total=self.evaluator.samples) as progress:
            scores = self.evaluator.evaluate(step.number, progress)
        step.record(scores)
        self.first_evaluation = self.first_evaluation or scores
        self.last_evaluation = scores

    def evaluate_before_training(self) -> None:
        """Evaluates the initial policy, the baseline for all later evaluations, and writes the scores as step 0. Does
        nothing after step 0, or without `evaluation.before`.

        Raises:
            UserError: The environment of every trajectory failed.
            ActorFailed: An engine refused a request, or no engine is left and none restarts.
            Stopped: The run must end.
            OSError: The scores cannot be written.
        """
        if self.step == 0 and self.config.evaluation.before:
            step = Step(0, self.console, prepare=self.residency.enter)
            self.evaluate(step)
            self.trackers.log(0, step.metrics)
            self.console.step(0, step.metrics)

    def sync_engines(self) -> None:
        """Syncs the weights of the completed steps to all running engines, outside of a step's own sync. If no engine
        runs, waits for a restart.

        Raises:
            ActorFailed: A policy rank failed, or no engine could be updated.
            UserError: A process rejected the settings.
            OSError: A cached plan other than this sync's cannot be removed.
        """
        self.residency.enter("sync")
        self.sync.sync(self.version)
        self.rollouts.synced(self.version)

    def resync_restarted_engines(self) -> None:
        """Restores service after all engines failed during a phase: waits until an engine restarted, syncs the weights
        to all running engines, and enters the phase again. Every restart is bounded by `cluster.start_timeout_s`.

        Raises:
            ActorFailed: No engine can be restarted, or a policy rank failed.
            UserError: A process rejected the settings.
            OSError: A cached plan other than this sync's cannot be removed.
        """
        phase = self.residency.phase
        self.sync_engines()
        if phase is not None:
            self.residency.enter(phase)

    def save_if_due(self) -> None:
        """Writes a due checkpoint. The step's row is already on disk, so a kill in between repeats both the step and
        the row.

        If the disk is full, prints a line; the next step retries.

        Raises:
            DiskFull: No space is left for the last step's checkpoint.
            ActorFailed: A rank or a rollout worker failed.
            ClusterError: Trajectories generated ahead are lost, or writing these took too long.
            OSError: A file could not be written.
        """
        if self.checkpoint_overdue or self.due(self.config.checkpoint.every, self.step):
            start = time.perf_counter()
            try:
                self.save()
            except DiskFull as error:
                if self.finished:
                    raise
                self.checkpoint_overdue = True
                self.console.say(f"step {self.step} is not saved: {error}; the run tries again after the next step")
                return
            self.checkpoint_overdue = False
            self.checkpoint_metrics = {"time/checkpoint": time.perf_counter() - start}

    def save(self) -> None:
        """Writes a checkpoint of the completed steps: the models, the driver's state, and trajectories generated ahead.

        Raises:
            DiskFull: No space is left for the checkpoint.
            ActorFailed: A rank or a rollout worker failed.
            ClusterError: Trajectories generated ahead are lost, or writing these took too long.
            OSError: A file could not be written.
        """
        stream = self.stream_state or self.stream.state()
        state = {"step": self.step, "stream": stream, "first_evaluation": self.first_evaluation, **self.kl.state()}
        state["entropy"] = self.entropy.state()
        parts: dict[str, Callable[[Path], object]] = {name: model.save for name, model in self.trained_models.items()}
        if self.config.asynchrony.mode != "off":
            parts[ROLLOUTS] = partial(self.rollouts.save, done=self.step)
            state["stream"], state["version"] = self.stream.state(), self.version
            state["ahead"] = self.rollouts.prompts_left(self.step) - self.stream.remaining
        with self.console.phase("checkpoint"):
            self.checkpoints.save(self.step, state, parts)

    def save_before_exit(self) -> None:
        """Writes a checkpoint of the completed steps, unless the newest checkpoint is of the last completed step. A
        request for a graceful end does not interrupt the save.

        Raises:
            UserError: All checkpoints are damaged.
            DiskFull: No space is left for the checkpoint.
            ActorFailed: A rank or a rollout worker failed.
            ClusterError: Trajectories generated ahead are lost, or writing these took too long.
            OSError: A file could not be written.
        """
        newest = self.checkpoints.newest()
        if newest is None or self.checkpoints.state(newest)["step"] != self.step:
            with self.shutdown.finish():
                self.save()

    def restore(self) -> bool:
        """Loads models and state of the newest intact checkpoint and returns True. Returns False and changes nothing if
        there is no checkpoint or `checkpoint.resume` is off. A checkpoint that a rank finds damaged is skipped for the
        next older one.

        Raises:
            UserError: All checkpoints are damaged, the newest was written by an earlier version, the checkpoint lacks a
                model that the settings train, or its data or seed differs.
            ActorFailed: A rank failed.
        """
        while (newest := self.checkpoints.newest() if self.config.checkpoint.resume else None) is not None:
            try:
                self._restore(newest)
                return True
            except Damaged as damage:
                self.checkpoints.mark_damaged(newest, damage)
        return False

    def _restore(self, newest: Path) -> None:
        """Resumes from this checkpoint.

        Raises:
            Damaged: A rank found a corrupted file. Until then only the models were changed.
        """
        state: dict[str, Any] = self.checkpoints.state(newest)
        for name, model in self.trained_models.items():
            if not (newest / name).is_dir():
                raise UserError(
                    f"{newest} was saved by a run without a {name}; give another run.name, "
                    "or the advantage estimator of that run",
                    key="algorithm.advantage",
                    value=self.config.algorithm.advantage,
                )
            model.restore(newest / name)
        self.stream.restore(state["stream"])
        restored_line = self.rollouts.restore(newest / ROLLOUTS)
        self.kl.restore(state)
        self.step, self.version = state["step"], state.get("version", state["step"])
        self.first_evaluation = state["first_evaluation"]
        if "entropy" in state:  # earlier versions did not save the entropy coefficient
            self.entropy.restore(state["entropy"])
        text = f"resuming after step {self.step} from {newest}"
        self.console.say(Event("resumed", text, step=self.step, checkpoint=newest.name))
        if restored_line:
            self.console.say(restored_line)


def _text(trajectory: Trajectory) -> TrajectoryText:
    prompt, response = parquet.texts(fetch_arrays(trajectory))
    status, environment = trajectory.status.value, trajectory.prompt.env_class
    return TrajectoryText(prompt, response, trajectory.reward, status, environment)


def rollout_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Returns the metrics of a step's trajectories, at least one.

    `reward/*` and `environment/of/*` are without trajectories whose environment failed, and left out if all failed:
    `reward/mean`, `reward/std`, `reward/pass_at_n` (share of prompts with a positive reward), the mean
    `reward/of/<name>`, which counts a missing reward as 0, and `environment/of/<name>`, the mean over the trajectories
    with this figure. `rollout/*` count all trajectories: `tokens` (sum of the policy's), `response_length_mean`,
    `turns_mean`, the shares `truncated_fraction`, `timed_out_fraction` and `failed_fraction`, and `played_again`, the
    sum of retries. `environment/slot_wait_s` is the mean wait for an environment slot in seconds, left out if no
    trajectory has such a wait.
    """
    lengths = np.array([t.response_length for t in trajectories])
    judged = [t for t in trajectories if not t.status.failed]
    rewards = np.array([t.reward for t in judged])
    solved: dict[int, bool] = {}
    for t in judged:
        solved[t.prompt.uid] = solved.get(t.prompt.uid, False) or t.reward > 0
    reward_metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/pass_at_n": float(np.mean(list(solved.values()))),
    }
    for name in sorted({name for t in judged for name in t.rewards}):
        reward_metrics[f"reward/of/{name}"] = float(np.mean([t.rewards.get(name, 0.0) for t in judged]))
    for name in sorted({name for t in judged for name in t.metrics}):
        values = [t.metrics[name] for t in judged if name in t.metrics]
        reward_metrics[f"environment/of/{name}"] = float(np.mean(values))
    slot_waits = [t.seconds["slot"] for t in trajectories if "slot" in t.seconds]
    slot_metrics = {"environment/slot_wait_s": float(np.mean(slot_waits))} if slot_waits else {}
    return (
        (reward_metrics if judged else {})
        | slot_metrics
        | {
            "rollout/tokens": float(sum(t.written for t in trajectories)),
            "rollout/response_length_mean": float(lengths.mean()),
            "rollout/truncated_fraction": float(np.mean([t.status.truncated for t in trajectories])),
            "rollout/timed_out_fraction": float(np.mean([t.status is Status.TRUNCATED_TIME for t in trajectories])),
            "rollout/failed_fraction": float(np.mean([t.status.failed for t in trajectories])),
            "rollout/played_again": float(sum(t.retries for t in trajectories)),
            "rollout/turns_mean": float(np.mean([t.turns for t in trajectories])),
        }
    )
