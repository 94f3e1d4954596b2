"""The schema as a flat list of keys, used by composition, checks and the manual."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from typing import Any, Union, get_args, get_origin, get_type_hints

from skyrl_mega.common.values import Rule
from skyrl_mega.config.schema import Config

COMMON = ("enabled", "enable", "name", "type", "mode")
"""Last words of keys common to many groups."""
TYPES = (int, float, bool, str, list, dict)


@dataclass(frozen=True)
class Key:
    """A setting, or a group of settings (then `type` is a dataclass)."""

    name: str
    """Dotted name from the root."""
    type: Any
    """Type without None: int, float, bool, str, list, dict or a dataclass."""
    nullable: bool
    """True if null is allowed."""
    default: Any
    metadata: dict[str, Any]
    """`allowed`, `low`, `high`, `empty`, `examples` (example text → meaning) from the schema."""
    doc: str

    @cached_property
    def group(self) -> bool:
        """True if the key is a group of keys; False for a single setting."""
        return is_dataclass(self.type)

    @cached_property
    def rule(self) -> Rule:
        """Rule for the value: type, range and allowed words; for a group, only nullability matters."""
        metadata = self.metadata
        return Rule(
            self.type if self.type in TYPES else dict,
            self.nullable,
            metadata.get("low"),
            metadata.get("high"),
            choices=metadata.get("allowed", ()),
            empty=metadata.get("empty", True),
            mappings=metadata.get("mappings", False),
        )

    @property
    def allowed(self) -> str:
        """Description of the valid values for the user, such as `a whole number from 1 to 100000 or null`."""
        if not self.group:
            return self.rule.words
        names = [field.name for field in fields(self.type)]
        words = f"a group of {', '.join(names)}, each given by its name, as {self.name}.{names[0]}"
        return words + (" or null" if self.nullable else "")

    def refusal(self, value: Any) -> str:
        """Returns the part of an error message after a rejected value: the valid values, and examples if there are any.

        Args:
            value: The rejected value.
        """
        return self.rule.refusal(value) + self._examples

    @property
    def _examples(self) -> str:
        examples = self.metadata.get("examples", {})
        return ": " + ", ".join(f"{text} {meaning}" for text, meaning in examples.items()) if examples else ""

    def allows(self, value: Any) -> bool:
        """Returns True if `value` has the key's type and range; relations to other settings are not checked."""
        return self.rule.allows(value)


@cache
def keys() -> dict[str, Key]:
    """Returns every key of `Config` by dotted name, in schema order; groups come before their members."""
    return {key.name: key for key in _walk(Config, "")}


def nearest(name: str) -> str | None:
    """Returns the key that `name` most likely means: one with the same last word, or a similar spelling.

    A generic last word (`COMMON`) matches only below the same top-level group, if that group exists. Returns None
    without a match.
    """
    names = list(keys())
    last = name.rpartition(".")[2]
    same = [key for key in names if key.rpartition(".")[2] == last]
    if last in COMMON:
        group = name.partition(".")[0] + "."
        same = [key for key in same if key.startswith(group)]
        if not same and group in (f"{key}." for key in names):
            return None
    near = get_close_matches(name, same or names, n=1, cutoff=0.3 if same else 0.6)
    return near[0] if near else None


def names_in(group: str) -> list[str]:
    """Returns the last parts of all keys directly in a group, in schema order; "" is the root; [] for a single setting
    or an unknown group."""
    return [name.rpartition(".")[2] for name in keys() if name.rpartition(".")[0] == group]


def docstrings(cls: type) -> dict[str, str]:
    """Returns field name → the docstring under the field, as a single line, from the source of a dataclass. Raises
    OSError if the source is not available.

    Fields without a docstring, and inherited fields, are left out.
    """
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
            docs[field.target.id] = " ".join(ast.literal_eval(doc.value).split())
    return docs


def _walk(cls: type, prefix: str, group_default: Any = None) -> Iterator[Key]:
    """Yields the keys of a group; `group_default` is the default instance of this group in the group above."""
    hints, docs = get_type_hints(cls), docstrings(cls)
    for field in fields(cls):
        field_type, nullable = _without_none(hints[field.name])
        field_default = field.default_factory() if field.default_factory is not MISSING else field.default
        default = getattr(group_default, field.name, field_default)
        doc = docs.get(field.name) or (inspect.getdoc(field_type) or "" if is_dataclass(field_type) else "")
        yield Key(prefix + field.name, field_type, nullable, default, dict(field.metadata), doc)
        if isinstance(field_type, type) and is_dataclass(field_type):
            yield from _walk(field_type, f"{prefix}{field.name}.", default)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Returns (X, True) for `Optional[X]`, else (X, False), with generic lists and mappings as plain types."""
    if get_origin(hint) in (Union, types.UnionType):
        [hint] = [part for part in get_args(hint) if part is not type(None)]
        return get_origin(hint) or hint, True
    return get_origin(hint) or hint, False
