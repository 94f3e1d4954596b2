"""`python -m skyrl_mega.config > docs/configuration.md`: the manual of every setting, from the schema's docstrings."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

from skyrl_mega.config.command import DONE, guarded
from skyrl_mega.config.keys import Key, keys
from skyrl_mega.config.other_programs import lookup

OPENING = """\
# Configuration

Made from `skyrl_mega/config/schema/` by `python -m skyrl_mega.config > docs/configuration.md`; edit there.

A run is one YAML file and, after it on the command line, settings over the file's:

    python -m skyrl_mega.launch --config configs/quickstart.yaml run.seed=1 policy.layout.expert=4 policy.ranks=4

- A file holds the groups below: `policy: {layout: {tensor: 2}}` is `policy.layout.tensor=2`.
- `defaults:` names files of groups beside it. `defaults: [algorithm: dapo, _self_]` reads `algorithm/dapo.yaml` first,
  then what the file says itself; `algorithm=grpo` on the command line reads the other one instead.
- `${run.name}` stands for another setting's value.
- Lists are written `data.train=[a.parquet,b.parquet]`; text with `=` or other signs is quoted: `'run.directory="a=b"'`.
- The second table of a group has what SkyRL, verl, slime and TRL call a setting; [migration.md](migration.md) has all
  of their keys.
- An unknown key, a wrong type or an impossible value ends in one line and exit code 2, before any process starts.
- `--dry-run` checks everything and prints what follows, with `--settings` the settings too ([dry-run.md](dry-run.md));
  `config.yaml` in the run's folder has the same settings and can be given to `--config` again. A run replaces the one
  that a run wrote, and refuses to replace one that a person wrote or edited.
- A secret stands in the environment: text that is taken from there, `${oc.env:WANDB_API_KEY}`, is written like this
  wherever settings are written (`config.yaml`, the dry run, `report.html`) and in errors. One that stands in the
  settings themselves is written as `***`, and refused when such a file is given again: give that setting again. Secrets
  are known by the words of their key (`apiKey`, `X-API-Key`, `tokens`, all below `auth:` or `headers:`), by the forms
  of providers' tokens, and in addresses, connection strings, `--token X` and `api_key=X`; `max_tokens` and `eos_token`
  are none.
"""


def manual() -> str:
    """The whole text of docs/configuration.md."""
    lines = [OPENING.rstrip()]
    for group in (key for key in keys().values() if key.group):
        held = [key for key in keys().values() if key.name.rpartition(".")[0] == group.name and not key.group]
        lines += ["", f"## `{group.name}`", "", _about(group)]
        if held:
            lines += ["", "| key | default | allowed | meaning |", "|---|---|---|---|", *map(_row, held)]
            lines += _elsewhere(held)
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    cells = (f"`{key.name.rpartition('.')[2]}`", _default(key.default), key.allowed, key.doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _elsewhere(held: list[Key]) -> list[str]:
    """What other programs call the settings of a group."""
    rows = [(key, lookup.names(key.name)) for key in held]
    cells = [
        (key.name.rpartition(".")[2], *(names.get(program, "") for program in lookup.PROGRAMS))
        for key, names in rows
        if names
    ]
    head = ["", f"| key | {' | '.join(lookup.PROGRAMS)} |", "|---|" + "---|" * len(lookup.PROGRAMS)]
    return [*head, *("| " + " | ".join(f"`{c}`" if c else "" for c in row) + " |" for row in cells)] if cells else []


def _about(key: Key) -> str:
    """What a group is: its dataclass's docstring, and the field's own where that says more."""
    general = " ".join((inspect.getdoc(key.type) or "").split())
    own = f" {key.doc}" if key.nullable and key.doc != general else ""
    return textwrap.fill(f"{general}{own}", 120, break_long_words=False, break_on_hyphens=False)


def _default(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if value != "" else "(empty)"


def main() -> int:
    """Prints the manual; the exit code."""
    print(manual(), end="")
    return DONE


if __name__ == "__main__":
    sys.exit(guarded(main))
