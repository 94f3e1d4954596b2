"""What is learnt from: prompts, and demonstrations for a warm-up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from skyrl_mega.config.schema.fields import MOST, at_least, between


@dataclass
class DataConfig:
    """Prompts."""

    folder: Optional[str] = None
    """Read by nothing: other settings name the recipe's files with `${data.folder}`, so that one key moves them all."""
    train: list[str] = field(default_factory=list)
    """Parquet files of training prompts."""
    eval: list[str] = field(default_factory=list)
    """Parquet files of evaluation prompts."""
    prompts_per_step: int = at_least(1, 512)
    """Prompts (groups) of one RL step."""
    mini_batch_prompts: Optional[int] = at_least(1, None)
    """Prompts of one optimizer step; None takes all of the RL step's."""
    epochs_per_step: int = at_least(1, 1)
    """Times that an RL step trains on its mini-batches (PPO's epochs): the first time in their order, later in one
    drawn from the run's seed. Each is an optimizer step, which schedules count. Ratios are to the log-probs before the
    first of them, which are computed first."""
    samples_per_prompt: int = between(1, MOST, 8)
    """Trajectories of one prompt."""
    shuffle: bool = True
    """New order every epoch."""
    prepare: Optional[str] = None
    """Arguments of `python -m skyrl_mega.data` that make the files when they are not there."""


@dataclass
class WarmupConfig:
    """A supervised warm-up on demonstrations before RL, for models that start from nothing."""

    steps: int = at_least(0, 0)
    """Optimizer steps; 0 has no warm-up."""
    files: list[str] = field(default_factory=list)
    """Parquet files whose `extra_info.demonstration` is the response to learn, or a conversation after the prompt."""
    batch: int = at_least(1, 256)
    """Demonstrations per step."""
    lr: float = at_least(0, 1e-3)
    """Peak learning rate of the warm-up; the optimizer starts afresh for RL."""
