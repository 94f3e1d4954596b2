"""`python -m skyrl_mega.config migrate`: settings of SkyRL, verl, slime, TRL or NeMo-RL as a file for our launcher."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_mega.cluster.atomic_output import atomic_file, refuse_file
from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.secrets import hidden
from skyrl_mega.config.command import DONE, Parser, guarded, path_of
from skyrl_mega.config.migrate import text
from skyrl_mega.config.migrate.read import read
from skyrl_mega.config.migrate.translate import translate

PROGRAMS = {"verl": "verl", "skyrl": "SkyRL", "slime": "slime", "trl": "TRL", "nemo": "NeMo-RL"}
"""Names on the command line → names of `other_programs/table.yaml`."""
LONGEST_LINE = 4096
"""Maximum bytes of the line with the mark of this command."""
EPILOG = """\
  migrate verl run_dapo.sh --out dapo.yaml                   a script: its variables are replaced, nothing is run
  migrate skyrl run_gsm8k.sh trainer.epochs=2                 a script with further settings
  migrate verl trainer.nnodes=2 actor_rollout_ref.rollout.n=16
  migrate slime run-qwen3-30B-A3B.sh --json
  migrate trl train_grpo.py --num_processes 4                 a Python script is read, never imported
  migrate trl --learning_rate 1e-6 --num_generations 8
  migrate nemo examples/configs/grpo_math_8B_megatron.yaml cluster.num_nodes=4
"""


def parser() -> Parser:
    """Returns the argument parser for the options of `migrate` itself; all other arguments are the input."""
    p = Parser(
        prog="python -m skyrl_mega.config migrate",
        description="Writes the settings of another program's run as our YAML, and what happened to each setting.",
        usage="%(prog)s verl|skyrl|slime|trl|nemo FILE_OR_ARGUMENTS… [--out FILE] [--json] [--plain]",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--out", type=path_of, help="file for our YAML; without it, YAML goes to standard output")
    p.add_argument("--json", action="store_true", help="print settings and account as JSON")
    p.add_argument("--plain", action="store_true", help="neither choose a layout nor check the result by a dry run")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `python -m skyrl_mega.config migrate`.

    Args:
        arguments: The command line after `migrate`; None takes `sys.argv`.

    Returns:
        The exit code: 0 if the settings were translated, even if their dry run is refused; 2 for invalid input; 1 after
        a disk fault.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(lambda: _run(words), "--json" in words)


def _run(words: list[str]) -> int:
    options, rest = _split(words)
    args = parser().parse_args(options)
    if not rest or rest[0] not in PROGRAMS:
        raise UserError(
            f"{'no such program' if rest else 'the name of a program is missing'}; allowed is {', '.join(PROGRAMS)}",
            key="migrate",
            value=rest[0] if rest else "",
            fix="such as: python -m skyrl_mega.config migrate verl run_dapo.sh --out dapo.yaml",
        )
    if args.out:
        _check_output(args.out, Path(rest[1]) if rest[1:] else None)
    migration = translate(read(PROGRAMS[rest[0]], rest[1:]))
    verdict = ""
    if not args.plain:
        from skyrl_mega.cli import migrate_check  # slow to import

        verdict = migrate_check.complete(migration)
    source = (
        f"{migration.program}: {Path(rest[1]).name}" if Path(rest[1]).is_file() else f"{migration.program}'s settings"
    )
    written = text.as_yaml(migration, source)
    if args.out:
        _write(args.out, written)
    if args.json:
        print(json.dumps({**text.as_values(migration), "yaml": written, "dry_run": verdict}))
        return DONE
    account = sys.stdout if args.out else sys.stderr
    print(hidden(text.as_text(migration)), file=account)
    if verdict:
        print(f"dry run: {verdict}", file=account)
    for line in text.open_tasks(migration):
        print(f"to add: {line}", file=account)
    if args.out:
        if verdict.startswith("refused"):
            print("next: repair what the dry run and the lines `needs a look` name, then run this command again")
        else:
            print(f"next: python -m skyrl_mega.launch --config {args.out} --dry-run")
    else:
        print(written, end="")
    return DONE


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns the command's own options, and the program with its input, whose options may look like ours."""
    options, rest, at = list[str](), list[str](), 0
    while at < len(words):
        word = words[at]
        if word == "--out":
            options += words[at : at + 2]
            at += 1
        elif word.startswith("--out=") or word in ("--json", "--plain", "-h", "--help"):
            options.append(word)
        else:
            rest.append(word)
        at += 1
    return options, rest


def _check_output(path: Path, source: Path | None) -> None:
    """Refuses an output path that holds the input, a link, or a file that this command did not write."""
    if path.suffix != ".yaml":
        raise UserError("allowed is a file that ends in .yaml", key="--out", value=path)
    if path.is_symlink():
        raise UserError("is a link; nothing is written through it", key="--out", value=path, fix="give another file")
    if source and path.exists() and source.exists() and path.samefile(source):
        raise UserError("is the input itself", key="--out", value=path, fix="give another file")
    refuse_file(path, "--out", _is_ours)


def _is_ours(file: Path) -> bool:
    """True if the first line of a file says that this command wrote the file."""
    with safe_read.open_regular(file) as opened:
        return opened.readline(LONGEST_LINE).rstrip().endswith(text.MARK.encode())


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, "--out", _is_ours) as partial:
        partial.write_text(content, encoding="utf-8")
