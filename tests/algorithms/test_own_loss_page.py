"""docs/own-loss.md as followed by a reader: files pasted, tested and launched, and the listed mistakes repeated."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from skyrl_mega.algorithms.advantages import NEEDS, AdvantageInputs, TokenInputs
from skyrl_mega.algorithms.losses import LossInputs
from skyrl_mega.cli.train import main
from skyrl_mega.telemetry.metrics import read
from tests.trainer.quickstart import ROOT, finish

PAGE = (ROOT / "docs" / "own-loss.md").read_text(encoding="utf-8")
FUNCTIONS, TESTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LOSS, ADVANTAGE = "algorithm.loss=my_algorithm.py:tapered", "algorithm.advantage=my_algorithm.py:by_surprise"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_algorithm.py").write_text(FUNCTIONS, encoding="utf-8")
    return tmp_path


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}")[2].partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """Returns the names in backticks in the first cell of every row."""
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def run_the_pages_tests(functions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, module_tests = ModuleType("my_algorithm"), dict[str, Any]()
    exec(functions, vars(module))
    monkeypatch.setitem(sys.modules, "my_algorithm", module)
    exec(TESTS, module_tests)
    tests = [test for name, test in module_tests.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_the_pages_tests_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    run_the_pages_tests(FUNCTIONS, monkeypatch)


WRONG = {
    "no taper": ("clamp(max=1.0)", "clamp(max=9.0)"),
    "a gradient through the ratio": ("log_ratio(inputs).detach()", "log_ratio(inputs)"),
    "the token's ratio": ("inputs.sequence_sum(log_ratio(inputs).detach())", "log_ratio(inputs).detach()"),
    "what has no weight": ("inputs.clean(inputs.advantages_L)", "inputs.advantages_L"),
    "a mean over the micro-batch": ("total(inputs, losses_L,", "total(inputs, losses_L.mean(),"),
    "the sum of other prompts": (" * same).sum(1)", ").sum(1)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_pages_tests_find_a_wrong_function(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, changed = WRONG[wrong]
    assert right in FUNCTIONS
    with pytest.raises(AssertionError):
        run_the_pages_tests(FUNCTIONS.replace(right, changed), monkeypatch)


def test_the_tables_have_every_field() -> None:
    loss = first_cells(section("What a loss is given"))
    assert set(loss) == {field.name for field in fields(LossInputs)}
    step, tokens = section("What an advantage is given").split("With `@per_token(…)`")
    assert set(first_cells(step)) == {field.name for field in fields(AdvantageInputs)}
    assert set(first_cells(tokens)) == {field.name for field in fields(TokenInputs)}
    assert set(re.findall(r"\| `(\w+)`[^|]* \|$", tokens, re.MULTILINE)) == set(NEEDS)


MISTAKES = {
    "algorithm.loss=my_algoritm.py:tapered": ("", ""),
    "algorithm.loss=my_algorithm.py:taperd": ("", ""),
    "algorithm.loss=tapered": ("", ""),
    "def tapered(inputs: LossInputs)": ("(inputs: LossInputs, algorithm: AlgorithmConfig)", "(inputs: LossInputs)"),
    "the import of `per_token` is missing": ("AdvantageInputs, per_token", "AdvantageInputs"),
    '@per_token("old_logprob")': ('"old_logprobs"', '"old_logprob"'),
    "@per_token` without parentheses": ('@per_token("old_logprobs")', "@per_token"),
    '@per_token("values")': ('"old_logprobs"', '"values"'),
    '@per_token("reference_logprobs")` without KL': ('"old_logprobs"', '"reference_logprobs"'),
    "a loss that raises": ("inputs.sequence_sum(", "inputs.sum_of_sequence("),
    "a loss without its metrics": ("metrics, algorithm)", "metrics, algorithm)[0]"),
    "a metric that is no tensor (`.item()`)": (".max().detach()", ".max().item()"),
    "what has no weight is read without `clean`: 0 · NaN is NaN": (
        "inputs.clean(inputs.advantages_L)",
        "inputs.advantages_L",
    ),
    "a loss that is detached": ("inputs.clean(inputs.logprobs_L)", "inputs.clean(inputs.logprobs_L).detach()"),
    "a mean or a division where no token counts": (
        "inputs.mean((weight_L < 1).float())",
        "(weight_L < 1)[inputs.active_L].float().mean()",
    ),
    "a mean over the micro-batch": ("total(inputs, losses_L,", "total(inputs, losses_L.mean(),"),
}
"""Replacements in the file, by the first cell of a row."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_the_line_that_the_page_says(
    mistake: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = section("When something is wrong").partition("What only a step")[0]
    rows = re.findall(r"^\| `?(.+?)`? \| `(.+)` \|$", table, re.MULTILINE)
    (expected_line,) = [line for first, line in rows if first == mistake]
    (folder / "my_algorithm.py").write_text(FUNCTIONS.replace(*MISTAKES[mistake], 1), encoding="utf-8")
    arguments = [mistake] if mistake.startswith("algorithm.") else [LOSS, ADVANTAGE]
    assert main(["--config", str(ROOT / "configs" / "quickstart.yaml"), "--dry-run", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: algorithm.")
    assert all(part in lines[0] for part in expected_line.split("…, ")), (expected_line, lines[0])


def test_every_row_of_mistakes_is_made() -> None:
    table = section("When something is wrong").partition("What only a step")[0]
    rows = [first.strip("`") for first in re.findall(r"^\| (.+?) \| ", table, re.MULTILINE)]
    assert set(rows) - set(MISTAKES) == {"mistake", "any other error while the file is read"}


EVEN = """
from skyrl_mega.envs import BaseTextEnv, BaseTextEnvStepOutput

class Even(BaseTextEnv):
    def step(self, action):
        return BaseTextEnvStepOutput(observations=[], reward=float(len(action) % 2), done=True, metadata={})
"""
"""An environment with unequal rewards for any text of a barely warmed-up model."""


@pytest.mark.nightly
@pytest.mark.slow
def test_the_pages_run(folder: Path) -> None:
    """Runs the page's command at the size of a test and checks the metrics named by the page."""
    (command,) = re.findall(r"^    python -m skyrl_mega\.launch (.*\\\n.*)$", section("3. The run"), re.MULTILINE)
    _, config, *settings = shlex.split(command.replace("\\\n", " "))
    assert config == "configs/quickstart.yaml" and {LOSS, ADVANTAGE} <= set(settings)
    (folder / "even.py").write_text(EVEN, encoding="utf-8")
    small = ["run.steps=2", "data.mini_batch_prompts=8", "checkpoint.every=0", "telemetry.trackers=[jsonl]"]
    rewards = ["environment.classes.addition=even.py:Even", "algorithm.dynamic_sampling.enabled=false"]
    finish(folder, *settings, *small, *rewards)
    _, *steps = read(folder / "my_algorithm" / "metrics.jsonl")
    assert len(steps) == 2 and max(row["policy/tapered_fraction"] for row in steps) > 0
    for row in steps:
        assert 1 < row["policy/answer_ratio_max"] < 2
        assert row["policy/grad_norm"] > 0 and 0 < row["policy/advantage_fraction"] <= 1
        for name in ("loss", "lr", "steps_skipped", "entropy", "importance_weight", "importance_clipped_fraction"):
            assert f"policy/{name}" in row and f"`policy/{name}`" in PAGE
        assert not {"policy/ratio", "policy/clip_fraction", "policy/kl_old", "policy/kl"} & set(row)
