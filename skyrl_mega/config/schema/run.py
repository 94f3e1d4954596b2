"""Settings of the run's length, checkpoints and output."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Optional

from skyrl_mega.config.schema.fields import Refusals, at_least, between, duplicates


@dataclass
class RunConfig:
    """Name, folder, length and restarts of a run."""

    name: str = "run"
    """Name of the run; its folder is `<directory>/<name>`."""
    directory: str = "runs"
    """Parent folder of runs."""
    seed: int = between(0, 2**32 - 1, 0)
    """Seed of the data order, of initial weights built by `model.build`, and of sampling."""
    deterministic: bool = False
    """Makes two runs with the same settings agree to the last bit (docs/parity.md): all trajectories of a step wait for
    each other between turns, so that engines compute the same batches; torch, Megatron and Transformer Engine use
    deterministic algorithms; on GPUs vLLM uses batch-invariant kernels (`VLLM_BATCH_INVARIANT`, compute capability
    9.0). Slower; requires `rollout.trajectory_timeout_s=null`."""
    loop: Optional[str] = None
    """Import path (`package.module:function` or `path/to/file.py:function`) of your own order of the parts of an RL
    step, a function of a StepPlan (docs/generators.md): several generations, several updates, an evaluation of your
    own. null generates, trains and syncs once."""
    steps: Optional[int] = at_least(0, None)
    """Maximum number of RL steps; null trains until `epochs` are done."""
    epochs: int = at_least(1, 1)
    """Passes over the training prompts."""
    restarts: int = at_least(0, 3)
    """Number of restarts from the newest checkpoint, in the same allocation, after a policy rank or a node failed.
    Before the first step completed by this command, a fault ends the run at once, unless a node of the Ray cluster is
    lost. The run also ends if nodes do not join within `cluster.start_timeout_s`."""
    patience: Optional[int] = at_least(0, 25)
    """Number of consecutive steps without a learning signal (docs/health.md) before the run ends with exit code 1,
    provided that `patience_groups` is reached as well; null or 0 never ends the run. A single step with a signal resets
    the count. A step with equal rewards still has a signal if tokens have advantages (from lengths, turns or a critic).
    Without any advantage the rewards teach the policy nothing and only other prompts can help: with 512 prompts per
    step, 25 steps are 12,800 prompts, more than a pass over most data sets, but only hours of a run of days."""
    patience_groups: int = at_least(0, 917)
    """Minimum number of groups in these steps, to rule out bad luck: if rewards differ in 1 % of all groups, 917 groups
    without a signal have a probability of 1e-4. 0 counts steps only."""

    def refusals(self) -> Refusals:
        """Yields a refusal if `name` is not a valid folder name."""
        if not re.fullmatch(r"[\w.+-]+", self.name) or not self.name.strip("."):
            yield "run.name", "allowed are letters, digits and . _ + -; use run.directory for folders"


@dataclass
class CheckpointConfig:
    """Interval and number of checkpoints, resume, and export of the final weights."""

    every: int = at_least(0, 10)
    """RL steps between checkpoints; 0 saves none."""
    keep: int = at_least(1, 2)
    """Number of newest checkpoints to keep."""
    resume: bool = True
    """Resumes from the newest complete checkpoint in the run's folder."""
    export: bool = False
    """Writes the final weights as a Hugging Face directory."""


@dataclass
class ProfileConfig:
    """Profiled steps: all computation of these steps is recorded for Perfetto (docs/report.md)."""

    steps: list[int] = field(default_factory=list, metadata={"low": 1})
    """RL steps to record, each in a separate file, `profile/step_<n>.json.gz` in the run's folder; empty records
    none."""
    ranks: list[int] = field(default_factory=lambda: [0], metadata={"low": 0})
    """Policy ranks with recorded operators and kernels; empty records only driver, engines and environments."""

    def refusals(self) -> Refusals:
        """Yields refusals of repeated steps or ranks, and of non-default ranks without steps."""
        for name, given in (("steps", self.steps), ("ranks", self.ranks)):
            yield from duplicates(f"telemetry.profile.{name}", given)
        if not self.steps and self.ranks != (default := ProfileConfig().ranks):
            why = f"no step is recorded; give telemetry.profile.steps, or telemetry.profile.ranks={default}"
            yield "telemetry.profile.ranks", why


@dataclass
class TelemetryConfig:
    """Metrics, trajectory files, timelines and profiles of a run."""

    trackers: list[str] = field(default_factory=lambda: ["jsonl", "tensorboard"], metadata={"empty": False})
    """Destinations of the metrics, in addition to `metrics.jsonl` (always written): names from docs/trackers.md, or the
    import path of your own class (`package.module:Class` or `path/to/file.py:Class`)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Tracker → options of the tracker; your own tracker is named by the class name."""
    trajectories_every: int = at_least(0, 1)
    """RL steps between trajectory files; 0 writes none."""
    trajectory_columns: bool = False
    """Adds the expert routes of every token to trajectory files (`policy.moe.replay=rollout`): a byte per MoE layer and
    active expert, 384 bytes per token for Qwen3-30B-A3B, compared with 9 bytes for all other data of a token."""
    tracked_trajectories: int = between(0, 1000, 8)
    """Number of trajectories sent to the trackers with each trajectory file, the first of the step; 0 sends none."""
    timeline: bool = True
    """Writes a small file per step, `timeline/step_<n>.json.gz` in the run's folder, with the activity of engines,
    environments and policy over time, and measures idle time (docs/report.md)."""
    page: Optional[int] = between(0, 65535, None)
    """Port of the live page on the driver's node (docs/report.md): the report during the run, alarms, and `/metrics`
    for Prometheus; 0 takes a free port, null serves no page. Every request needs the token printed at the start."""
    page_host: str = "127.0.0.1"
    """Address of the live page: the default is reachable from the driver's node only; 0.0.0.0 is every interface."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Steps and ranks recorded for a profiler's view."""

    def refusals(self) -> Refusals:
        """Yields refusals of a non-default `page_host` without `page`, and of a malformed `page_host`."""
        if self.page is None and self.page_host != TelemetryConfig.page_host:
            why = "no page is served; give telemetry.page=8265 too, or leave the address out"
            yield "telemetry.page_host", why
        if not re.fullmatch(r"[\w.:-]+", self.page_host):
            yield "telemetry.page_host", "allowed is an address or a name of this machine, such as 127.0.0.1 or 0.0.0.0"
