"""Conversions of a value from the units of another program into settings of this project.

Each conversion takes the other program's value, the keys of our settings (`here`), the argument from `translation.yaml`
and the translation so far. It returns our settings with values, and the reason for a changed value (may be empty).

Raises:
    Dropped: The value has no counterpart; the text is the reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.config.keys import keys
from skyrl_mega.config.migrate.state import TranslationState

MODELS = "${oc.env:SKYRL_MEGA_MODELS,models}"
"""Folder of the models, as in `configs/model/`."""
TRACKERS = ("jsonl", "tensorboard", "wandb", "mlflow")
Settings = dict[str, Any]
Result = tuple[Settings, str]
"""Our settings with values, and the reason for a changed value (may be empty). The caller applies the settings."""


class Dropped(Exception):
    """A value without a counterpart; the text is the reason, for the account.

    Args:
        why: The reason; if empty, the note of the key in the table is used.
        look: True if dropping the value changes training, so the user must decide.
    """

    def __init__(self, why: str, *, look: bool = False) -> None:
        super().__init__(why)
        self.look = look


def fitted(key: str, value: Any) -> Any:
    """Returns a value converted to the type of our setting `key`; unchanged for a key of a free-form mapping.

    Raises:
        Dropped: The setting does not allow the value; `look` is set, except for null.
    """
    known = keys().get(key)
    if known is None:  # below a mapping such as rollout.options
        return value
    rule = known.rule
    if rule.type is list and isinstance(value, str | int):
        value = [value]
    if rule.type is float and isinstance(value, str):
        value = number_of(value)
    if rule.type is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if rule.type is str and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if value is None and not rule.nullable:
        raise Dropped("not set there")
    if not rule.allows(value):
        raise Dropped(f"{key} allows only {rule.words}", look=True)
    return value


def number_of(value: Any) -> Any:
    """Returns the number in a text such as 1e-8, which YAML reads as text; any other value unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _whole(number: float, what: str) -> int:
    """Returns a whole number of at least 1, rounded up."""
    result = max(1, math.ceil(number - 1e-9))
    if not math.isfinite(number):
        raise Dropped(f"{what} is no number")
    return result


def _numeric(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Dropped("not set there" if value is None else f"{shown(value)} is no number")
    return value


def same(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the value, converted by `fitted`, for every setting in `here`. Ignores `argument` and `state`.

    Raises:
        Dropped: A setting does not allow the value.
    """
    return {key: fitted(key, value) for key in here}, ""


def none(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Drops every value: always raises `Dropped`, with `argument` as reason (None: the note in the table). Ignores
    `here` and `state`."""
    raise Dropped(argument or "")


def first(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the value, converted by `fitted`, for the first setting in `here`, and ignores the remaining settings.
    Ignores `argument` and `state`.

    Raises:
        Dropped: The setting does not allow the value.
    """
    return {here[0]: fitted(here[0], value)}, ""


def positive(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns a value above 0 for every setting in `here`. `state` is the translation so far.

    Raises:
        Dropped: The value is null, negative or 0 ("not set" in the other program), no number, or not allowed.
    """
    if value is None or _numeric(value) <= 0:
        raise Dropped(f"{shown(value)} is not set there")
    return same(value, here, argument, state)


def items(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns entry i of a list for setting i of `here`. Ignores `argument` and `state`.

    Raises:
        Dropped: The value is no list of this length, or an entry is not allowed.
    """
    if not isinstance(value, list | tuple) or len(value) != len(here):
        raise Dropped(f"a list of {len(here)} values is expected")
    return {key: fitted(key, entry) for key, entry in zip(here, value, strict=True)}, "one setting each"


def also(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns a limit of tokens per turn for every setting in `here` and in `argument`, a list of our keys. Ignores
    `state`.

    Raises:
        Dropped: A setting does not allow the value.
    """
    return {key: fitted(key, value) for key in (*here, *argument)}, "the limit of all turns, and of a single turn"


def set_(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the settings in `argument`, a mapping, if the value is on; ignores `here` and `state`.

    Raises:
        Dropped: The value is false, null, 0 or an empty text.
    """
    if value in (False, None, 0, ""):
        raise Dropped("off there, and off unless given")
    return dict(argument), "on there"


def with_(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the value for every setting in `here`, and the settings in `argument`, a mapping, unchecked. `state` is
    the translation so far.

    Raises:
        Dropped: A setting in `here` does not allow the value.
    """
    return {**same(value, here, None, state)[0], **argument}, "with the settings that make it the same"


def positive_with(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns a value above 0 for the first setting in `here`, and the settings in `argument`, a mapping. `state` is
    the translation so far.

    Raises:
        Dropped: The value is null, negative, 0 or no number, or not allowed.
    """
    return {**positive(value, here[:1], None, state)[0], **argument}, "with the settings that make it the same"


def positive_set(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the settings in `argument`, a mapping, if the value is true or above 0; for the export of a model at the
    end. Ignores `here`. `state` is the translation so far.

    Raises:
        Dropped: The value is null, false, negative, 0 or no number.
    """
    positive(1 if value is True else value, (), None, state)
    return dict(argument), "at the end of the run; of any checkpoint: python -m skyrl_mega.export"


def above_1(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the settings in `argument` if the value, an expert parallel size, is above 1; ignores `here` and `state`.

    Raises:
        Dropped: The value is at most 1, or no number.
    """
    if _numeric(value) <= 1:
        raise Dropped("1 is off")
    return dict(argument), "over all GPUs of an engine"


def when_off(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the settings in `argument` if the value is off: false, null, 0 or empty; ignores `here` and `state`.

    Raises:
        Dropped: The value is on, as by default here.
    """
    if value:
        raise Dropped("on in both programs")
    return dict(argument), "off there"


def switch(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns null, or 0 if null is not allowed, for the first setting in `here` if the switch is off. Ignores
    `argument` and `state`.

    Returns no settings, and only a reason, if the switch is on: another key of the program has the value.
    """
    if value:
        return {}, f"{here[0]} says so: above 0 is on"
    return {here[0]: None if keys()[here[0]].nullable else 0}, "off"


def dtype(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns a number type by our name for every setting in `here`: `bf16` becomes `bfloat16`, `fp32` becomes
    `float32`. Ignores `argument`. `state` is the translation so far.

    Raises:
        Dropped: A setting does not allow the type.
    """
    names = {"bf16": "bfloat16", "fp32": "float32", "torch.bfloat16": "bfloat16", "float": "float32"}
    return same(names.get(str(value), value), here, None, state)


def model(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns a model's path for every setting in `here`. A name on the Hugging Face hub becomes a folder in `MODELS`;
    the reason then is the command that downloads the model, which this function does not run. Ignores `argument` and
    `state`.

    A hub name is a text with a single `/` that does not start with `.`, `/`, `~` or `$`. Any other path stays, without
    a `/` at the end, and with `${oc.env:HOME}` for `~`.
    """
    text = str(value)
    if text.count("/") == 1 and not text.startswith((".", "/", "~", "$")):
        path = f"{MODELS}/{text.rpartition('/')[2]}"
        return dict.fromkeys(here, path), f"hf download {text} --local-dir models/{text.rpartition('/')[2]}"
    return {key: home(text).rstrip("/") for key in here}, ""


def path(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns a model's path for every setting in `here`; null stays null. A name on the Hugging Face hub becomes a
    folder in `MODELS`, with the command for the download as reason (`model`). Ignores `argument`. `state` is the
    translation so far.

    Raises:
        Dropped: The value is null, and a setting does not allow null.
    """
    return model(value, here, None, state) if value is not None else same(None, here, None, state)


def reference(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the reference's path for every setting in `here`; null stays null. A name on the Hugging Face hub becomes
    a folder in `MODELS`, with the command for the download as reason (`model`). Ignores `argument`. `state` is the
    translation so far.

    Raises:
        Dropped: The path is a checkpoint in Megatron's format (`torch_dist`); a reference needs Hugging Face's format.
            Or the value is null, and a setting does not allow null.
    """
    if "torch_dist" in str(value):
        raise Dropped("a checkpoint of Megatron; the reference is read from model.path, in Hugging Face's format")
    return path(value, here, None, state)


def home(text: str) -> str:
    """Returns a path with a leading `~` of `~` or `~/…` replaced by a reference to the environment variable HOME; any
    other path unchanged, `~user` included."""
    return "${oc.env:HOME}" + text[1:] if text == "~" or text.startswith("~/") else text


def files(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the paths of data files, a text or a list, as a list for the first setting in `here`, with
    `${oc.env:HOME}` for a leading `~`. Ignores `argument` and `state`.

    Raises:
        Dropped: An entry is no text.
    """
    paths = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, str) for entry in paths):
        raise Dropped("a list of files is expected")
    return {here[0]: [home(entry) for entry in paths]}, ""


def named_files(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the paths in a list NAME, FILE, NAME, FILE, …, without the names, for the first setting in `here`; any
    other value is a single path. Ignores `argument`. `state` is the translation so far.

    Raises:
        Dropped: A path is no text.
    """
    paths = value[1::2] if isinstance(value, list) else [value]
    return files(paths, here, None, state)[0], "a row's data_source names its set"


def trackers(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the list of trackers for the first setting in `here`: our defaults plus the given trackers. Ignores
    `argument` and `state`.

    Raises:
        Dropped: At least one of the trackers is unknown, or the list adds nothing to our defaults.
    """
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if unknown := [name for name in names if name not in (*TRACKERS, "console", "none", "all")]:
        raise Dropped(f"{', '.join(unknown)} is no tracker here: {', '.join(TRACKERS)}, or your own class")
    added = [name for name in names if name in TRACKERS and name not in TRACKERS[:2]]
    if not added:
        raise Dropped("the terminal and TensorBoard are written anyway")
    return {here[0]: [*TRACKERS[:2], *added]}, "beside the files of the run; the terminal is always written"


def tracker(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the list of trackers for the first setting in `here`, our defaults plus the tracker named by `argument`,
    if the value is on. `state` is the translation so far.

    Raises:
        Dropped: The value is off, or the tracker is unknown or in use by default.
    """
    if not value:
        raise Dropped("off there, and off unless given")
    return trackers(argument, here, None, state)


def tracker_option(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the value for the wandb option named by `argument`, whatever `here` is. `state` is the translation so
    far.

    Raises:
        Dropped: The translated run does not use the tracker wandb.
    """
    if "wandb" not in state.ours("telemetry.trackers"):
        raise Dropped("of Weights & Biases, which the run does not use")
    return {f"telemetry.options.wandb.{argument}": value}, "an option of the tracker wandb"


def sequences(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Converts a number of sequences per micro-batch to tokens, for every setting in `here`: number × maximum sequence
    length. Ignores `argument`. `state` is the translation so far.

    The result is at most 8,192 tokens, or a single sequence if longer.

    Raises:
        Dropped: The value is no number.
    """
    length = longest(state)
    tokens = int(_numeric(value)) * length
    limit = max(8192, length)
    result = {key: min(tokens, limit) for key in here}
    cut = f", here at most {limit:,}: neither loss nor gradient depends on it" if tokens > limit else ""
    return result, f"{shown(value)} sequences of up to {length:,} tokens{cut}"


def longest(state: TranslationState) -> int:
    """Returns the maximum number of tokens of a sequence, prompt and response, by the translation so far."""
    return int(state.ours("rollout.max_length") or state.ours("rollout.max_prompt_tokens") + _response_limit(state))


def _response_limit(state: TranslationState) -> int:
    """Returns `derived.response_limit` of the translation so far."""
    turns, tokens = state.ours("rollout.max_turns"), state.ours("rollout.sampling.max_tokens")
    return int(state.ours("rollout.max_response_tokens") or turns * tokens)


def divided_by(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Divides the value by `argument`, a whole number or the key of our setting; returns the result, at least 1, for
    every setting in `here`. `state` is the translation so far.

    For a setting that is a whole number, the result is rounded up.

    Raises:
        Dropped: The value is no number, or the result is not allowed.
    """
    divisor = argument if isinstance(argument, int) else state.ours(argument)
    quotient = _numeric(value) / divisor
    whole = keys()[here[0]].type is int
    result = {key: fitted(key, _whole(quotient, key) if whole else max(1.0, quotient)) for key in here}
    return result, f"{shown(value)} / {divisor}" + ("" if isinstance(argument, int) else f" ({argument})")


def divides(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns our setting `argument` divided by the value, rounded up to at least 1, for the first setting in `here`. A
    value below 1 counts as 1. `state` is the translation so far.

    Raises:
        Dropped: The value is no number.
    """
    return {here[0]: _whole(state.ours(argument) / max(1, _numeric(value)), here[0])}, f"{argument} / {shown(value)}"


def times(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Multiplies the value by `argument`, a whole number or the key of our setting; returns the product for every
    setting in `here`. `state` is the translation so far.

    Raises:
        Dropped: The value is no number, or the product is not allowed.
    """
    factor = argument if isinstance(argument, int) else state.ours(argument)
    return {key: fitted(key, _numeric(value) * factor) for key in here}, f"{shown(value)} × {shown(factor)}"


def plus(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the value, cut to a whole number, plus the number `argument`, for every setting in `here`; for example to
    count turns of the policy instead of observations. Ignores `state`.

    Raises:
        Dropped: The value is no number, or the sum is not allowed.
    """
    return {key: fitted(key, int(_numeric(value)) + argument) for key in here}, "turns of the policy: one more"


def round_up(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the value rounded up to a whole number for the first setting in `here`. Ignores `argument` and `state`.

    Raises:
        Dropped: The value is no number. An infinite value raises OverflowError.
    """
    return {here[0]: math.ceil(_numeric(value))}, "a whole number of weight syncs"


def input_limit(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the maximum number of tokens before a turn for the first setting in `here`, and limits of sequence and
    response with which a last turn may still generate `max_tokens`. Ignores `argument`. `state` is the translation so
    far.

    Raises:
        Dropped: The value is null or no number.
    """
    if value is None:
        raise Dropped("not set there")
    most = int(_numeric(value)) + state.ours("rollout.sampling.max_tokens")
    ours = {here[0]: int(value), "rollout.max_length": most, "rollout.max_response_tokens": most}
    return ours, "a turn may begin with so many tokens before it, and write its whole answer"


def micro_batches_mean(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the setting `algorithm.loss_mean=micro_batches`, with the other program's samples per micro-batch;
    ignores the value and `here`. `state` is the translation so far.

    `argument` is a list of the other program's key of these samples, and its default.
    """
    key, default = argument
    samples = state.theirs(key) or default
    ours = {"algorithm.loss_mean": "micro_batches", "algorithm.loss_mean_samples": samples}
    return ours, f"the token mean of micro-batches of {samples}"


def constant_mean(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the settings `algorithm.loss_mean=constant` and `algorithm.loss_mean_length`, the divisor; ignores the
    value and `here`. `state` is the translation so far.

    The divisor is the value of the other program's key `argument`. Without such a value, or with None as `argument`,
    the divisor is our maximum response length of all turns; for SkyRL the sum of its limits of input and answer, as in
    the versions that had a default.

    Raises:
        Dropped: The divisor is not a number.
    """
    length = state.theirs(argument) if argument else None
    if not length and state.program == "SkyRL":
        given = state.theirs("generator.max_input_length") or state.theirs("trainer.max_prompt_length")
        answer = state.theirs("generator.sampling_params.max_generate_length")
        length = given + answer if given and answer else None
    length = length or _response_limit(state)
    ours = {"algorithm.loss_mean": "constant", "algorithm.loss_mean_length": int(_numeric(length))}
    return ours, f"the sum over a sequence divided by {length:,}"


def engines(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the present `rollout.engines` times the value, a number of replicas per engine, cut to a whole number;
    ignores `here` and `argument`. `state` is the translation so far.

    Raises:
        Dropped: The value is at most 1 or no number.
    """
    if _numeric(value) <= 1:
        raise Dropped("1 is no replica")
    return {"rollout.engines": state.ours("rollout.engines") * int(value)}, "as many more engines"


def at_least(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns for every setting in `here`, a limit for training, the larger of its present value and `value`, the limit
    for evaluation, cut to a whole number. Ignores `argument`. `state` is the translation so far.

    Raises:
        Dropped: The value is no number.
    """
    return {
        key: max(int(_numeric(value)), state.ours(key) or 0) for key in here
    }, "one limit for training and evaluation"


def evaluation_tokens(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the maximum number of tokens per turn in evaluations for the first setting in `here`. Ignores `argument`.
    `state` is the translation so far.

    For a value above our maximum response length, also returns the value as this maximum.

    Raises:
        Dropped: The setting does not allow the value.
    """
    ours = {here[0]: fitted(here[0], value)}
    if value is None or value <= _response_limit(state):
        return ours, ""
    ours["rollout.max_response_tokens"] = value
    return ours, "longer than in training, where rollout.sampling.max_tokens still ends an answer"


def clip(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns a clip bound for the settings of the loss in use, such as `algorithm.gspo.clip_low` for
    `algorithm.clip_low` in `here`.

    `argument` is subtracted for cispo, if the other program states the bound of the weight itself; None subtracts
    nothing.

    Raises:
        Dropped: The value has no effect in SkyRL's cispo, is no number, or is not allowed.
    """
    loss = state.ours("algorithm.loss")
    if loss == "cispo" and state.program == "SkyRL":
        raise Dropped("without effect there: its cispo has cispo_eps_clip_low and cispo_eps_clip_high")
    group = f"algorithm.{loss}" if loss in ("gspo", "cispo", "gmpo") else "algorithm"
    number = _numeric(value) - (argument or 0 if loss == "cispo" else 0)
    ours = {key.replace("algorithm", group, 1): number for key in here}
    return {key: fitted(key, number) for key in ours}, f"the clip range of {loss}" if group != "algorithm" else ""


def fusion(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Drops every value: always raises `Dropped`, because fusions are on by default where results do not change.
    Ignores `here`, `argument` and `state`."""
    raise Dropped("used wherever it is right" if value else "list the others in policy.fusions to turn it off")


def context(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns a size of Ulysses sequence parallelism as the context parallel size, with the same exchange. Ignores
    `here`. Ignores `argument` and `state`.

    Raises:
        Dropped: The size is at most 1, no number, or not allowed.
    """
    if _numeric(value) <= 1:
        raise Dropped("1 is no cut")
    size = fitted("policy.layout.context", value)
    ours = {"policy.layout.context": size, "policy.layout.context_exchange": "all_to_all"}
    return ours, "Ulysses: heads over several GPUs"


def without_suffix(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the value as text without the suffix `argument` for the first setting in `here`: this project appends the
    suffix itself. The reason says so; it is empty for a text without the suffix. Ignores `state`.

    Raises:
        Dropped: The value is null.
    """
    if value is None:
        raise Dropped("not set there")
    text = str(value)
    ours = text.removesuffix(argument)
    return {here[0]: ours}, f"{argument} is added here" if ours != text else ""


def list_(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns the value as a list for the first setting in `here`; a single value becomes a list of one text. Ignores
    `argument` and `state`.

    Raises:
        Dropped: The value is null, or the setting does not allow the list.
    """
    if value is None:
        raise Dropped("not set there")
    return {here[0]: fitted(here[0], value if isinstance(value, list) else [str(value)])}, ""


def trl_importance(value: Any, here: Sequence[str], argument: Any, state: TranslationState) -> Result:
    """Returns TRL's bound of the importance weight as `algorithm.importance_cap`; if TRL masks whole sequences, also as
    `algorithm.rejection.high`. Ignores `here` and `argument`. `state` is the translation so far.

    Raises:
        Dropped: The setting does not allow the value.
    """
    bound = fitted("algorithm.importance_cap", value)
    ours = {"algorithm.importance_cap": bound}
    if str(state.theirs("vllm_importance_sampling_mode")).startswith("sequence_mask"):
        ours["algorithm.rejection.high"] = bound
    return ours, "the bound of the mask too" if len(ours) > 1 else ""
