"""Options of every command with absurd values, and readers that close the output early."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_mega.cli.evaluate import main as evaluate
from skyrl_mega.cli.export import main as export
from skyrl_mega.cli.report import main as report
from skyrl_mega.cli.weights import main as weights
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import WRONG_INPUT, guarded
from skyrl_mega.data.prepare import parser as data_parser
from skyrl_mega.data.prepare import prepare
from skyrl_mega.retriever.commands import main as retriever
from skyrl_mega.retriever.commands import parser as retriever_parser

ODD = ("nan", "-1", str(10**30), "", "a\0b", "\udcff", "x" * 5000)
NUMBERS = {
    "data": (data_parser, {"path": ("source", "train-file", "test-file", "output", "held-out", "corpus")}),
    "retriever": (retriever_parser, {"path": ("corpus", "output", "index", "ready-file")}),
}


def _data(argv: list[str]) -> int:
    return guarded(lambda: len(prepare(argv)) and 0)


def _retriever(argv: list[str]) -> int:
    return guarded(lambda: retriever(argv))


def _refused(command: Callable[[list[str]], int], argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert command(argv) == WRONG_INPUT, argv
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and lines[0].isprintable(), (argv, lines)
    return lines[0]


@pytest.mark.parametrize("name, command", [("data", _data), ("retriever", _retriever)])
def test_numbers_and_paths_out_of_range(
    name: str, command: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build, named = NUMBERS[name]
    subcommands = build()._subparsers._group_actions[0].choices  # type: ignore[union-attr] # argparse has no other way
    tried = 0
    for subcommand, options in subcommands.items():
        given = ["query words"] if subcommand == "query" else []
        for option in options._actions:
            if not option.option_strings or option.type is None:
                continue
            needed = [w for o in options._actions if o.required and o.option_strings and o is not option
                      for w in (o.option_strings[0], str(tmp_path / "needed"))]  # fmt: skip
            values = ("", "a\0b", "\udcff", "x" * 5000) if option.dest.replace("_", "-") in named["path"] else ODD
            for value in values:
                line = _refused(command, [subcommand, *given, *needed, f"{option.option_strings[0]}={value}"], capsys)
                tried += 1
                assert "allowed is" in line and "--help" in line, line
    assert tried > 60
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command, argv",
    [
        (_data, ["swe", "--output", "{file}"]),
        (_data, ["gsm8k", "--source", "{deep}"]),
        (_data, ["gsm8k", "--source", "{binary}"]),
        (_data, ["math", "--train-file", "{folder}"]),
        (_data, ["math", "--train-file", "{roles}"]),
        (_data, ["lcb", "--train-file", "{numbers}"]),
        (_data, ["search", "--source", "{facts}"]),
        (_data, ["gym", "--train", "5", "--output", "{file}/below"]),
        (_retriever, ["build", "--corpus", "{deep}", "--output", "{folder}/index", "--methods", "bm25"]),
        (report, ["run", "{file}"]),
        (report, ["trajectories", "{binary}"]),
        (report, ["trajectories", "{folder}", "--limit", "nan"]),
        (export, ["{folder}", "--output", "{folder}/o", "--shard-gib", "nan"]),
        (export, ["{folder}", "--output", "{folder}/o", "--workers", str(10**9)]),
        (export, ["{folder}", "--output", "{folder}/o", "--step", "-1"]),
        (weights, ["plan", "--model", "{file}"]),
        (evaluate, ["--model", "{file}", "--set", "{binary}"]),
    ],
)
def test_files_that_are_none(
    command: Callable[[list[str]], int], argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    contents = {
        "file": b"x",
        "deep": b"[" * 100_000 + b"\n",
        "binary": bytes(range(256)),
        "roles": b'{"prompt": [{"role": 5}], "answer": "1"}\n',
        "numbers": b'{"public_test_cases": 5}\n',
        "facts": b'{"question": "q", "answer": "a", "supporting_facts": [5]}\n',
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    places = {name: str(tmp_path / f"{name}.jsonl") for name in contents} | {"folder": str(tmp_path / "folder")}
    out = ["--output", str(tmp_path / "out")] if command is _data and "--output" not in argv else []
    line = _refused(command, [*(word.format(**places) for word in argv), *out], capsys)
    assert any(place in line for place in places.values()) or "allowed is" in line


def test_a_reader_that_goes_away_is_no_error() -> None:
    run = f"{sys.executable} -m skyrl_mega.config"
    done = subprocess.run(
        f"{run} | true; echo ${{PIPESTATUS[0]}}; {run} >&-; echo $?; {run} >/dev/full; echo $?",
        shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=240, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.split() == ["0", "0", "1"]
    assert done.stderr.splitlines() == ["fault: [Errno 28] No space left on device"]


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("--dry-runn", "did you mean --dry-run?"),
        ("--cluster.nodes=4", "a setting has no dashes: cluster.nodes=4"),
        ("--cluster.nodes", "a setting has no dashes: cluster.nodes=…"),
        ("--nothing-like-it", "unrecognized arguments: --nothing-like-it; see"),
    ],
)
def test_what_an_unknown_option_means_is_offered(argument: str, meant: str) -> None:
    from skyrl_mega.cli.train import parser

    with pytest.raises(UserError) as caught:
        parser().parse_intermixed_args(["--config", "a.yaml", argument])
    assert meant in str(caught.value) and "\n" not in str(caught.value)


def test_sys_exit_in_code_that_is_not_ours_is_a_fault_and_help_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: sys.exit(0)) == 1
    assert f"fault: {__file__}, line " in (message := capsys.readouterr().err) and "called sys.exit(0)" in message
    assert export(["--help"]) == 0
