"""A run: how long it goes, what it saves and what it writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from skyrl_mega.config.schema.fields import at_least, between


@dataclass
class RunConfig:
    """Where a run lives and how long it goes."""

    name: str = "run"
    """The run's name; its folder is `<directory>/<name>`."""
    directory: str = "runs"
    """The folder that holds runs."""
    seed: int = between(0, 2**32 - 1, 0)
    """Seeds data order, initial weights that are built, and sampling."""
    deterministic: bool = False
    """Two runs with the same settings agree to the last bit (docs/parity.md): all trajectories of a step wait for one
    another between turns, so that engines compute the same batches; torch, Megatron and Transformer Engine take
    algorithms that repeat themselves; on GPUs vLLM takes kernels whose results do not depend on the batch
    (`VLLM_BATCH_INVARIANT`, compute capability 9.0). Slower; needs `rollout.trajectory_timeout_s=null`."""
    steps: Optional[int] = at_least(0, None)
    """RL steps at most; None goes on until `epochs` are done."""
    epochs: int = at_least(1, 1)
    """Passes over the training prompts."""
    restarts: int = at_least(0, 3)
    """Times that a run in which a policy rank or a node failed starts again, from its newest checkpoint and in the same
    allocation. Where no step has been completed since the command was given, it ends at once, unless a node of the Ray
    cluster is lost; and it ends where nodes do not come within `cluster.start_timeout_s`."""
    patience: Optional[int] = at_least(0, 25)
    """Steps one after another from which the policy cannot learn (docs/health.md), after which the run ends with exit
    code 1, if they had `patience_groups` too; null or 0 never ends it. A single step to learn from starts the count
    again; one whose rewards are equal is such a step where tokens still have advantages (lengths, turns, a critic).
    Without any, rewards teach the policy nothing and only other prompts can help: with 512 a step, 25 steps are 12,800,
    more than a whole pass over most data sets, and of a run of days they are hours."""
    patience_groups: int = at_least(0, 917)
    """Groups of answers that these steps have together before it is no bad luck that none was of use: where rewards
    differ in one of a hundred groups, 917 have none with a probability of 1e-4. 0 counts steps alone."""


@dataclass
class CheckpointConfig:
    """Saving and coming back."""

    every: int = at_least(0, 10)
    """RL steps between checkpoints; 0 saves none."""
    keep: int = at_least(1, 2)
    """Newest checkpoints kept."""
    resume: bool = True
    """Goes on from the newest whole checkpoint of the run's folder."""
    export: bool = False
    """Writes the final weights as a Hugging Face directory."""


@dataclass
class ProfileConfig:
    """Steps of which everything that is computed is recorded, for Perfetto (docs/report.md)."""

    steps: list[int] = field(default_factory=list, metadata={"low": 1})
    """RL steps, each with a file of its own, `profile/step_<n>.json.gz` in the run's folder; empty records none."""
    ranks: list[int] = field(default_factory=lambda: [0], metadata={"low": 0})
    """Policy ranks whose operators and kernels are in it; empty leaves the driver, engines and environments."""


@dataclass
class TelemetryConfig:
    """What is written while the run goes."""

    trackers: list[str] = field(default_factory=lambda: ["jsonl", "tensorboard"], metadata={"empty": False})
    """Where the metrics go, in addition to `metrics.jsonl`, which is always written: names of docs/trackers.md, or the
    import path of your own class (`package.module:Class` or `path/to/file.py:Class`)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Tracker → its options; the name of your own tracker is that of its class."""
    trajectories_every: int = at_least(0, 1)
    """RL steps between trajectory files; 0 writes none."""
    trajectory_columns: bool = False
    """Whether trajectory files have every token's routes too (`policy.moe.replay=rollout`): a byte for each MoE layer
    and expert of a token, 384 a token with Qwen3-30B-A3B, beside 9 for all else."""
    tracked_trajectories: int = between(0, 1000, 8)
    """Trajectories that trackers are given whenever such a file is written, the first of the step; 0 gives none."""
    timeline: bool = True
    """Writes a small file for each step of what engines, environments and policy did when, `timeline/step_<n>.json.gz`
    in the run's folder, and measures who was idle (docs/report.md)."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """What is recorded for a profiler's view."""
