"""`python -m skyrl_mega.config > docs/configuration.md`: manual of every setting, generated from the schema's
docstrings.

`python -m skyrl_mega.config migrate verl|skyrl|slime|trl|nemo FILE_OR_ARGUMENTS`: another program's run as our YAML.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import DONE, guarded
from skyrl_mega.config.keys import Key, keys
from skyrl_mega.config.other_programs import lookup
from skyrl_mega.config.other_programs.table import programs

OPENING = """\
# Configuration

Generated from `skyrl_mega/config/schema/` by `python -m skyrl_mega.config > docs/configuration.md`; edit the schema.

A run is configured by one YAML file, plus settings on the command line that override the file:

    python -m skyrl_mega.launch --config configs/quickstart.yaml run.seed=1 policy.layout.expert=4 policy.ranks=4

- A file contains the groups below: `policy: {layout: {tensor: 2}}` is `policy.layout.tensor=2`.
- `defaults:` names files of groups, next to the file or else in `configs/` of this project. `[algorithm: dapo, _self_]`
  reads `algorithm/dapo.yaml` first, then the file itself; `algorithm=grpo` on the command line reads
  `algorithm/grpo.yaml` instead.
- `${run.name}` inserts the value of another setting.
- Lists are written `data.train=[a.parquet,b.parquet]`; text with `=` or other signs is quoted: `'run.directory="a=b"'`.
- The second table of a group lists the names of its settings in SkyRL, verl, slime, TRL and NeMo-RL. All keys of these
  programs are in [migration.md](migration.md).
- An unknown key, a wrong type or an impossible value ends the command with one line and exit code 2, before any process
  starts.
- `--dry-run` checks everything and prints the plan, with `--settings` also all settings ([dry-run.md](dry-run.md));
  `config.yaml` in the run's folder contains the same settings and works as `--config`. A run overwrites this file only
  if a run wrote it, not if a person wrote or edited it.
- Take secrets from the environment: a value such as `${oc.env:WANDB_API_KEY}` is written in this form wherever settings
  are written (`config.yaml`, the dry run, `report.html`) and in errors. A secret in the settings themselves is written
  as `***`; if such a file is used again, this setting must be given again. Secrets are recognized by the words of their
  key (`apiKey`, `X-API-Key`, `tokens`, everything below `auth:` or `headers:`), by the token formats of providers, and
  in addresses, connection strings, `--token X` and `api_key=X`; `max_tokens` and `eos_token` are not secrets.
"""


def manual() -> str:
    """Generates the whole text of docs/configuration.md from the schema."""
    lines = [OPENING.rstrip()]
    for group in (key for key in keys().values() if key.group):
        held = [key for key in keys().values() if key.name.rpartition(".")[0] == group.name and not key.group]
        lines += ["", f"## `{group.name}`", "", _description(group)]
        if held:
            lines += ["", "| key | default | allowed | meaning |", "|---|---|---|---|", *map(_row, held)]
            lines += _other_names(held)
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    cells = (f"`{key.name.rpartition('.')[2]}`", _default(key.default), key.allowed, key.doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _other_names(held: list[Key]) -> list[str]:
    """Returns the table of other programs' names for the settings of a group."""
    rows = [(key, lookup.names(key.name)) for key in held]
    cells = [
        (key.name.rpartition(".")[2], *(names.get(program, "") for program in programs()))
        for key, names in rows
        if names
    ]
    head = ["", f"| key | {' | '.join(programs())} |", "|---|" + "---|" * len(programs())]
    return [*head, *("| " + " | ".join(f"`{c}`" if c else "" for c in row) + " |" for row in cells)] if cells else []


def _description(key: Key) -> str:
    """Returns the description of a group: the docstring of its dataclass, plus the field's own docstring if
    different."""
    general = " ".join((inspect.getdoc(key.type) or "").split())
    field_doc = f" {key.doc}" if key.nullable and key.doc != general else ""
    return textwrap.fill(f"{general}{field_doc}", 120, break_long_words=False, break_on_hyphens=False)


def _default(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if value != "" else "(empty)"


def main() -> int:
    """Prints the manual; returns the exit code 0.

    Raises:
        UserError: The command has an argument; `migrate` is not handled here.
    """
    if len(sys.argv) > 1:
        raise UserError(
            "no such command; allowed is migrate, or nothing for the manual", key=sys.argv[1], fix="migrate --help"
        )
    print(manual(), end="")
    return DONE


if __name__ == "__main__":
    if sys.argv[1:2] == ["migrate"]:
        from skyrl_mega.cli import migrate

        sys.exit(migrate.main(sys.argv[2:]))
    sys.exit(guarded(main))
