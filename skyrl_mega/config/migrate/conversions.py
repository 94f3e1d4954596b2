"""Table of all conversions, by their name in `translation.yaml`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_mega.config.migrate import convert, rewards, schedules
from skyrl_mega.config.migrate.convert import Result
from skyrl_mega.config.migrate.state import TranslationState

CONTEXTUAL = (
    "sequences", "divided_by", "divides", "times", "share_of_steps", "input_limit", "tracker_option",
    "decay_to_the_end", "legacy_mean", "constant_mean", "trl_micro_batches", "evaluation_tokens", "engines",
    "at_least", "clip", "router_loss", "trl_importance", "rl_steps", "schedule",
)  # fmt: skip
"""Conversions with a result that depends on other settings; applied after the remaining conversions."""


CONVERSIONS: Mapping[str, Callable[[Any, Sequence[str], Any, TranslationState], Result]] = {
    "same": convert.same,
    "none": convert.none,
    "first": convert.first,
    "positive": convert.positive,
    "items": convert.items,
    "also": convert.also,
    "set": convert.set_,
    "with": convert.with_,
    "positive_with": convert.positive_with,
    "positive_set": convert.positive_set,
    "above_1": convert.above_1,
    "when_off": convert.when_off,
    "verl_reward": rewards.verl_reward,
    "trl_reward": rewards.trl_reward,
    "switch": convert.switch,
    "dtype": convert.dtype,
    "model": convert.model,
    "path": convert.path,
    "reference": convert.reference,
    "files": convert.files,
    "named_files": convert.named_files,
    "environment": rewards.environment,
    "trackers": convert.trackers,
    "tracker": convert.tracker,
    "tracker_option": convert.tracker_option,
    "sequences": convert.sequences,
    "divided_by": convert.divided_by,
    "divides": convert.divides,
    "times": convert.times,
    "plus": convert.plus,
    "round_up": convert.round_up,
    "share_of_steps": schedules.share_of_steps,
    "decay_to_the_end": schedules.decay_to_the_end,
    "rl_steps": schedules.rl_steps,
    "schedule": schedules.schedule,
    "input_limit": convert.input_limit,
    "legacy_mean": convert.legacy_mean,
    "engines": convert.engines,
    "at_least": convert.at_least,
    "clip": convert.clip,
    "fusion": convert.fusion,
    "context": convert.context,
    "without_suffix": convert.without_suffix,
    "list": convert.list_,
    "router_loss": convert.router_loss,
    "evaluation_tokens": convert.evaluation_tokens,
    "trl_importance": convert.trl_importance,
    "constant_mean": convert.constant_mean,
    "trl_micro_batches": convert.trl_micro_batches,
}
"""Name in `translation.yaml` → conversion. The name `figures` is absent: `figures.py` computes batches and GPUs."""
