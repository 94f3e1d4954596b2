"""Table of all conversions, by their name in `translation.yaml`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skyrl_mega.config.migrate import convert, nemo, rewards, schedules
from skyrl_mega.config.migrate.convert import Result
from skyrl_mega.config.migrate.state import TranslationState

ConversionFunction = Callable[[Any, Sequence[str], Any, TranslationState], Result]


def _named(functions: Sequence[ConversionFunction]) -> dict[str, ConversionFunction]:
    """Returns name → function; an underscore at the end, which avoids a word of Python, is left out."""
    return {function.__name__.removesuffix("_"): function for function in functions}


CONTEXTUAL: dict[str, ConversionFunction] = _named((
    convert.sequences, convert.divided_by, convert.divides, convert.times, convert.input_limit, convert.tracker_option,
    convert.constant_mean, convert.micro_batches_mean, convert.evaluation_tokens, convert.engines, convert.at_least,
    convert.clip, convert.trl_importance, schedules.share_of_steps, schedules.decay_to_the_end, schedules.rl_steps,
    schedules.schedule, nemo.leave_one_out, nemo.estimator, nemo.importance_correction, nemo.overlong_limit,
    nemo.sequence_limit, nemo.prompt_limit, nemo.validation_share, nemo.torch_schedule,
))  # fmt: skip
"""Conversions with a result that depends on other settings; applied after the remaining conversions."""

CONVERSIONS: dict[str, ConversionFunction] = CONTEXTUAL | _named((
    convert.same, convert.none, convert.first, convert.positive, convert.items, convert.also, convert.set_,
    convert.with_, convert.positive_with, convert.positive_set, convert.above_1, convert.when_off, convert.switch,
    convert.dtype, convert.model, convert.path, convert.reference, convert.files, convert.named_files, convert.trackers,
    convert.tracker, convert.plus, convert.round_up, convert.fusion, convert.context, convert.without_suffix,
    nemo.kl_in_reward, nemo.truncated_answers, nemo.kept_checkpoints, nemo.importance_bound, nemo.step_limit,
    nemo.data_set, convert.list_, rewards.environment, rewards.verl_reward, rewards.trl_reward,
))  # fmt: skip
"""Name in `translation.yaml` → conversion. The name `figures` is absent: `figures.py` computes batches and GPUs."""
