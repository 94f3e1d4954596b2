"""Conversions of NeMo-RL's settings that no other program has: estimators, importance weights, limits and schedules.

The arguments, the result and the errors are those of `convert`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.config.migrate.convert import Dropped, Result, Settings, fitted, home
from skyrl_mega.config.migrate.state import TranslationState

LOSS = "loss_fn.truncated_importance_sampling"
"""First part of the keys of importance weights with bounds."""
UNBOUNDED = 1e6
"""Bound of importance weights for a run without any: no weight of a token comes near."""
SCHEDULES = {"LinearLR": "linear", "CosineAnnealingLR": "cosine"}
"""Decay of torch → `policy.optimizer.schedule`."""
DATA_SETS = {
    "DAPOMath17K": "dapo-math-17k.parquet",
    "DAPOMathAIME2024": "aime-2024.parquet",
    "gsm8k": "gsm8k/train.parquet",
}
"""Data sets of NeMo-RL with a conversion here (`data_sets.KNOWN`) → file."""


def leave_one_out(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the estimator `rloo` for the first setting in `here`, if `value` is on and advantages are not divided by
    a deviation; ignores `argument`. `state` is the translation so far.

    Raises:
        Dropped: The value is off; or advantages are divided by the deviation, where no estimator here leaves the sample
            out of both.
    """
    if not value:
        raise Dropped("off there, and off unless given")
    if state.theirs("grpo.adv_estimator.name") != "grpo":
        raise Dropped("of the estimator grpo, which the run does not use")
    divided = state.theirs("grpo.adv_estimator.normalize_rewards")
    if state.theirs("grpo.normalize_rewards") if divided is None else divided:
        raise Dropped("mean and deviation are those of the whole group here, the sample itself included", look=True)
    return {here[0]: "rloo"}, "without division by the deviation"


def reinforce_plus_plus(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the estimator `reinforce++_baseline` for the first setting in `here`, or `reinforce++` for a run without
    a baseline. Ignores `value` and `argument`. `state` is the translation so far."""
    baseline = state.theirs("grpo.adv_estimator.minus_baseline")
    return {here[0]: "reinforce++" if baseline is False else "reinforce++_baseline"}, ""


def importance_correction(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the level of importance weights, and their bound `UNBOUNDED` if no key of `LOSS` is their bound. Ignores
    `here` and `argument`. `state` is the translation so far.

    Raises:
        Dropped: The value is off.
    """
    if not value:
        raise Dropped("off there, and off unless given")
    ours: Settings = {}
    if state.theirs("loss_fn.sequence_level_importance_ratios"):
        ours = {"algorithm.importance_level": "sequence", "algorithm.sequence_unit": "trajectory"}
    if state.theirs(f"{LOSS}_ratio") is not None and state.theirs(f"{LOSS}_type") != "seq-mask-tis":
        return ours, f"{LOSS}_ratio is the bound"
    return {**ours, "algorithm.importance_cap": UNBOUNDED}, "weights have no bound there"


def importance_bound(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns a bound of importance weights for the first setting in `here`, or for our setting `argument` if the
    bounds reject whole answers. `state` is the translation so far.

    Raises:
        Dropped: The value is null, or not allowed.
    """
    key = str(argument) if state.theirs(f"{LOSS}_type") == "seq-mask-tis" else here[0]
    return {key: fitted(key, value)}, "of the geometric mean of an answer" if key == argument else ""


def response_limit(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns no setting for the length at which a penalty is complete, if it is our limit of an answer: `here[1]`, or
    `here[0]` without the former. Ignores `argument`. `state` is the translation so far.

    Raises:
        Dropped: The length is not the limit.
    """
    limit = state.ours(here[1]) or state.ours(here[0])
    if value != limit:
        raise Dropped(f"the penalty is complete at {here[0]}={limit} here; give {shown(value)} there for it", look=True)
    return {}, f"{here[0]} says so"


def sequence_limit(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the longest sequence for every setting in `here`, and as limit of an answer if NeMo-RL's run gives none.
    Ignores `argument`. `state` is the translation so far.

    Raises:
        Dropped: A setting does not allow the value.
    """
    ours = {key: fitted(key, value) for key in here}
    if not state.theirs("policy.generation.max_new_tokens"):
        ours["rollout.sampling.max_tokens"] = value
    if not state.theirs("data.max_input_seq_length"):
        ours |= prompt_limit(value, ["rollout.max_prompt_tokens"], None, state)[0]
    return ours, "of a whole sequence; prompts and answers have no other limit there" if len(ours) > len(here) else ""


def prompt_limit(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the limit of a prompt for the first setting in `here`, at least one token below the limit of a sequence.
    Ignores `argument`. `state` is the translation so far.

    Raises:
        Dropped: The value is null, no number, or not allowed.
    """
    longest = state.theirs("policy.max_total_sequence_length")
    shorter = isinstance(value, int) and isinstance(longest, int) and value >= longest > 1
    most = longest - 1 if shorter else value
    return {here[0]: fitted(here[0], most)}, "a prompt leaves room for an answer" if shorter else ""


def torch_schedule(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns warm-up, schedule and its end, for the settings in `here`, from torch's schedulers: a single one, or a
    list for SequentialLR with a rising LinearLR as warm-up and at most one decay. Ignores `argument` and `state`.

    Raises:
        Dropped: Nothing is given, or other schedulers; `look` is set for the latter.
    """
    if value in (None, [], {}):
        raise Dropped("constant there, and constant unless given")
    entries = [entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, Mapping)]
    parts = [(str(entry["name"]).rpartition(".")[2], entry.get("kwargs") or {}) for entry in entries if "name" in entry]
    ours: Settings = {here[0]: 0, here[1]: "constant"}
    name, first = parts[0] if parts else ("", {})
    if name == "LinearLR" and first.get("start_factor", 1 / 3) < first.get("end_factor", 1):
        ours[here[0]] = fitted(here[0], first.get("total_iters", 5))
        parts = parts[1:]
    decays = [part for part in parts if part[0] != "ConstantLR"]
    if len(decays) > 1 or any(name not in SCHEDULES for name, _ in decays):
        names = ", ".join(name for name, _ in parts) or shown(value)
        raise Dropped(f"{names}: a linear warm-up is known here, then constant, linear or cosine", look=True)
    for name, arguments in decays:
        steps = arguments.get("T_max", arguments.get("total_iters"))
        if not isinstance(steps, int):
            raise Dropped(f"the end of {name} is not given", look=True)
        ours |= {here[1]: SCHEDULES[name], here[2]: ours[here[0]] + steps}
    return ours, "of torch's schedulers"


def data_set(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the files of a data set for the first setting in `here`: a parquet file as it is, and a name or another
    file as a parquet file that is still to be written. Ignores `argument` and `state`.

    Raises:
        Dropped: The value is no text.
    """
    if not isinstance(value, str) or not value:
        raise Dropped("not set there")
    if value.endswith(".parquet"):
        return {here[0]: [home(value)]}, ""
    if value in DATA_SETS:
        return {here[0]: [f"data/{DATA_SETS[value]}"]}, f"the parquet file of {value}"
    name = value.rstrip("/").rpartition("/")[2].partition(".")[0]
    part = "test" if here[0] == "data.eval" else "train"
    why = f"write the rows of {value} with prompt, env_class and reward_spec (docs/environments.md)"
    return {here[0]: [f"data/{name}/{part}.parquet"]}, why
