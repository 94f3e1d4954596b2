"""Account of a migration: the outcome for every setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("taken", "changed", "dropped", "unknown", "added")
"""taken: the same value under our name. changed: another unit, value or several settings. dropped: no counterpart, or
not needed. unknown: the other program's table lacks the key. added: our settings without a given setting behind them,
such as the other program's defaults."""


@dataclass(frozen=True)
class AccountRow:
    """A setting of the other program, or an added setting of ours."""

    kind: str
    """Outcome: an entry of `KINDS`."""
    theirs: str
    """Key of the other program; for an added setting, the origin: `verl's default`, `data set`, `layout`."""
    value: Any = None
    """Given value of `theirs`; None for an added setting."""
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Resulting settings of this project with values; empty for a dropped or unknown key."""
    why: str = ""
    """Reason of the outcome, for the user; may be empty."""
    look: bool = False
    """True for an unknown key, and for a dropped value that changes training."""


@dataclass
class Migration:
    """Result of a migration: settings of this project, and the account of every given or added setting."""

    program: str
    """Name of the other program, as in `other_programs/table.yaml`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of this project by dotted key, without defaults."""
    rows: list[AccountRow] = field(default_factory=list)
    """The account: a row per given or added setting."""
    assumptions: list[str] = field(default_factory=list)
    """Sentences for the user about values assumed because the input does not contain them."""
    to_add: list[str] = field(default_factory=list)
    """Sentences for the user about files to write or to find before the run."""
    inherited: set[str] = field(default_factory=set)
    """Keys whose value comes only from an inherited file: neither the user's file nor the command line gives them."""
    open_layout: bool = False
    """True if the other program sharded the model by FSDP or ZeRO: the caller must choose `policy.layout`."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows of each kind, in the order of `KINDS`."""
        counted = Counter(row.kind for row in self.rows)
        return {kind: counted[kind] for kind in KINDS}

    @property
    def without_reward(self) -> bool:
        """True if the settings, `data.prepare` included, name no environment and no reward function; the rows of the
        data then must."""
        prepared = "--env" in str(self.settings.get("data.prepare", ""))
        names = ("environment.default", "environment.reward_function", "environment.classes")
        return not prepared and not any(self.settings.get(key) and key.startswith(names) for key in self.settings)

    def add(self, origin: str, settings: Mapping[str, Any], why: str = "") -> None:
        """Adds those of `settings` that are absent so far, with a row of kind `added`; present settings stay. Without
        an absent setting, adds no row.

        Args:
            origin: Origin of the settings for the account, such as `data set: GSM8K`.
            settings: Settings of this project by dotted key.
            why: Reason for the account.
        """
        new = {key: value for key, value in settings.items() if key not in self.settings}
        self.settings |= new
        if new:
            self.rows.append(AccountRow("added", origin, None, new, why))
