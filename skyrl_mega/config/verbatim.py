"""Preservation of text settings as typed, in YAML files and in arguments, even if the text looks like a number or a
boolean: `run.name=12e345`, `name: on`, `name: 007`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString, ValueType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import Container, OmegaConf

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import Rule
from skyrl_mega.config.keys import keys

# Hydra reads files only through FileConfigSource; another reader must be a source with its own scheme.
from hydra._internal.core_plugins.file_config_source import FileConfigSource  # isort: skip

_PLAIN = "\0plain "
"""Prefix of a number or boolean from a file until the type of its setting is known."""
_ARGUMENT = re.compile(r"\+{0,2}([\w.]+)=(.*)", re.DOTALL)
_QUOTED = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^']|'')*'""", re.DOTALL)
_ENTRY = re.compile(rf"""\s*({_QUOTED.pattern}|(?:\$\{{[^}}]*\}}|[^,\[\]{{}}"'])+?)\s*(?:,|$)""", re.DOTALL)
"""An entry of a list with the following comma."""


class VerbatimFiles(FileConfigSource):
    """Hydra's source of YAML files, with plain numbers and booleans kept as marked text (`restore_text`)."""

    @staticmethod
    def scheme() -> str:
        """Returns the URL scheme of these files."""
        return "written"

    def load_config(self, config_path: str) -> ConfigResult:
        """Reads a file like Hydra and returns the result, with numbers and booleans replaced by marked text for
        `restore_text`. Raises the errors of Hydra, OmegaConf and yaml."""
        read = super().load_config(config_path)
        read.config = _marked(read.config, Path(self.path, self._normalize_file_name(config_path)))
        return read


def load(path: Path) -> Container:
    """Returns a file without `defaults` as Hydra composes it: as written, with plain values marked for `restore_text`.

    Raises:
        OmegaConfBaseException, OSError, ValueError, yaml.YAMLError: The file cannot be read.
    """
    return _marked(OmegaConf.load(path), path)


def _marked(config: Container, path: Path) -> Container:
    values = OmegaConf.to_container(config, resolve=False)
    if not isinstance(values, dict):
        return config
    reserved = {name: values.pop(name) for name in ("defaults", "hydra") if name in values}
    # BaseLoader keeps every scalar as text.
    marked = _mark_plain(values, yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader))
    return OmegaConf.create(reserved | marked)


def _mark_plain(value: Any, text: Any) -> Any:
    if isinstance(value, dict) and isinstance(text, dict):
        return {name: _mark_plain(inner, text.get(name)) for name, inner in value.items()}
    if isinstance(value, list) and isinstance(text, list):
        return [_mark_plain(*pair) for pair in zip(value, text, strict=True)]
    return _PLAIN + text if isinstance(value, int | float) and isinstance(text, str) else value


def restore_text(value: Any, rule: Rule | None) -> Any:
    """Returns a value of `VerbatimFiles` with all marked text replaced, also in nested values: by the text as written
    if the setting is text, else by YAML's value. Values without a mark stay unchanged.

    Args:
        value: A value of a file, or of an argument (without marks).
        rule: Rule of the setting; None within free-form mappings.
    """
    if isinstance(value, dict):
        return {name: restore_text(inner, None) for name, inner in value.items()}
    if isinstance(value, list):
        return [restore_text(inner, rule if rule and rule.type is list else None) for inner in value]
    if not isinstance(value, str) or not value.startswith(_PLAIN):
        return value
    text = value.removeprefix(_PLAIN)
    return text if rule and _accepts(rule, text) else OmegaConf.create(f"- {text}")[0]


def _accepts(rule: Rule, text: str) -> bool:
    """Returns True if the setting is text or a list of text, and `text` is a valid value or entry."""
    return rule.type in (str, list) and not rule.numbers and (not rule.choices or text in rule.choices)


@contextmanager
def hydra_config_from(*folders: Path) -> Iterator[None]:
    """Makes Hydra compose from the YAML files in `folders` inside the block. If several folders have a file, the first
    of these folders in the order of the arguments wins.

    Numbers and booleans of the composed settings are marked text; `restore_text` turns marked text into the text as
    written, or into YAML's value. After the block, Hydra's global state is restored; only the file source
    `VerbatimFiles` stays registered.
    """
    Plugins.instance().register(VerbatimFiles)
    with initialize_config_dir(str(folders[0].absolute()), version_base="1.3"):
        where = create_config_search_path(f"{VerbatimFiles.scheme()}://{folders[0].absolute()}")
        for folder in folders[1:]:
            where.append("skyrl_mega", f"{VerbatimFiles.scheme()}://{folder}", SearchPathQuery("main", None))
        GlobalHydra.instance().clear()
        Hydra.create_main_hydra2("app", where)
        yield


def parse_override(argument: str) -> Override:
    """Returns a `key=value` argument in Hydra's grammar, with text settings as typed.

    Raises:
        UserError: Quoted text has an escape unknown to YAML.
        HydraException, OmegaConfBaseException, RecursionError, ValueError: The argument is not of this form.
    """
    try:
        return _parse_override(argument)
    except yaml.YAMLError as error:
        raise UserError(
            f"is no quoted text of YAML ({getattr(error, 'problem', None) or 'a control character'})",
            key=argument.partition("=")[0],
            fix="write a backslash twice between double quotes, or use single quotes",
        ) from error


def _parse_override(argument: str) -> Override:
    typed = _ARGUMENT.fullmatch(argument)
    rule = keys()[typed[1]].rule if typed and typed[1] in keys() else None
    value = _verbatim_text(typed[2].strip(), rule) if typed and rule else None
    if typed and value is not None:
        return Override(OverrideType.CHANGE, typed[1], ValueType.ELEMENT, value, input_line=argument)
    override = OverridesParser.create().parse_override(argument)
    return override if override.is_sweep_override() else replace(override, _value=_unquoted(override._value))


def _verbatim_text(typed: str, rule: Rule) -> str | list[str] | None:
    """Returns the text, or list of text, given by an argument; None if Hydra's grammar must decide."""
    if rule.type is str:
        text = _entry(typed)
        return text if typed.casefold() != "null" and _accepts(rule, text) else None
    if rule.type is not list or rule.numbers or typed[:1] != "[" or typed[-1:] != "]":
        return None
    inside, at, entries = typed[1:-1].lstrip(), 0, []
    while at < len(inside):
        entry = _ENTRY.match(inside, at)
        if entry is None or entry[1].casefold() == "null":
            return None
        entries.append(_entry(entry[1]))
        at = entry.end()
    return entries if all(_accepts(rule, entry) for entry in entries) else None


def _entry(typed: str) -> str:
    return _unquote(typed) if _QUOTED.fullmatch(typed) else typed


def _unquoted(value: Any) -> Any:
    """Returns a value of Hydra's grammar with YAML escapes resolved in double-quoted text."""
    if isinstance(value, dict):
        return {_unquoted(name): _unquoted(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_unquoted(inner) for inner in value]
    if isinstance(value, QuotedString):
        return _unquote(value.with_quotes()) if value.quote is Quote.double else value.text
    return value


def _unquote(quoted: str) -> str:
    return str(yaml.safe_load(quoted))
