"""Translation of a reading into our settings, with a row for every setting."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from skyrl_mega.common.values import shown
from skyrl_mega.config import verbatim
from skyrl_mega.config.migrate import data_sets, figures, kl
from skyrl_mega.config.migrate.account import AccountRow, Migration
from skyrl_mega.config.migrate.conversions import CONTEXTUAL, CONVERSIONS
from skyrl_mega.config.migrate.convert import Dropped, Settings, fitted
from skyrl_mega.config.migrate.given import Given, GivenSettings
from skyrl_mega.config.migrate.read import CONFIG_OPTION, FILE_OPTIONS
from skyrl_mega.config.migrate.rules import Conversion, conversion, needs_look
from skyrl_mega.config.migrate.state import KEEP, TranslationState, shorter
from skyrl_mega.config.other_programs import lookup
from skyrl_mega.config.other_programs.table import Counterpart, programs

NOT_NEEDED = "nothing here needs it; leave it out"


def translate(reading: GivenSettings) -> Migration:
    """Translates another program's settings; returns our settings, with a row for every given or added setting. The
    result may contradict the rules of `config.checks`, which are not applied here. A setting without a counterpart
    raises no error: its row says so."""
    translator = Translator(reading)
    for contextual in (False, True):
        translator.translate_given(contextual)
        translator.translate_defaults(contextual)
        if not contextual:
            figures.batches(translator)
    translator.add_fixed()
    figures.steps_decide(translator)
    figures.cluster(translator)
    data_sets.choose(translator)
    translator.order_rows()
    translator.migration.to_add += data_sets.to_write(translator)
    return translator.migration


class Translator(TranslationState):
    """Translation of settings by the tables.

    Args:
        reading: The input. Only the last value of a repeated key is translated; earlier values get a row `dropped`.
    """

    def __init__(self, reading: GivenSettings) -> None:
        """Indexes the given settings by key."""
        super().__init__(reading)
        self.table = programs()[reading.program]

    def translate_given(self, contextual: bool) -> None:
        """Translates the given settings into `migration.settings`, and adds a row for each to `migration.rows`.

        A setting without a counterpart raises no error: its row is `unknown` or `dropped`. Settings with the conversion
        `figures` get no row here; `figures.py` and `data_sets.py` translate these settings. Call first with False, then
        with True.

        Args:
            contextual: False for settings with a conversion independent of other settings; True for settings with a
                conversion in `CONTEXTUAL`, which depends on other settings.
        """
        for given in sorted(self.given.values(), key=lambda given: self._order(given.key)):
            entry = lookup.find(self.table, given.key)
            if self._contextual(given.key, given.value, entry) == contextual and (row := self._row(given, entry)):
                self.migration.rows.append(row)

    def translate_defaults(self, contextual: bool) -> None:
        """Translates the other program's defaults of keys not given; a default equal to ours adds no setting.

        Args:
            contextual: False for the defaults with a conversion by itself; True, in a second pass, for conversions that
                depend on other settings (`CONTEXTUAL`).
        """
        for key, value in self.rules.defaults.items():
            entry = lookup.find(self.table, key)
            if key in self.given or entry is None or self._contextual(key, value, entry) != contextual:
                continue
            if self._turned_off(key):
                continue
            origin = f"{self.program}'s default {key}={shown(value)}"
            try:
                ours, why = self._converted(key, value, entry)
            except Dropped as reason:
                if "policy.optimizer.schedule" in entry.here:
                    self.migration.assumptions.append(
                        f"{origin} is left out, so the learning rate stays constant: {reason}"
                    )
                continue
            new: Settings = {name: v for name, v in ours.items() if self._is_news(name, v)}
            self.place(origin, new, given=False)
            if new:
                self.migration.rows.append(AccountRow("added", origin, None, new, why))

    def _is_news(self, key: str, value: Any) -> bool:
        """True if a default of the program changes our settings."""
        settings = self.migration.settings
        if key == KEEP and key in settings:
            return shorter(settings[key], value) != settings[key]
        return key not in settings and self.ours(key) != value

    def add_fixed(self) -> None:
        """Adds our settings for fixed behavior of the other program (`Rules.fixed`), unless already set."""
        fixed = dict(self.rules.fixed)
        if not self.ours("algorithm.kl.coefficient"):
            fixed.pop("algorithm.kl.mean", None)
            fixed.pop("algorithm.kl.unbiased", None)
        if self.ours("algorithm.kl.where") == "reward" or self.ours("algorithm.kl.estimator") not in ("k1", "k3"):
            fixed.pop("algorithm.kl.unbiased", None)
        if not self.ours("policy.optimizer.warmup_steps"):
            fixed.pop("policy.optimizer.warmup_from_zero", None)
        self.migration.add(f"as {self.program} always does", fixed)

    def order_rows(self) -> None:
        """Sorts the rows of the account in place: given settings in their order, then added settings.

        Also updates rows to the final values of settings changed by several keys.
        """
        place = {given.key: n for n, given in enumerate(self.reading.settings)}
        rows = sorted(self.migration.rows, key=lambda row: place.get(row.theirs, len(place)))
        self.migration.rows = [self._final(row) for row in rows]

    def _final(self, row: AccountRow) -> AccountRow:
        """Returns a row with the final value of a setting that several keys change, or a switch leaves to a key."""
        entry = lookup.find(self.table, row.theirs) if row.kind == "changed" and not row.ours else None
        if entry and _text(row.value) in entry.values:
            entry = entry.values[_text(row.value)]
        names = [KEEP] if KEEP in row.ours else [*entry.here] if entry else []
        return replace(row, ours={**row.ours, **{n: self.ours(n) for n in names if n in self.migration.settings}})

    def _row(self, given: Given, entry: Counterpart | None) -> AccountRow | None:
        """Translates a setting, and returns its row of the account; None for a setting with the conversion `figures`,
        which `figures.py` and `data_sets.py` account for."""

        def dropped(why: str, *, look: bool = False) -> AccountRow:
            return AccountRow("dropped", given.key, given.value, why=why, look=look)

        if given.value in (None, {}) and any(key.startswith(f"{given.key}.") for key in self.table):
            return dropped("an empty group")
        if entry is None:
            return AccountRow("unknown", given.key, given.value, why=self._unknown(given), look=True)
        if not entry.here and not entry.values:
            if isinstance(given.value, str) and entry.note.startswith(f"the column is `{given.value}`;"):
                return dropped(f"the column is `{given.value}` here too")
            return dropped(entry.note, look=needs_look(entry.note, given.value))
        rule = conversion(self.program, given.key, entry)
        if rule is not None and rule.name == "figures":
            return None
        if given.unresolved:
            instead = f"give {entry.here[0].partition('=')[0]}" if entry.here else entry.note
            return dropped(f"{given.unresolved}; {instead}", look=True)
        if off := self._turned_off(given.key):
            return dropped(off)
        try:
            ours, why = self._converted(given.key, given.value, entry)
        except Dropped as reason:
            names = [name.partition("=")[0] for name in entry.here]
            decided = bool(names) and all(self.origins.get(name, ("", False))[1] for name in names)
            look = not decided and (reason.look or (not str(reason) and needs_look(entry.note, given.value)))
            return dropped(str(reason) or entry.note or NOT_NEEDED, look=look)
        taken = [*ours.values()] in ([given.value], [[given.value]])
        conflict = self.place(given.key, ours, given=True)
        if ours and not set(ours) - set(conflict):
            return dropped(
                "; ".join(f"{key} is {shown(self.ours(key))}, from {self.origins[key][0]}" for key in conflict)
            )
        held = {key: self.ours(key) for key in ours if key not in conflict}
        kind = "taken" if taken and held == ours else "changed"
        return AccountRow(kind, given.key, given.value, held, why or (entry.note if kind == "changed" else ""))

    def _converted(self, key: str, value: Any, entry: Counterpart) -> tuple[Settings, str]:
        """Returns our settings for a value, and the reason of a change; raises Dropped without a counterpart."""
        if (text := _text(value)) in entry.values:
            rule = conversion(self.program, key, entry, value, by_value=True)
            return self._convert(rule, value, entry.values[text]) if rule else _assigned(entry.values[text])
        if value is False and "true" in entry.values:
            raise Dropped("off there, and off unless given")
        here = [name for name in entry.here if "=" not in name]
        if entry.here and not here:
            rule = conversion(self.program, key, entry)
            if rule is not None:
                return self._convert(rule, value, entry)
            if value in (False, None):
                raise Dropped("off there, and off unless given")
            return _assigned(entry)
        if entry.values and not entry.here:
            raise Dropped("")
        rule = conversion(self.program, key, entry) or Conversion("same")
        ours, why = self._convert(rule, value, entry)
        fixed, _ = _assigned(entry) if len(here) < len(entry.here) else ({}, "")
        return {**ours, **{name: v for name, v in fixed.items() if name not in ours}}, why

    def _convert(self, rule: Conversion, value: Any, entry: Counterpart) -> tuple[Settings, str]:
        here = [name.partition("=")[0] for name in entry.here]
        return CONVERSIONS[rule.name](value, here, rule.argument, self)

    def _turned_off(self, key: str) -> str:
        """Returns why a key has no effect in the other program; empty if the key has an effect. A switch is off for a
        key if its value does not turn the key on. One switch of the whole group that is off is enough; switches that
        name the key itself must all be off."""
        if why := kl.left_out(self, key):
            return why
        above = {name: switch for name, switch in self.rules.switches.items() if name != key and switch.governs(key)}
        states = {name: self.theirs(name) for name in above}
        off = [name for name, value in states.items() if not above[name].turns_on_key(key, _text(value))]
        groups = [name for name in off if above[name].governs_group(key)]
        others = [name for name in above if not above[name].governs_group(key)]
        reasons = groups or (others if set(others) <= set(off) else [])
        if not reasons:
            return ""
        return " and ".join(f"{name}={shown(states[name])}" for name in reasons) + ": it has no effect there"

    def _contextual(self, key: str, value: Any, entry: Counterpart | None) -> bool:
        if entry is None:
            return False
        rule = conversion(self.program, key, entry, value, by_value=True) or conversion(self.program, key, entry)
        return rule is not None and rule.name in CONTEXTUAL

    def _order(self, key: str) -> tuple[bool, bool]:
        """Returns the rank of a key among keys of the same setting: keys of one setting alone come first, then keys
        that the table names first for their setting."""
        entry = lookup.find(self.table, key)
        here = [name.partition("=")[0] for name in entry.here] if entry else []
        return len(here) > 1, all(_first_name(name).get(self.program) != key for name in here)

    def _unknown(self, given: Given) -> str:
        """Returns what is known about an unknown key: the nearest known keys."""
        last = given.key.rpartition(".")[2]
        same = [key for key in self.table if key.rpartition(".")[2] == last and len(last) > 4]
        near = get_close_matches(given.key, same or list(self.table), n=1, cutoff=0.3 if same else 0.75)
        hint = f"the nearest known is {near[0]}" if near else "no known key is near"
        if given.key in (*FILE_OPTIONS, CONFIG_OPTION):
            return given.unresolved
        return f"{given.unresolved}; {hint}" if given.unresolved else hint


_first_name = cache(lookup.names)
"""Our setting → the key that names it first, by program."""


def _assigned(entry: Counterpart) -> tuple[Settings, str]:
    """Returns the settings of an entry with values: `algorithm.loss=ppo`; a setting without a value takes its own."""
    pairs = [_parsed(name) for name in entry.here if "=" in name]
    if not pairs and not entry.here:
        raise Dropped("")
    return {key: fitted(key, v) for key, v in pairs}, entry.note


@cache
def _parsed(assignment: str) -> tuple[str, Any]:
    """Returns key and value of `group.key=value`; Hydra's parser takes milliseconds."""
    override = verbatim.parse_override(assignment)
    return override.key_or_group, override.value()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)
