"""Conversions of NeMo-RL's settings that no other program has: estimators, importance weights, limits and schedules.

The arguments, the result and the errors are those of `convert`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.config.migrate.convert import Dropped, Result, Settings, fitted, home, number_of
from skyrl_mega.config.migrate.data_sets import rows_text
from skyrl_mega.config.migrate.schedules import updates_per_step
from skyrl_mega.config.migrate.state import TranslationState

TIS = "loss_fn.truncated_importance_sampling"
"""Start of NeMo-RL\'s keys of truncated importance sampling: `_type`, `_ratio` and `_ratio_min` follow."""
ESTIMATOR = "grpo.adv_estimator"
"""NeMo-RL\'s group of keys for the advantage estimator."""
ALL = 1_000_000
"""Value of `checkpoint.keep` that keeps every checkpoint: no run writes so many."""
NO_LIMIT = 1_000_000
"""From this number of steps on, a limit counts as none: NeMo-RL\'s files give 1000000 to let the data end a run."""
LONGEST = 10**9
"""Most RL steps of a schedule."""
UNBOUNDED = 1e6
"""Value of `algorithm.importance_cap` for weights that NeMo-RL does not cap; null would turn the weights off here."""
SCHEDULES = {"LinearLR": "linear", "CosineAnnealingLR": "cosine"}
"""Class of a torch scheduler with a decay → our `policy.optimizer.schedule`."""
DATA_SETS = {
    "DAPOMath17K": "dapo-math-17k.parquet",
    "DAPOMathAIME2024": "aime-2024.parquet",
    "gsm8k": "gsm8k/train.parquet",
}
"""Name of a data set in NeMo-RL → our file below `data/`, by which `data_sets` recognizes the training sets."""
LOADERS = ("ResponseDataset", "PreferenceDataset", "OpenAIFormatDataset", "NemoGymDataset")
"""Values of `dataset_name` that name a reader of files, not a data set."""


def leave_one_out(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the estimator `rloo` for the first setting in `here`, for a run that divides advantages by no deviation.
    Called only for the value true. `argument` is another key of NeMo-RL, which decides if it has a value, or None.

    Raises:
        Dropped: `argument` decides, or the estimator is neither grpo nor gdpo; or it is gdpo, or divides by the
            deviation (`look` is set): no estimator here leaves the sample out of mean and deviation.
    """
    if argument and state.theirs(argument) is not None:
        raise Dropped(f"{argument} decides")
    name = state.theirs(f"{ESTIMATOR}.name")
    if name not in ("grpo", "gdpo"):
        raise Dropped("of the estimators grpo and gdpo, which the run does not use")
    if name == "gdpo" or _estimator_value(state, "normalize_rewards"):
        text = f"here a sample is part of the mean and the deviation of its group of n ({name})"
        raise Dropped(f"{text}; there reward - mean is larger by n / (n - 1)", look=True)
    return {here[0]: "rloo"}, "without division by the deviation"


def estimator(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns our estimator for the first setting in `here`, from NeMo-RL's name and the keys that change its meaning.
    grpo with a leave-one-out baseline and without division by the deviation is `rloo`. Ignores `argument`.

    Raises:
        Dropped: There is no such estimator here; `look` is set.
    """
    if value == "grpo" and not _estimator_value(state, "normalize_rewards"):
        return {here[0]: "rloo" if _estimator_value(state, "use_leave_one_out_baseline") else "grpo"}, ""
    if value == "reinforce_plus_plus":
        baseline = state.theirs(f"{ESTIMATOR}.minus_baseline")
        return {here[0]: "reinforce++" if baseline is False else "reinforce++_baseline"}, ""
    if value not in ("grpo", "gdpo"):
        raise Dropped(f"no estimator of this name is known; give {here[0]} (docs/algorithms.md)", look=True)
    return {here[0]: value}, ""


def _estimator_value(state: TranslationState, name: str) -> Any:
    """Returns the value of a switch of the estimator: from `grpo.adv_estimator`, true by default; for a run without
    this group, from `grpo`, its place in older versions."""
    own = state.theirs(f"{ESTIMATOR}.{name}")
    if own is None and not any(key.startswith(f"{ESTIMATOR}.") for key in state.given):
        return state.theirs(f"grpo.{name}")
    return own is None or own


def kl_in_reward(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Drops NeMo-RL's switch for a KL term in the reward: always raises `Dropped`. `look` is set if the switch is on
    and the estimator is reinforce_plus_plus; with other estimators there is no KL term then. Ignores `argument`.
    """
    if not value:
        raise Dropped("off there, and off unless given")
    if state.theirs(f"{ESTIMATOR}.name") != "reinforce_plus_plus":
        raise Dropped("without an effect on the estimators grpo and gdpo: the run has no KL term")
    text = f"there each token has its own KL; {here[0]}=reward subtracts that of the whole answer"
    raise Dropped(text, look=True)


def truncated_answers(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Drops NeMo-RL's factor for the rewards of truncated answers: always raises `Dropped`. `look` is set unless the
    factor is null or 1. Ignores `argument` and `state`.
    """
    if value is None or value == 1:
        raise Dropped("off there, and off unless given")
    text = f"scale the reward of a cut answer in the environment, or leave such answers out by {here[0]}=true"
    raise Dropped(text, look=True)


def kept_checkpoints(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the number of checkpoints to keep for the first setting in `here`; `ALL` for null. Ignores `argument`
    and `state`.

    Raises:
        Dropped: The value is not allowed.
    """
    if value is None:
        return {here[0]: ALL}, "all"
    return {here[0]: fitted(here[0], value)}, ""


def importance_correction(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the settings that turn importance weights on: the level `sequence`, if NeMo-RL's ratios are of whole
    sequences, and the cap `UNBOUNDED`, unless NeMo-RL's `_ratio` is the cap. May return no setting. Ignores `here` and
    `argument`.

    Raises:
        Dropped: The value is off.
    """
    if not value:
        raise Dropped("off there, and off unless given")
    ours: Settings = {}
    if state.theirs("loss_fn.sequence_level_importance_ratios"):
        ours = {"algorithm.importance_level": "sequence", "algorithm.sequence_unit": "trajectory"}
    if state.theirs(f"{TIS}_ratio") is not None and state.theirs(f"{TIS}_type") != "seq-mask-tis":
        return ours, f"{TIS}_ratio is the bound"
    return {**ours, "algorithm.importance_cap": UNBOUNDED}, "NeMo-RL does not cap these importance weights"


def importance_bound(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns a bound of importance weights for the first setting in `here`; for the type seq-mask-tis, which rejects
    whole answers, for our setting `argument`.

    Raises:
        Dropped: The value is null, or not allowed.
    """
    if value is None:
        raise Dropped("no bound")
    key = str(argument) if state.theirs(f"{TIS}_type") == "seq-mask-tis" else here[0]
    return {key: fitted(key, value)}, "of the geometric mean of an answer" if key == argument else ""


def overlong_limit(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Checks the length at which the penalty for long answers is complete; returns no setting. Here this is the limit
    of an answer: NeMo-RL's `max_new_tokens`, or else its `max_total_sequence_length`. Ignores `argument`.

    Raises:
        Dropped: The length is null, or differs from the limit (`look` is set).
    """
    if value is None:
        raise Dropped("not set there")
    limit = state.theirs("policy.generation.max_new_tokens") or state.theirs("policy.max_total_sequence_length")
    if value != limit:
        text = f"here the penalty is complete at {here[0]}={limit}; set {here[0]}={shown(value)} for the same penalty"
        raise Dropped(text, look=True)
    return {}, f"the penalty is complete at {here[0]} here"


def sequence_limit(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the longest sequence for every setting in `here`; also as limit of an answer, and of a prompt (one token
    less), for each limit that NeMo-RL's run does not give. Ignores `argument`.

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
    """Returns the limit of a prompt for the first setting in `here`. A limit of at least the longest sequence becomes
    one token less, to leave room for an answer. Ignores `argument`.

    Raises:
        Dropped: The value is null, no number, or not allowed.
    """
    longest = state.theirs("policy.max_total_sequence_length")
    shorter = isinstance(value, int) and isinstance(longest, int) and value >= longest > 1
    most = longest - 1 if shorter else value
    return {here[0]: fitted(here[0], most)}, "a prompt leaves room for an answer" if shorter else ""


def step_limit(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the number of RL steps for the first setting in `here`. Ignores `argument` and `state`.

    Raises:
        Dropped: The value is at least `NO_LIMIT`, or not allowed.
    """
    if isinstance(value, int | float) and value >= NO_LIMIT:
        raise Dropped("no limit: run.epochs ends the run")
    return {here[0]: fitted(here[0], value)}, ""


def validation_share(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Drops the share of training rows that NeMo-RL holds out for evaluation: always raises `Dropped`. `look` is set if
    the share is above 0 and the run has no evaluation files, `here[0]`. Ignores `argument`.
    """
    if not value or state.ours(here[0]):
        raise Dropped("off there, and off unless given" if not value else f"{here[0]} has the rows of the evaluation")
    every = state.theirs("grpo.val_period")
    text = f"keep {shown(value)} of the rows out of data.train, as {here[0]}, and give evaluation.every={shown(every)}"
    raise Dropped(text, look=True)


def torch_schedule(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns warm-up, schedule and end of the decay, the three settings in `here`, from torch's schedulers. Known are
    one scheduler, or a list for SequentialLR: a LinearLR that rises to 1 as warm-up, then a constant rate, or a linear
    or cosine decay. RL steps of NeMo-RL become optimizer steps. Ignores `argument`.

    Also returns `policy.optimizer.min_lr` with a decay, and `warmup_from_zero` for a warm-up from nearly 0.

    Raises:
        Dropped: No scheduler is given; or the schedulers have no counterpart here (`look` is set).
    """
    if value in (None, [], {}):
        raise Dropped("constant there, and constant unless given")
    updates, lr = updates_per_step(state, here[0]), state.ours("policy.optimizer.lr")
    parts, milestones = _parse_schedulers(value)
    ours: Settings = {here[0]: 0, here[1]: "constant"}
    name, first = parts[0]
    ends = []
    if name == "LinearLR" and first.get("start_factor", 1 / 3) < first.get("end_factor", 1.0) == 1:
        ends.append(_steps(name, first.get("total_iters", 5)))
        ours[here[0]] = ends[0] * updates
        # Our warm-up begins at lr / steps, or at 0: the nearer of both.
        if first.get("start_factor", 1 / 3) * max(1, ours[here[0]]) < 0.5:
            ours["policy.optimizer.warmup_from_zero"] = True
        parts = parts[1:]
    if parts and parts[0][0] in SCHEDULES:
        name, decay = parts[0]
        steps = _steps(name, decay.get("T_max" if name == "CosineAnnealingLR" else "total_iters"))
        lowest = decay.get("eta_min", 0.0) if name == "CosineAnnealingLR" else decay.get("end_factor", 1.0) * lr
        starts_at_lr = name == "CosineAnnealingLR" or decay.get("start_factor", 1 / 3) == 1
        if "policy.optimizer.lr" not in state.migration.settings:
            raise _unknown_schedule(f"{name} beside an unknown learning rate")
        if not starts_at_lr or not 0 <= lowest < lr:
            raise _unknown_schedule(name)
        ends.append(sum(ends) + steps)
        ours |= {here[1]: SCHEDULES[name], here[2]: ends[-1] * updates, "policy.optimizer.min_lr": lowest}
        parts = parts[1:]
    if milestones != ends[: len(milestones)]:
        raise _unknown_schedule(f"milestones {shown(milestones)} beside schedulers that end at {shown(ends)}")
    if other := [name for name, kwargs in parts if name != "ConstantLR" or kwargs.get("factor", 1 / 3) != 1]:
        raise _unknown_schedule(" and ".join(other))
    return ours, f"from torch's schedulers, which count RL steps of {updates} optimizer steps"


def _parse_schedulers(value: Any) -> tuple[list[tuple[str, dict[str, Any]]], list[Any]]:
    """Returns class name and arguments of each scheduler, and the milestones. Texts such as 1e-8 become numbers.

    Raises:
        Dropped: There is no named scheduler, an entry is no mapping, or an argument is no number; `look` is set.
    """
    parts, milestones = [], list[Any]()
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, Mapping):
            raise _unknown_schedule(shown(entry))
        if "name" not in entry:
            milestones = entry.get("milestones") or []
            if not isinstance(milestones, list):
                raise _unknown_schedule(shown(entry))
            continue
        kwargs = entry.get("kwargs") or {}
        if not isinstance(kwargs, Mapping):
            raise _unknown_schedule(shown(kwargs))
        numbers = {name: number_of(each) for name, each in kwargs.items()}
        if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers.values()):
            raise _unknown_schedule(shown(dict(kwargs)))
        parts.append((str(entry["name"]).rpartition(".")[2], numbers))
    if not parts:
        raise _unknown_schedule(shown(value))
    return parts, milestones


def _steps(name: str, value: Any) -> int:
    """Returns RL steps as a whole number; raises Dropped, with `look`, for any other value."""
    if not isinstance(value, int | float) or not 0 < value <= LONGEST or value != int(value):
        raise _unknown_schedule(f"the length of {name} is not known")
    return int(value)


def _unknown_schedule(what: str) -> Dropped:
    """Returns the error for schedulers without a counterpart; `what` names the problem."""
    return Dropped(f"{what}: known is a linear warm-up, then constant, linear or cosine", look=True)


def data_set(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns a list with one parquet file for the first setting in `here`: the given parquet file, the file of a name
    in `DATA_SETS`, or a file that the user must write. Ignores `argument` and `state`.

    Raises:
        Dropped: The value is empty, or no text.
    """
    if not isinstance(value, str) or not value:
        raise Dropped("not set there")
    if value.endswith(".parquet"):
        return {here[0]: [home(value)]}, ""
    if value in DATA_SETS:
        file = f"data/{DATA_SETS[value]}"
        return {here[0]: [file]}, f"the parquet file of {value}"
    if value in LOADERS:
        raise Dropped("the loader of data_path, whose rows are written once")
    last = value.rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^\w.+-]+", "-", last.removesuffix(".jsonl").removesuffix(".json")).strip(".-")
    if "${" in value or not name:
        raise Dropped(f"give {here[0]}, a list of parquet files", look=True)
    part = "test" if here[0] == "data.eval" else "train"
    file = f"data/{name}/{part}.parquet"
    return {here[0]: [file]}, rows_text(value)
