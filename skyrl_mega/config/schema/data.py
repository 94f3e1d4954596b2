"""Settings of prompts, and of demonstrations for a warm-up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from skyrl_mega.config.schema.fields import MOST, Refusals, at_least, between


@dataclass
class DataConfig:
    """Prompts of training and evaluation: files, and numbers of prompts and samples per step."""

    folder: Optional[str] = None
    """Folder of the recipe's files. Used only through `${data.folder}` in other settings; a single key then moves all
    files."""
    train: list[str] = field(default_factory=list)
    """Parquet files of training prompts."""
    eval: list[str] = field(default_factory=list)
    """Parquet files of evaluation prompts."""
    prompts_per_step: int = at_least(1, 512)
    """Prompts (groups) per RL step."""
    mini_batch_prompts: Optional[int] = at_least(1, None)
    """Prompts per optimizer step; null uses all prompts of the RL step."""
    epochs_per_step: int = at_least(1, 1)
    """Training passes over the mini-batches of an RL step (PPO's epochs): the first in order, the following in an order
    drawn from the run's seed. Each mini-batch of each pass is an optimizer step and counts for schedules. All ratios
    refer to the log-probs before the first optimizer step, computed in advance."""
    samples_per_prompt: int = between(1, MOST, 8)
    """Trajectories per prompt."""
    shuffle: bool = True
    """Shuffles the prompts in every epoch."""
    prepare: Optional[str] = None
    """Arguments of `python -m skyrl_mega.data` to create missing files."""

    def refusals(self) -> Refusals:
        """Yields a refusal if `train` is empty, or if `mini_batch_prompts` does not divide `prompts_per_step`."""
        if not self.train:
            yield "", "data.train is empty: allowed is a list of parquet files, data.train=[data/gsm8k/train.parquet]"
        if self.mini_batch_prompts and self.prompts_per_step % self.mini_batch_prompts:
            why = f"it does not divide data.prompts_per_step = {self.prompts_per_step}; choose a divisor"
            yield "data.mini_batch_prompts", why

    @property
    def one_update(self) -> bool:
        """True if an RL step has a single optimizer step: one mini-batch and one epoch."""
        return self.mini_batch_prompts in (None, self.prompts_per_step) and self.epochs_per_step == 1


@dataclass
class WarmupConfig:
    """Supervised warm-up on demonstrations before RL, for untrained models."""

    steps: int = at_least(0, 0)
    """Number of optimizer steps; 0 skips the warm-up."""
    files: list[str] = field(default_factory=list)
    """Parquet files with the target response in `extra_info.demonstration`, or with a conversation to follow the
    prompt."""
    batch: int = at_least(1, 256)
    """Demonstrations per step."""
    lr: float = at_least(0, 1e-3)
    """Peak learning rate of the warm-up; RL starts with a new optimizer state."""

    def refusals(self) -> Refusals:
        """Yields a refusal if `steps` is above 0 and `files` is empty."""
        if self.steps and not self.files:
            why = "it needs warmup.files, parquet files with extra_info.demonstration; give some, or warmup.steps=0"
            yield "warmup.steps", why
