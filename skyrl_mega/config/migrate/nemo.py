"""Conversions of NeMo-RL's settings that no other program has: estimators, importance weights, limits and schedules.

The arguments, the result and the errors are those of `convert`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.config.migrate.convert import Dropped, Result, Settings, fitted, home, number_of
from skyrl_mega.config.migrate.schedules import updates_per_step
from skyrl_mega.config.migrate.state import TranslationState

LOSS = "loss_fn.truncated_importance_sampling"
"""First part of the keys of importance weights with bounds."""
ESTIMATOR = "grpo.adv_estimator"
"""Group of the estimator's keys."""
ALL = 1_000_000
"""Number of checkpoints that no run reaches."""
NO_LIMIT = 1_000_000
"""Number of steps with which NeMo-RL's files say that only the data ends a run."""
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
    """Returns the estimator `rloo` for the first setting in `here`, if advantages are not divided by a deviation.
    Ignores `value`, which is true. `argument` is a key of NeMo-RL that decides in place of this one, where it has a
    value; None for none. `state` is the translation so far.

    Raises:
        Dropped: Another key decides, or the estimator has no such baseline; or advantages are divided by the deviation:
            no estimator here leaves the sample out of both mean and deviation.
    """
    if argument and state.theirs(argument) is not None:
        raise Dropped(f"{argument} decides")
    name = state.theirs(f"{ESTIMATOR}.name")
    if name not in ("grpo", "gdpo"):
        raise Dropped("of the estimators grpo and gdpo, which the run does not use")
    if name == "gdpo" or _effective(state, "normalize_rewards"):
        raise Dropped(f"here a sample is part of the mean and the deviation of its group ({name})", look=True)
    return {here[0]: "rloo"}, "without division by the deviation"


def estimator(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns our name of an estimator for the first setting in `here`. Ignores `argument`. `state` is the translation
    so far.

    Raises:
        Dropped: There is no such estimator here.
    """
    if value == "grpo" and not _effective(state, "normalize_rewards"):
        return {here[0]: "rloo" if _effective(state, "use_leave_one_out_baseline") else "grpo"}, ""
    if value == "reinforce_plus_plus":
        baseline = state.theirs(f"{ESTIMATOR}.minus_baseline")
        return {here[0]: "reinforce++" if baseline is False else "reinforce++_baseline"}, ""
    if value not in ("grpo", "gdpo"):
        raise Dropped(f"no estimator of this name is known; give {here[0]} (docs/algorithms.md)", look=True)
    return {here[0]: value}, ""


def _effective(state: TranslationState, name: str) -> Any:
    """Returns the value of a key of the estimator; that of `grpo` if the estimator's own group does not have the key,
    as in older versions of NeMo-RL."""
    own = state.theirs(f"{ESTIMATOR}.{name}")
    return state.theirs(f"grpo.{name}") if own is None else own


def kl_in_reward(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Drops NeMo-RL's switch for a KL term in the reward: always raises `Dropped`, with `look` set where the switch has
    an effect there. Ignores `argument`. `state` is the translation so far."""
    if not value:
        raise Dropped("off there, and off unless given")
    if state.theirs(f"{ESTIMATOR}.name") != "reinforce_plus_plus":
        raise Dropped("without an effect on the estimators grpo and gdpo: the run has no KL term")
    text = f"there each token has its own KL; {here[0]}=reward subtracts that of the whole answer"
    raise Dropped(text, look=True)


def cut_answers(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Drops a factor for the rewards of cut answers: always raises `Dropped`, with `look` set unless the factor is null
    or 1. Ignores `argument` and `state`."""
    if value is None or value == 1:
        raise Dropped("off there, and off unless given")
    text = f"scale the reward of a cut answer in the environment, or leave such answers out by {here[0]}=true"
    raise Dropped(text, look=True)


def keep(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the number of kept checkpoints for the first setting in `here`; `ALL` for null. Ignores `argument` and
    `state`.

    Raises:
        Dropped: The value is not allowed.
    """
    if value is None:
        return {here[0]: ALL}, "all"
    return {here[0]: fitted(here[0], value)}, ""


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
    return {**ours, "algorithm.importance_cap": UNBOUNDED}, "NeMo-RL does not cap these importance weights"


def importance_bound(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns a bound of importance weights for the first setting in `here`, or for our setting `argument` if the
    bounds reject whole answers. `state` is the translation so far.

    Raises:
        Dropped: The value is null, or not allowed.
    """
    if value is None:
        raise Dropped("no bound")
    key = str(argument) if state.theirs(f"{LOSS}_type") == "seq-mask-tis" else here[0]
    return {key: fitted(key, value)}, "of the geometric mean of an answer" if key == argument else ""


def response_limit(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns no setting for the length at which a penalty is complete, if it is NeMo-RL's limit of an answer. Ignores
    `argument`. `state` is the translation so far.

    Raises:
        Dropped: The length is not the limit.
    """
    limit = state.theirs("policy.generation.max_new_tokens") or state.theirs("policy.max_total_sequence_length")
    if value != limit:
        text = f"here the penalty is complete at {here[0]}={limit}; set {here[0]}={shown(value)} for the same penalty"
        raise Dropped(text, look=True)
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


def step_limit(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the number of RL steps for the first setting in `here`. Ignores `argument` and `state`.

    Raises:
        Dropped: The value is not allowed, or at least `NO_LIMIT`.
    """
    if isinstance(value, int) and value >= NO_LIMIT:
        raise Dropped("no limit: run.epochs ends the run")
    return {here[0]: fitted(here[0], value)}, ""


def validation_share(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Drops the share of the training rows for evaluation: always raises `Dropped`, with `look` set unless the run has
    evaluation data, `here[0]`. Ignores `argument`. `state` is the translation so far."""
    if not value or state.ours(here[0]):
        raise Dropped("off there, and off unless given" if not value else f"{here[0]} has the rows of the evaluation")
    text = f"keep {shown(value)} of the rows out of data.train, as {here[0]}, and give evaluation.every"
    raise Dropped(text, look=True)


def torch_schedule(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns warm-up, schedule and its end, for the settings in `here`, from torch's schedulers: a single one, or a
    list for SequentialLR with a rising LinearLR as warm-up and at most one decay. NeMo-RL counts RL steps, and the
    settings optimizer steps. Ignores `argument`. `state` is the translation so far.

    Raises:
        Dropped: Nothing is given, or schedulers without a counterpart; `look` is set for the latter.
    """
    if value in (None, [], {}):
        raise Dropped("constant there, and constant unless given")
    updates, lr = updates_per_step(state, here[0]), state.ours("policy.optimizer.lr")
    parts, milestones = _torch_parts(value)
    ours: Settings = {here[0]: 0, here[1]: "constant"}
    name, first = parts[0]
    warmup = 0
    if name == "LinearLR" and first.get("start_factor", 1 / 3) < first.get("end_factor", 1.0) == 1:
        warmup = _steps(name, first.get("total_iters", 5))
        ours[here[0]] = warmup * updates
        if first.get("start_factor", 1 / 3) * max(1, warmup * updates) < 0.5:
            ours["policy.optimizer.warmup_from_zero"] = True
        parts = parts[1:]
    if milestones and milestones[0] != warmup:
        raise _unknown_schedule(f"the warm-up ends at {shown(milestones[0])}, not at {warmup}")
    decays = [part for part in parts if part[0] != "ConstantLR"]
    if len(decays) > 1 or any(part[1].get("factor", 1 / 3) != 1 for part in parts if part[0] == "ConstantLR"):
        raise _unknown_schedule(" and ".join(part[0] for part in parts))
    for name, arguments in decays:
        steps = _steps(name, arguments.get("T_max", arguments.get("total_iters")))
        lowest = arguments.get("eta_min", 0.0) if name == "CosineAnnealingLR" else arguments.get("end_factor", 1.0) * lr
        if name not in SCHEDULES or arguments.get("start_factor", 1.0) != 1 or not 0 <= lowest < lr:
            raise _unknown_schedule(name)
        ours |= {here[1]: SCHEDULES[name], here[2]: (warmup + steps) * updates, "policy.optimizer.min_lr": lowest}
    return ours, f"from torch's schedulers, which count RL steps of {updates} optimizer steps"


def _torch_parts(value: Any) -> tuple[list[tuple[str, dict[str, Any]]], list[Any]]:
    """Returns class name and arguments of each scheduler, with texts such as 1e-8 as numbers, and the milestones.

    Raises:
        Dropped: The value is no list of schedulers with names.
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
    """Returns a number of RL steps; raises Dropped unless it is a whole number."""
    if not isinstance(value, int | float) or value != int(value):
        raise _unknown_schedule(f"the end of {name} is not known")
    return int(value)


def _unknown_schedule(what: str) -> Dropped:
    return Dropped(f"{what}: known is a linear warm-up, then constant, linear or cosine", look=True)


def data_set(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the files of a data set for the first setting in `here`: a parquet file as it is, and a name or another
    file as a parquet file, which the user must write: `state.migration.to_add` says so. Ignores `argument`.

    Raises:
        Dropped: The value is no text.
    """
    if not isinstance(value, str) or not value:
        raise Dropped("not set there")
    if value.endswith(".parquet"):
        return {here[0]: [home(value)]}, ""
    if value in DATA_SETS:
        file = f"data/{DATA_SETS[value]}"
        return {here[0]: [file]}, f"the parquet file of {value}"
    name = value.rstrip("/").rpartition("/")[2].partition(".")[0]
    part = "test" if here[0] == "data.eval" else "train"
    file = f"data/{name}/{part}.parquet"
    why = f"write the rows of {value} with prompt, env_class and reward_spec (docs/environments.md)"
    state.migration.to_add.append(f"{file}: {why}")
    return {here[0]: [file]}, why
