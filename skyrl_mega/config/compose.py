"""Composition of a `Config` from a YAML file and `key=value` arguments.

Hydra composes the file and the groups named under `defaults` (`defaults: [algorithm: dapo]` reads `algorithm/dapo.yaml`
next to the file). OmegaConf converts every value to the type declared in the schema.
"""

from __future__ import annotations

import re
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose as hydra_compose
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl_mega.common import safe_read, secrets
from skyrl_mega.common.errors import UserError, UserErrors
from skyrl_mega.common.secret_names import MASK, is_secret
from skyrl_mega.common.values import shown
from skyrl_mega.config import verbatim
from skyrl_mega.config.command import enter
from skyrl_mega.config.keys import keys, names_in, nearest
from skyrl_mega.config.other_programs import lookup
from skyrl_mega.config.schema import Config
from skyrl_mega.config.setting_hints import HINTS

GROUP = re.compile(r"\w+(/\w+)*")
"""Name of a folder with the files of a group."""
LARGEST = 2**20
"""Maximum bytes of a configuration file."""
LONGEST = 200
"""Maximum characters of an argument in an error message."""
HEADER = 2048
"""Bytes at the start of a file that may hold Hydra's directives, `# @package …`."""
DEEPEST = 50
"""Maximum nesting depth of a configuration."""

GROUPS = Path(__file__).parents[2] / "configs"
"""Folder of the groups included in the project; a group next to the configuration file takes precedence."""


def compose(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Returns the settings of a YAML file, with `group.key=value` overrides (Hydra's syntax; later overrides win).

    `group=name` selects another file of a group: `algorithm=grpo` reads `algorithm/grpo.yaml`. Without a file (None)
    the overrides apply to the defaults. Types are checked, but neither ranges, allowed words nor relations
    (`checks.check`). Secrets in the settings are remembered for masking (`common.secrets`), in place of an earlier
    call's.

    Raises:
        UserError: A missing or broken file, an unknown key, a value of the wrong type, or a masked secret.
    """
    parsed = [_parse(text) for text in overrides]
    chosen: list[Override] = []
    given: list[tuple[str, Any]] = []
    if path is not None:
        path = _file(Path(path))
        folders = (path.parent, GROUPS)
        candidates = [o for o in parsed if GROUP.fullmatch(o.key_or_group)]
        groups = [o for o in candidates if any((folder / o.key_or_group).is_dir() for folder in folders)]
        chosen = [override for override in groups if not isinstance(override.value(), dict)]
        given += _leaves(_files(path, chosen), "")
    for override in parsed:
        if override not in chosen:
            given += _leaves(override.value(), override.key_or_group)
    secrets.note_literal(given)
    if unknown := [line for key, value in given for line in _unknown_key_errors(key, value)]:
        raise UserErrors(unknown)
    config = deepcopy(_defaults())
    for key, value in given:
        _assign(config, key, value)
    unresolved = OmegaConf.to_container(config, resolve=False)
    if masked := secrets.still_masked(unresolved):
        raise UserError(
            "a secret that was masked when these settings were written",
            key=masked[0],
            value=masked[1],
            fix=f"give it again, best from the environment: '{masked[0]}=${{oc.env:NAME}}'",
        )
    secrets.note(unresolved)
    try:
        composed = cast(Config, OmegaConf.to_object(config))
    except RecursionError as error:
        raise UserError("settings refer to one another by ${…} in a circle", fix="give one of them a value") from error
    except OmegaConfBaseException as error:  # interpolations are resolved only here
        key = error.full_key or "?"
        allowed = f"allowed is {keys()[key].allowed}" if key in keys() else "name an existing key"
        raise UserError(secrets.hidden(_first_line(error), short=True), key=key, fix=allowed) from error
    secrets.note_resolved(unresolved, asdict(composed))
    return composed


def compose_run(args: Namespace) -> Config:
    """Returns the settings of a command with the arguments of `Parser.add_run`, composed as by `compose`. Changes the
    working directory of this process to `--directory`, if given; `--config` is relative to the directory before.

    Raises:
        UserError: The folder cannot be entered, or the settings cannot be composed.
    """
    file = Path(args.config).absolute() if args.directory else args.config
    if args.directory:
        enter(args.directory)
    return compose(file, args.overrides)


@cache
def _defaults() -> DictConfig:
    """Returns the default settings; a copy costs a seventh of reading the schema again."""
    return cast(DictConfig, OmegaConf.structured(Config))


def dump(config: Config) -> str:
    """Returns the settings as YAML for `compose`, with secrets masked."""
    return OmegaConf.to_yaml(OmegaConf.create(secrets.masked(asdict(config))))


def _file(path: Path) -> Path:
    """Returns the path of an existing configuration file; raises UserError otherwise."""
    if path.suffix != ".yaml":
        raise UserError("allowed is a file that ends in .yaml", key="--config", value=path)
    try:
        exists = path.is_file()
    except (OSError, ValueError) as error:
        raise UserError(
            safe_read.error_reason(error), key="--config", value=str(path)[:80], fix="give the path of a .yaml file"
        ) from error
    if not exists:
        near = sorted(file.name for file in path.parent.glob("*.yaml"))
        hint = f"{path.parent} has {', '.join(near)}" if near else f"{path.parent} has no .yaml file"
        raise UserError("no such file", key="--config", value=path, fix=hint)
    return path


def _parse(text: str) -> Override:
    """Returns a `key=value` argument in Hydra's grammar; `+key=value` is treated as `key=value`."""
    try:
        override = verbatim.parse_override(text)
        override.value()
    except (HydraException, OmegaConfBaseException, RecursionError, ValueError) as error:
        key, sign, value = text.partition("=")
        if is_secret(key.lstrip("+~"), value):
            text = f"{key}{sign}{MASK}"
        raise UserError(
            "not of the form group.key=value, without spaces; quote a value with = or other signs: "
            "'run.directory=\"a=b\"'",
            key=text[:LONGEST],
        ) from error
    if not override.key_or_group:
        raise UserError("no setting is named; allowed is group.key=value", key=text)
    name = override.key_or_group
    known = keys().get(name)
    if override.type == OverrideType.DEL:
        unset = f"give {name}=null" if known and known.nullable else "leave it out to get the default"
        raise UserError("a setting cannot be taken away", key=text, fix=unset)
    if override.is_sweep_override():
        instead = f"; a list is written {text.replace('=', '=[', 1)}]" if known and known.type is list else ""
        raise UserError(f"one value is allowed{instead}", key=text)
    return override


def _files(path: Path, chosen: list[Override]) -> dict[str, Any]:
    """Returns the file with all groups as a single tree, with values as written."""
    listed, needs_hydra = _groups_in_defaults(path)
    for group in {*listed, *(o.key_or_group for o in chosen)}:
        for folder in (path.parent, GROUPS):
            for file in sorted((folder / group).glob("*.yaml")):  # Hydra itself reads files without a size limit
                safe_read.read(file, "give a .yaml file that you may read", most=LARGEST)
    groups = [f"{'' if o.key_or_group in listed else '+'}{o.key_or_group}={o.value()}" for o in chosen]
    try:
        with warnings.catch_warnings(), verbatim.hydra_config_from(path.parent, *([GROUPS] if GROUPS.is_dir() else [])):
            warnings.simplefilter("ignore", UserWarning)  # warnings about `_self_` would hide the actual error
            # Hydra takes several times as long, most of it for settings of its own.
            tree = hydra_compose(path.stem, groups) if chosen or needs_hydra else verbatim.load(path)
    except RecursionError as error:
        raise UserError("its `defaults` go in a circle, or it nests too deep", key="--config", value=path) from error
    except yaml.YAMLError as error:
        raise _invalid_yaml(path, error) from error
    except MissingConfigException as error:
        missing = error.missing_cfg_file or "?"
        group = missing.rpartition("/")[0]
        available = sorted({file.stem for folder in (path.parent, GROUPS) for file in (folder / group).glob("*.yaml")})
        allowed = f"allowed is {', '.join(available)}" if available else f"there is no {group or 'file'} of that name"
        searched = f"{path.parent}, nor among those that come with skyrl_mega ({GROUPS})"
        raise UserError(f"{missing} is not in {searched}", key=path, fix=allowed) from error
    except (HydraException, OmegaConfBaseException, OSError, ValueError, TypeError, AssertionError) as error:
        # Hydra raises many types, assertions included, for invalid file contents.
        raise UserError(
            _first_line(error) or type(error).__name__, key=path, fix="see `defaults` in docs/configuration.md"
        ) from error
    return cast(dict[str, Any], OmegaConf.to_container(tree, resolve=False))


def _groups_in_defaults(path: Path) -> tuple[set[str], bool]:
    """Returns the groups named in a file's `defaults`, and True if only Hydra can read the file, after checking the
    whole file.

    Raises:
        UserError: The file is not YAML, not a mapping, or nested too deep.
    """
    try:
        text = safe_read.read(path, "give a .yaml file that you may read", most=LARGEST)
        content = yaml.safe_load(text)
        content = {} if content is None else content
        safe_read.check_value(content, deepest=DEEPEST, numbers=False)
    except RecursionError as error:
        raise UserError(f"it nests deeper than {DEEPEST} levels", key="--config", value=path) from error
    except safe_read.Malformed as error:
        raise UserError(error, key="--config", value=path) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or an impossible date
        raise _invalid_yaml(path, error) from error
    if not isinstance(content, dict):
        raise UserError(
            f"it holds a {type(content).__name__}; allowed is a mapping of groups to settings",
            key="--config",
            value=path,
        )
    defaults = content.get("defaults") or []
    if invalid := [*filter(_is_no_default, defaults)] if isinstance(defaults, list) else [defaults]:
        raise UserError(
            f"defaults: {shown(invalid[0])}; allowed is a list such as [algorithm: dapo]",
            key="--config",
            value=path,
            fix="for a file of NeMo-RL, first: python -m skyrl_mega.config migrate nemo FILE --out NEW.yaml",
        )
    needs_hydra = not content.keys().isdisjoint(("defaults", "hydra")) or b"@" in text[:HEADER]
    return {group for entry in defaults if isinstance(entry, dict) for group in entry}, needs_hydra


def _is_no_default(entry: Any) -> bool:
    """Returns True unless an entry of `defaults` is a text, or a mapping of groups."""
    return not isinstance(entry, str) and not (isinstance(entry, dict) and all(isinstance(name, str) for name in entry))


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yields dotted key and value of every given setting, with groups expanded; `{}` creates an optional group."""
    is_group = not key or (key in keys() and keys()[key].group)
    if isinstance(value, dict) and is_group:
        if key and keys()[key].nullable:
            yield key, {}  # creates a group that is absent by default
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, verbatim.restore_text(value, keys()[key].rule if key in keys() else None)


def _assign(config: DictConfig, key: str, value: Any) -> None:
    """Sets a key to the value, converted to the key's type."""
    known = keys()
    mapping = _free_form_setting(key)
    for name in _prefixes(key) if value == {} else _prefixes(key)[:-1]:
        if name in known and known[name].group and OmegaConf.select(config, name) is None:
            OmegaConf.update(config, name, OmegaConf.structured(known[name].type), merge=False)
    if key in known and known[key].group and value == {}:
        return
    if key in known and isinstance(value, bool):
        value = known[key].metadata.get("former", {}).get(value, value)
    if key in known and known[key].type is list and not known[key].rule.numbers and isinstance(value, list):
        for entry in value:
            kind, word = (dict, "mapping") if known[key].rule.mappings else (str, "text")
            if not isinstance(entry, kind):
                raise UserError(
                    f"{_shown_masked(entry, key)} is no {word}; allowed is {known[key].allowed}",
                    key=key,
                    value=_shown_masked(value, key),
                )
    number = isinstance(value, int | float)  # OmegaConf would convert any number to text or to true
    if key in known and number and (known[key].type is str or (known[key].type is bool and value not in (0, 1))):
        raise UserError(known[key].refusal(value), key=key, value=_shown_masked(value, key))
    try:
        OmegaConf.update(config, key, value, merge=False, force_add=mapping is not None)
    except OmegaConfBaseException as error:
        setting = known[mapping or key]
        allowed = f"allowed is {setting.allowed}" if setting.group else setting.refusal(value)
        raise UserError(allowed, key=key, value=_shown_masked(value, key)) from error


def _shown_masked(value: Any, key: str) -> str:
    return shown(secrets.masked(value, key))


def _free_form_setting(key: str) -> str | None:
    """Returns the free-form setting (a mapping) equal to or containing the key; None if there is none."""
    return next((name for name in _prefixes(key) if name in keys() and keys()[name].type is dict), None)


def _unknown_key_errors(key: str, value: Any) -> Iterator[str]:
    """Yields error lines for an unknown key: a line, or a line for each key of a group; nothing for a known key."""
    if key in keys() or _free_form_setting(key):
        return
    for name, inner in lookup.leaves(key, value):
        yield lookup.answer(name, inner) or _unknown_key_error(name, inner)


def _unknown_key_error(key: str, value: Any) -> str:
    if key in HINTS:
        return f"{key} = {_shown_masked(value, key)} is not known here; {HINTS[key]}"
    near = nearest(key)
    group = next((name for name in reversed(_prefixes(key)) if name in keys()), "")
    if group and not keys()[group].group:
        return f"{key} = {_shown_masked(value, key)}: {group} is {keys()[group].allowed} and holds no other keys"
    members = ", ".join(names_in(group))
    hint = f"did you mean {near}? " if near else ""
    other = f"; {lookup.PAGE} has keys of other programs" if lookup.foreign(key) and not group else ""
    return (
        f"{key} = {_shown_masked(value, key)} is not known here; {hint}allowed in {group or 'a configuration'}: "
        f"{members}{other}"
    )


def _prefixes(key: str) -> list[str]:
    """Returns the prefixes of a dotted key: a.b.c → a, a.b, a.b.c."""
    parts = key.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _invalid_yaml(path: Path, error: Exception) -> UserError:
    mark = getattr(error, "problem_mark", None)
    where = f" line {mark.line + 1} column {mark.column + 1}" if mark else ""
    return UserError(
        getattr(error, "problem", None) or _first_line(error), key="--config", value=f"{path}:{where} is not YAML"
    )
