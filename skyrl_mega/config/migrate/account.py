"""Account of a migration: what happened to every setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("taken", "changed", "dropped", "unknown", "added")
"""taken: the same value under our name. changed: another unit, value or several settings. dropped: no counterpart, or
not needed. unknown: the other program's table lacks the key. added: settings that nothing given asked for."""


@dataclass(frozen=True)
class AccountRow:
    """A setting of the other program, or an added setting of ours."""

    kind: str
    """One of `KINDS`."""
    theirs: str
    """Key of the other program; for an added setting, the origin: `verl's default`, `data set`, `layout`."""
    value: Any = None
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Our settings that follow; empty for a dropped or unknown key."""
    why: str = ""
    look: bool = False
    """True for an unknown key, and for a dropped value that changes training."""


@dataclass
class Migration:
    """Our settings and the account of how they came about."""

    program: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Our settings by dotted key, without our defaults."""
    rows: list[AccountRow] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    open_layout: bool = False
    """True if the other program cut the model by FSDP or ZeRO, so `policy.layout` has to be chosen."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows of each kind, in the order of `KINDS`."""
        counted = Counter(row.kind for row in self.rows)
        return {kind: counted[kind] for kind in KINDS}

    @property
    def without_reward(self) -> bool:
        """True if only the rows of the data could name an environment."""
        prepared = "--env" in str(self.settings.get("data.prepare", ""))
        names = ("environment.default", "environment.reward_function", "environment.classes")
        return not prepared and not any(self.settings.get(key) and key.startswith(names) for key in self.settings)

    def add(self, origin: str, settings: Mapping[str, Any], why: str = "") -> None:
        """Adds settings that nothing given asked for; settings already present stay."""
        new = {key: value for key, value in settings.items() if key not in self.settings}
        self.settings |= new
        if new:
            self.rows.append(AccountRow("added", origin, None, new, why))
