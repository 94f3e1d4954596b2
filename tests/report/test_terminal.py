"""Trajectories as shown to a person in the terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from skyrl_mega.report import __main__ as command
from skyrl_mega.report import records
from skyrl_mega.report.records import Query, Record
from skyrl_mega.report.show import summary
from skyrl_mega.report.terminal import COLUMNS, MARGIN, View, tool_text
from skyrl_mega.trajectories.trajectory import GREEDY, Status, Trajectory
from tests.report.cases import EVIL, double, run_folder, single, steps_of_double, with_steps


def loaded(folder: Path, *trajectories: Trajectory) -> list[Record]:
    run = run_folder(folder / "mine", {12: list(trajectories)})
    return records.load(records.files_of([run]), Query())


def shown(found: list[Record], width: int = 100, **terminal: object) -> list[str]:
    out = io.StringIO()
    view = View(Console(file=out, width=width, highlight=False, **terminal), found)  # type: ignore[arg-type]
    for record in found:
        view.whole(record)
    return out.getvalue().splitlines()


def test_the_conversation_stands_beside_its_speakers(tmp_path: Path) -> None:
    assert shown(loaded(tmp_path, double()))[1:] == [
        "step  prompt  sample  reward  status           turns  tokens    generate    env  weights",
        "  12       8       1   0.500  truncated_turns      2   4 + 8  1 min 15 s  1.2 s  3, 4",
        "",
        "user      │ example question",
        "",
        "assistant │ example answer",
        "",
        "user      │ the question",
        "",
        "policy 1  ┃ <search>first</search>",
        "",
        "tool      │ found nothing",
        "",
        "policy 2  ┃ second",
        "",
        'judged    · {"why": ["a", "b"], "score": NaN}',
        "",
    ]


def test_what_is_known_of_a_turn_stands_under_it(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "mine", {1: [double()]})
    with_steps(run / "trajectories" / "step_000001.parquet", [steps_of_double()])
    lines = shown(records.load(records.files_of([run]), Query()), width=120)
    at = lines.index("policy 1  ┃ <search>first</search>") + 1
    assert [line.strip() for line in lines[at : at + 3]] == [
        "3 tokens · reward 0.25 · generate 40.0 s · env 1.0 s",
        'call {"name": "search", "arguments": {"query": "ü"}}',
        "call plain words",
    ]
    assert lines[lines.index("policy 2  ┃ second") + 1].strip().startswith("3 tokens · ended by length · reward 0.25")


def test_a_new_conversation_is_marked(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "mine", {1: [double()]})
    steps = steps_of_double()
    steps[2]["kind"] = "prompt"
    with_steps(run / "trajectories" / "step_000001.parquet", [steps])
    lines = [line for line in shown(records.load(records.files_of([run]), Query())) if "conversation" in line]
    assert [line.strip() for line in lines] == ["· conversation 2: the policy sees nothing of the above"]


def test_error_tools_and_ground_truth_stand_beside_the_conversation(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"query": {"type": "string"}, "top": {}}}
    tools = [{"type": "function", "function": {"name": "search", "description": "Finds\npages.", "parameters": schema}}]
    failure = {"error": "environment m: step raised \x1b[2J", "at": "m.py, line 9"}
    failed = single(status=Status.ERROR_ENV, metadata=failure, tools=tools)
    assert shown(loaded(tmp_path, failed))[3:] == [
        "",
        "error     ! environment m: step raised \\x1b[2J (at m.py, line 9)",
        "",
        "tools     · search(query: string, top): Finds pages.",
        "",
        "user      │ 2*3 = ü?",
        "",
        "policy 1  ┃ 6",
        "",
        'judged    · {"error": "environment m: step raised \\u001b[2J", "at": "m.py, line 9"}',
        "",
        "truth     · 6",
        "",
    ]


@pytest.mark.parametrize("tool", [{}, {"function": 3}, {"function": {"name": "f", "parameters": {"properties": [1]}}}])
def test_tools_of_any_form_are_a_line(tool: dict[str, object]) -> None:
    assert "\n" not in tool_text(tool)


def test_columns_line_up_over_all_trajectories(tmp_path: Path) -> None:
    out = io.StringIO()
    trajectories = loaded(tmp_path, double(), single(uid=123456, reward=-10.0))
    view = View(Console(file=out, width=100), trajectories)
    view.titles()
    for record in trajectories:
        view.figures(record)
    titles, *rows = out.getvalue().splitlines()
    for title in ("step", "prompt", "sample", "reward", "turns", "tokens", "generate", "env"):
        end = titles.index(title) + len(title)
        for row in rows:
            assert row[end - 1] != " " and row[end : end + 2] in ("  ", ""), (title, row)


def test_a_greedy_answer_is_none_of_the_samples(tmp_path: Path) -> None:
    trajectories = loaded(tmp_path, single(uid=1, reward=0.5), single(uid=1, reward=-1.0, sample=GREEDY))
    assert summary(trajectories) == (
        "1 trajectories: 1 completed; mean reward 0.500; 1 greedy answers: 1 completed; mean reward -1.000"
    )
    assert [COLUMNS[3].show(record) for record in trajectories] == ["0", "greedy"]


def test_long_lines_are_wrapped_and_nothing_is_lost(tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(80))
    lines = shown(loaded(tmp_path, single(text=f"{words}\n\n    #### 4")), width=60)
    body = [line for line in lines if line[MARGIN : MARGIN + 1] == "┃"]
    assert max(map(len, body)) <= 60 and len(body) > 5
    assert body[-2:] == [" " * MARGIN + "┃", " " * MARGIN + "┃     #### 4"], "empty lines and indents stay"
    assert " ".join(line[MARGIN + 1 :] for line in body[:-2]).split() == words.split()


def test_wide_characters_fit_too(tmp_path: Path) -> None:
    body = [line for line in shown(loaded(tmp_path, single(text="漢字" * 60)), width=60) if "漢" in line]
    assert max(len(line) + line.count("漢") + line.count("字") for line in body) <= 60
    assert sum(line.count("漢字") for line in body) >= 55


def test_the_policy_cannot_steer_the_terminal(tmp_path: Path) -> None:
    text = "\n".join(shown(loaded(tmp_path, single(text="\x1b[2Jgone\r\u202eüa [bold]x[/bold]"))))
    assert "\\x1b[2Jgone\\r\\u202eüa [bold]x[/bold]" in text
    assert "\x1b" not in "\n".join(shown(loaded(tmp_path / "2", single(text=EVIL))))


def test_colour_only_on_a_terminal(tmp_path: Path) -> None:
    trajectories = loaded(tmp_path, single())
    assert "\x1b" not in "\n".join(shown(trajectories))
    assert "\x1b[32m" in "\n".join(shown(trajectories, force_terminal=True, color_system="standard", no_color=False))


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "skyrl_mega.report", *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")}
    return subprocess.run(line, capture_output=True, text=True, timeout=240, check=False, env=environment)


def test_the_command(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "mine", {1: [single(reward=r / 4, uid=r) for r in range(8)], 2: [double()]})
    ended = run_command("trajectories", str(run), "--brief", "--reward", "0.5..", "--sort", "-reward", "--step", "1")
    assert ended.returncode == 0, ended.stderr
    titles, *rows, last = ended.stdout.splitlines()
    assert titles.split()[:3] == ["step", "prompt", "sample"]
    assert [row.split()[1] for row in rows] == ["7", "6", "5", "4", "3", "2"]
    assert last == "6 trajectories: 6 completed; mean reward 1.125"


def test_text_shows_some_and_says_how_to_see_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "mine", {1: [single(sample=i) for i in range(25)]})
    assert command.main(["trajectories", str(run)]) == 0
    text = capsys.readouterr().out
    assert text.count("policy 1") == 20 and "; the first 20 are shown" in text.splitlines()[-1]
    assert command.main(["trajectories", str(run), "--limit", "2"]) == 0
    assert capsys.readouterr().out.count("policy 1") == 2
    assert command.main(["trajectories", str(run), "--search", "nobody said this"]) == 0
    assert capsys.readouterr().out == "no trajectory matches the options\n"


def test_several_runs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_folder(tmp_path / name, {1: [single()]}) for name in ("a", "b")]
    assert command.main(["trajectories", *map(str, runs), "--brief"]) == 0
    titles, first, second, _ = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in (titles, first, second)] == ["run", "a", "b"]


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["trajectories", "/does/not/exist"], "/does/not/exist: no such file or folder; allowed: a run's folder"),
        (["trajectories"], "RUN_OR_FILE"),
        (["trajectories", "RUN", "--reward", "2..1"], "--reward 2..1: allowed: a number, or a range"),
        (["trajectories", "RUN", "--reward", ".."], "--reward ..: allowed"),
        (["trajectories", "RUN", "--step", "one"], "--step one: allowed"),
        (["trajectories", "RUN", "--step", "7"], "--step: no file of that step"),
        (["trajectories", "RUN", "--sort", "colour"], "--sort colour: allowed: step, reward"),
        (["trajectories", "RUN", "--limit", "0"], "--limit 0: allowed is a whole number from 1 to"),
        (["trajectories", "RUN", "--html", "/does/not/exist/x.html"], "--html /does/not/exist/x.html: No such file"),
        (["run", "/does/not/exist"], "/does/not/exist: no such folder; allowed: a run's folder"),
        (["runs"], "invalid choice: 'runs'"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    run = run_folder(tmp_path / "r", {1: [single()]})
    assert command.main([str(run) if word == "RUN" else word for word in arguments]) == 2
    output = capsys.readouterr()
    assert part in output.err.splitlines()[-1] and output.err.splitlines()[-1].startswith("error: ")
    assert output.out == ""


def test_negative_rewards_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "r", {1: [single(reward=-1.0), single(reward=1.0)]})
    assert command.main(["trajectories", str(run), "--brief", "--reward", "-1..0"]) == 0
    assert "1 trajectories: 1 completed; mean reward -1.000" in capsys.readouterr().out
