"""Settings of another program from arguments, a YAML file, a shell script or a Python script."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.migrate import inheritance, python_script, shell
from skyrl_mega.config.migrate.expansion import Variables
from skyrl_mega.config.migrate.given import Given, GivenSettings
from skyrl_mega.config.migrate.shell import Argument, Command
from skyrl_mega.config.other_programs import lookup
from skyrl_mega.config.other_programs.table import programs

SUFFIXES = {".sh": "shell", ".bash": "shell", ".slurm": "shell", ".sbatch": "shell", ".yaml": "yaml", ".yml": "yaml"}
HYDRA = ("SkyRL", "verl", "NeMo-RL")
"""Programs with `key=value` arguments; slime and TRL take `--option value`."""
CONFIG_OPTION = "--config"
"""NeMo-RL's option for its YAML file."""
FILE_OPTIONS = ("--config-path", "--config-name", "--config-dir")
"""Hydra's options for the settings file of SkyRL or verl; NeMo-RL has `CONFIG_OPTION`."""
LAUNCHER_PROCESSES = ("--num_processes", "--num-processes", "--nproc_per_node", "--nproc-per-node")
MOST_VALUES = 100_000
"""Maximum number of values in a YAML file."""
_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^${}]*\}")
_HYDRA = re.compile(r"(?:\+\+|\+)?(?P<key>[A-Za-z_][\w./@]*)=(?P<value>.*)", re.DOTALL)
LARGEST = 10**18
"""Largest absolute result of a function in a YAML file (`ARITHMETIC`)."""


def _of_numbers(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns the function with checks: ValueError for an argument that is no number, and a result beyond `LARGEST`."""

    def compute(a: Any, b: Any) -> Any:
        if not all(isinstance(number, int | float) for number in (a, b)) or abs(result := function(a, b)) > LARGEST:
            raise ValueError("functions of a file take numbers")
        return result

    return compute


ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    name: _of_numbers(function)
    for name, function in (("add", operator.add), ("mul", operator.mul), ("div", operator.truediv), ("max", max))
}
"""Functions of two numbers that NeMo-RL's files may use, as in `${mul:${policy.a},2}`."""
_DOTTED = re.compile(r"\w+(\.\w+)*")
"""A plain dotted key; only such settings of the command line take part in `${…}` of a file."""
_UNNAMED = re.compile(r"[^A-Za-z0-9._+-]+")
"""Characters that a run's name may not have."""
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_NEGATIVE = re.compile(r"-\.?\d")


def read(program: str, words: Sequence[str]) -> GivenSettings:
    """Returns the other program's settings from a file, from arguments, or from a file followed by arguments.

    Arguments after a file are later settings and replace those of the file. For NeMo-RL, also reads the file that
    `--config` names, and files to inherit from. Nothing is run.

    Args:
        program: SkyRL, verl, slime, TRL or NeMo-RL.
        words: The arguments of the command after the program.

    Raises:
        UserError: No input is given, the file cannot be read, or no setting is found; a value is not finite or too
            large; or a Python script is given for another program than TRL.
    """
    reading = GivenSettings(program)
    arguments = [Argument(word) for word in words]
    if words and (kind := _kind(words[0])):
        arguments = arguments[1:]
        path = Path(words[0])
        if not path.is_file():
            raise UserError(
                "no such file", key=words[0], fix="give a .sh, .yaml or .py file, or the arguments themselves"
            )
        if kind == "python":
            _read_python(reading, path)
        else:
            {"shell": _read_shell, "yaml": _read_yaml}[kind](reading, path, _settings(program, arguments))
    _read_arguments(reading, arguments)
    for given in reading.settings:
        try:
            safe_read.check_value(given.value)
        except safe_read.Malformed as error:
            raise UserError(str(error), key=given.key, fix="correct the value") from error
    if not reading.settings:
        example = "trainer.nnodes=2" if program in HYDRA else "--num_generations 8"
        raise UserError(
            f"no setting of {program} is given",
            key=" ".join(words)[:80],
            fix=f"give a file, or settings such as {example}",
        )
    return reading


def _kind(word: str) -> str | None:
    """Returns shell, yaml or python for the name of a file; None for an argument."""
    suffix = Path(word).suffix
    if word.startswith("-") or "=" in word:
        return None
    return "python" if suffix == ".py" else SUFFIXES.get(suffix) or ("shell" if Path(word).is_file() else None)


def _read_shell(reading: GivenSettings, path: Path, later: Sequence[Given]) -> None:
    """Takes the command of the script with most settings of the program; `later` as in `_read_yaml`."""
    script = shell.read(path)
    commands = [command for command in script.commands if _known(reading.program, command)]
    if not commands:
        raise UserError(
            f"has no command with settings of {reading.program}",
            key=path,
            fix="give the arguments of the command themselves",
        )
    command = max(commands, key=lambda each: _known(reading.program, each))
    reading.entry, arguments = _split(command)
    launcher = command[: len(command) - len(arguments)]
    for option, value in pairwise(launcher):
        if option.text in LAUNCHER_PROCESSES and value.text.isdigit():
            reading.processes = int(value.text)
    _read_arguments(reading, arguments, later)
    reading.assumptions += script.variables.assumptions
    if len(commands) > 1:
        number = next(n for n, each in enumerate(commands, 1) if each is command)
        reading.assumptions.append(
            f"{len(commands)} commands of the script have settings of {reading.program}: number {number} has the most"
            f" and is taken; the other {len(commands) - 1} left out"
        )


def _known(program: str, command: Command) -> int:
    """Returns the number of settings of the program in a command, with NeMo-RL's option for its file."""
    table = programs()[program]
    if program in HYDRA:
        names = [found["key"] for word in command if (found := _HYDRA.fullmatch(word.text))]
    else:
        names = [_option(program, word.text.partition("=")[0]) for word in command if word.text.startswith("--")]
    files = [word for word in command if program == "NeMo-RL" and word.text.partition("=")[0] == CONFIG_OPTION]
    return sum(lookup.find(table, name) is not None for name in names) + len(files)


def _split(command: Command) -> tuple[str, Command]:
    """Returns the module or script that a command starts, and the arguments behind its name."""
    start, entry = 0, ""
    for n, word in enumerate(command):
        if word.text == "-m" and n + 1 < len(command) and "=" not in command[n + 1].text:
            start, entry = n + 2, command[n + 1].text
        elif word.text.endswith(".py") and not word.text.startswith("-") and "=" not in word.text:
            start, entry = n + 1, word.text
        elif word.text == "grpo" and n and command[n - 1].text.endswith("trl"):
            start, entry = n + 1, "trl grpo"
    return entry, command[start:]


def _read_arguments(reading: GivenSettings, arguments: Sequence[Argument], later: Sequence[Given] = ()) -> None:
    """Adds the settings of a command line; for NeMo-RL, after those of the file that the first `--config` names. A file
    that is not here becomes an unresolved setting. Keys on the command line are no longer `inherited`. `later` as in
    `_read_yaml`."""
    arguments = [*arguments]
    for n, argument in enumerate(arguments):
        option, assigned, name = argument.text.partition("=")
        if reading.program != "NeMo-RL" or option != CONFIG_OPTION or not (assigned or n + 1 < len(arguments)):
            continue
        used = arguments[n : n + (1 if assigned else 2)]
        del arguments[n : n + len(used)]
        path = Path(name if assigned else used[-1].text)
        if path.is_file() and not used[-1].unresolved:
            _read_yaml(reading, path, [*_settings(reading.program, arguments), *later])
        else:
            advice = "the file is not here: give it in front of the other settings, or start in the folder of NeMo-RL"
            reading.settings.append(Given(CONFIG_OPTION, str(path), used[-1].unresolved or advice))
        break
    given = _settings(reading.program, arguments)
    reading.settings += given
    reading.inherited -= {each.key for each in given}


def _settings(program: str, arguments: Sequence[Argument]) -> list[Given]:
    return [*(_hydra(arguments) if program in HYDRA else _options(program, arguments))]


def _hydra(arguments: Iterable[Argument]) -> Iterator[Given]:
    """Yields the settings of `key=value` arguments; other words are kept with their text, for the account."""
    for argument in arguments:
        found = _HYDRA.fullmatch(argument.text)
        if found is None:
            name, _, value = argument.text.partition("=")
            reason = "deletes a key in Hydra" if name.startswith("~") else "is no key=value"
            if name in FILE_OPTIONS:
                reason = (
                    "Hydra's choice of a settings file, which is not read; nothing is missing if the file is the "
                    "program's own, else migrate what the command prints with --cfg job, saved as a file"
                )
            yield Given(name, value, argument.unresolved or reason)
        else:
            yield Given(found["key"], parsed(found["value"]), argument.unresolved)


def _options(program: str, arguments: Sequence[Argument]) -> Iterator[Given]:
    """Yields the settings of `--option value …`; an option without a value is true."""
    at = 0
    while at < len(arguments):
        word = arguments[at]
        at += 1
        name, assigned, value = word.text.partition("=")
        values = [Argument(value, word.unresolved)] if assigned else []
        while not assigned and at < len(arguments) and not _is_option(arguments[at].text):
            values.append(arguments[at])
            at += 1
        if not word.text.startswith("--"):
            yield Given(word.text, " ".join(v.text for v in values), word.unresolved or "is no --option")
            continue
        texts = [parsed(each.text.removesuffix(",")) for each in values]
        unresolved = next((each.unresolved for each in values if each.unresolved), "")
        yield Given(_option(program, name), True if not texts else texts[0] if len(texts) == 1 else texts, unresolved)


def _is_option(text: str) -> bool:
    return text.startswith("-") and not _NEGATIVE.match(text)


def _option(program: str, name: str) -> str:
    """Returns the table's spelling of an option: slime's with dashes, TRL's as the field of its configuration."""
    return name if program == "slime" else name.removeprefix("--").replace("-", "_")


def parsed(text: str) -> Any:
    """Returns the value of a text as parsed by Hydra: numbers such as 1e-6, true, null, lists, mappings, text without
    its quotes; otherwise, as for a broken list, the text."""
    stripped = text.strip()
    if _NUMBER.fullmatch(stripped):
        number = stripped.replace("_", "")
        return int(number) if re.fullmatch(r"[-+]?\d{1,1000}", number) else float(number)
    try:
        value = yaml.safe_load(stripped) if stripped[:1] in ("[", "{", "'", '"') else stripped
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    if isinstance(value, str):
        return {"true": True, "false": False, "null": None}.get(value.casefold(), value)
    return value


def _read_yaml(reading: GivenSettings, path: Path, later: Sequence[Given]) -> None:
    """Adds every key of a YAML file. For NeMo-RL, reads the files it inherits from; sets `file_name` and `inherited`.

    `${…}` is replaced where the file and `later`, the settings of the command line, decide the value. `later` is only
    used for this: the caller adds these settings.
    """
    before = len(reading.settings)
    try:
        inherits = reading.program == "NeMo-RL"
        content = inheritance.read_with_parents(path, _content, reading) if inherits else _content(path)
        tree = OmegaConf.create({str(key): value for key, value in content.items()})
        plain = OmegaConf.to_container(tree, resolve=False)
        for given in later if reading.program in HYDRA else ():
            if not given.unresolved and _DOTTED.fullmatch(given.key):
                with suppress(OmegaConfBaseException):  # the argument's own row says what is wrong
                    OmegaConf.update(tree, given.key, given.value, merge=False)
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError, ValueError, KeyError) as error:
        raise UserError(f"is not YAML ({str(error).splitlines()[0]})", key=path) from error
    assert isinstance(plain, dict)
    for name, value in plain.items():
        for key, inner in _leaves(reading.program, str(name), value):
            spelled = f"--{key.replace('_', '-').removeprefix('--')}" if reading.program == "slime" else key
            reading.settings.append(_resolved(spelled, key, inner, tree))
    if not inherits:
        return
    reading.file_name = _UNNAMED.sub("-", path.stem).strip("-")
    own = {key for name, value in _content(path).items() for key, _ in _leaves(reading.program, name, value)}
    reading.inherited |= {given.key for given in reading.settings[before:]} - own


def _content(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file."""
    content = yaml.safe_load(shell.script_text(path))
    if not isinstance(content, dict):
        raise UserError("holds no mapping of settings", key=path, fix="give a file such as `trainer: {nnodes: 2}`")
    _check_size(content, path)
    return content


def _check_size(content: Any, path: Path) -> None:
    """Raises UserError if a file has too many values, counted again at every use of an anchor."""
    pending, count = [content], 0
    while pending:
        value = pending.pop()
        count += 1
        if count > MOST_VALUES:
            raise UserError(f"has more than {MOST_VALUES} values", key=path, fix="give a file without endless anchors")
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value


def _leaves(program: str, key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys and values of a group, down to keys that take a mapping."""
    table = programs()[program]
    entry = table.get(key)
    if isinstance(value, dict) and value and entry is None:
        for name, inner in value.items():
            yield from _leaves(program, f"{key}.{name}", inner)
    else:
        yield key, value


def _resolved(name: str, key: str, value: Any, tree: Any) -> Given:
    """Returns a setting with `${other.key}` replaced; values of the environment stay as `${oc.env:NAME}`.

    A reference that leads to the environment stays unresolved: a secret must not get into the written file.
    """
    if isinstance(value, str) and "${" in _ENVIRONMENT.sub("", value):
        with _without_environment() as asked:
            try:
                selected = OmegaConf.select(tree, key, throw_on_resolution_failure=True)
                plain = OmegaConf.to_container(selected, resolve=True) if OmegaConf.is_config(selected) else selected
                return Given(name, plain)
            except (OmegaConfBaseException, RecursionError):
                where = f"{asked[0]} of the environment" if asked else "settings outside of this file"
                return Given(name, value, f"{value} names {where}")
    return Given(name, parsed(value) if isinstance(value, str) else value)


@contextmanager
def _without_environment() -> Iterator[list[str]]:
    """Makes `oc.env` fail and NeMo-RL's functions (`ARITHMETIC`) work inside the block; yields a list that receives the
    names of the variables asked for."""
    asked = list[str]()

    def refuse(variable: str, default: Any = None) -> Any:
        asked.append(str(variable))
        raise LookupError(f"{variable} is read when the run starts")

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    new = [name for name in ARITHMETIC if not OmegaConf.has_resolver(name)]
    for name in new:
        OmegaConf.register_new_resolver(name, ARITHMETIC[name])
    try:
        yield asked
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        for name in new:
            OmegaConf.clear_resolver(name)


def _read_python(reading: GivenSettings, path: Path) -> None:
    if reading.program != "TRL":
        raise UserError(
            f"{reading.program} takes its settings from the command line",
            key=path,
            fix="give the shell script with this command line, or the arguments themselves",
        )
    settings, command = python_script.read(path)
    reading.settings += settings
    if command:  # the usual place of an example's command line
        script = shell.Script(Variables())
        script.read(command)
        known = max(script.commands, key=lambda each: _known(reading.program, each), default=[])
        if _known(reading.program, known):
            reading.settings += _settings(reading.program, _split(known)[1])
            reading.assumptions.append("the options are from the command in the script's docstring")
