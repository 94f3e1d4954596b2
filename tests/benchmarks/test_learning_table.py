"""The learning table without runs: the rows, the saved figures, and the page."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning_page, learning_plot, learning_rows, learning_table
from benchmarks.learning_results import Figures, Results
from benchmarks.learning_rows import COMMON, STEPS, Row, rows
from skyrl_mega.algorithms.advantages import ADVANTAGES
from skyrl_mega.algorithms.losses import LOSSES
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check

TWO = [Row("grpo", "advantages, with ppo", ()), Row("kl k3", "KL to the start", ())]


def figures(accuracy: float, **more: float) -> Figures:
    shared = {"greedy": 1.0, "pass_at_n": 0.9, "entropy": 0.25, "clipped": 0.015, "mismatch": 3e-05, "skipped": 0.0}
    return {"seconds": 30.0, "cpu_seconds": 20.4, **shared, "reward": [0.5, accuracy], "accuracy": accuracy, **more}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    new_results = Results(tmp_path / "table.json", ["a=1"])
    new_results.begin_with({"accuracy": 0.5, "pass_at_n": 0.9, "greedy": 1.0})
    for seed, accuracy in enumerate((0.7, 0.75, 0.86)):
        new_results.keep("grpo", seed, figures(accuracy, mismatch=(seed + 1) * 1e-05))
    return new_results


GRPO = {
    "algorithm.advantage": "grpo",
    "algorithm.loss": "ppo",
    "algorithm.normalize": True,
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.2,
    "algorithm.dual_clip": None,
    "algorithm.whiten": "none",
    "algorithm.loss_mean": "tokens",
    "algorithm.kl.coefficient": 0.0,
    "algorithm.kl.estimator": "k3",
    "algorithm.kl.unbiased": False,
    "algorithm.importance_cap": None,
    "algorithm.old_logprobs": "policy",
    "algorithm.dynamic_sampling.enabled": False,
    "algorithm.overlong.filter": False,
    "algorithm.overlong.buffer": 0,
    "algorithm.entropy.coefficient": 0.0,
    "algorithm.rejection.level": "off",
}
"""The settings of all rows; a row changes only those named."""
KL = {"algorithm.kl.coefficient": 0.02, "reference.path": "runs/learning_table/start"}
CRITIC = {
    "algorithm.whiten": "batch",
    "critic.ranks": 1,
    **{f"critic.layout.{name}": 1 for name in ("tensor", "pipeline", "virtual_pipeline", "context", "expert")},
    "critic.layout.context_exchange": "ring",
    "critic.optimizer.lr": 5e-4,
    "critic.optimizer.beta2": 0.95,
}
CHANGES: dict[str, dict[str, object]] = {
    **{name: {"algorithm.advantage": name} for name in ADVANTAGES},
    **{name: {"algorithm.loss": name} for name in LOSSES if name != "ppo"},
    "grpo": {},
    "gae": {"algorithm.advantage": "gae", **CRITIC},
    "dapo": {
        "algorithm.clip_high": 0.28,
        "algorithm.dual_clip": 10.0,
        "algorithm.importance_cap": 2.0,
        "algorithm.dynamic_sampling.enabled": True,
        "algorithm.overlong.filter": True,
    },
    "dr_grpo": {
        "algorithm.normalize": False,
        "algorithm.loss_mean": "constant",
        "algorithm.loss_mean_length": 8,
    },
    "mean of sequences": {"algorithm.loss_mean": "sequences"},
    "mean of prompts": {"algorithm.loss_mean": "prompts"},
    "kl k3": KL,
    "kl k3 unbiased": {**KL, "algorithm.kl.unbiased": True},
    "kl k3+": {**KL, "algorithm.kl.estimator": "k3+"},
    "tis": {"algorithm.importance_cap": 2.0},
    "icepop": {
        "algorithm.importance_cap": 5.0,
        "algorithm.importance_floor": 0.5,
        "algorithm.importance_outside": "mask",
    },
    "ratios to the engine": {"algorithm.old_logprobs": "engine"},
}
"""Row → the settings of its run other than those of the row `grpo`."""


def flat(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every setting by full name."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flat(value, f"{path}{name}.")
        else:
            yield path + name, value


@cache
def settings_of(name: str) -> dict[str, Any]:
    return dict(flat(asdict(rows()[name].config(7, 5))))


def test_the_first_row_is_grpo_with_ppos_clip_alone() -> None:
    settings = settings_of("grpo")
    assert {name: settings[name] for name in GRPO} == GRPO


def test_every_advantage_and_loss_is_a_row_of_its_own() -> None:
    assert list(rows()) == list(CHANGES)


@pytest.mark.parametrize("name", rows())
def test_a_row_has_the_settings_that_it_names_and_no_others(name: str) -> None:
    settings, common = settings_of(name), settings_of("grpo")
    changed = {setting: value for setting, value in settings.items() if value != common.get(setting)}
    assert changed == CHANGES[name]


@pytest.mark.parametrize("name", rows())
def test_a_row_can_be_run(name: str) -> None:
    config = rows()[name].config(7, 5)
    check(config)
    assert (config.run.seed, config.run.steps) == (7, 5)
    prompts, minis = config.data.prompts_per_step, config.data.mini_batch_prompts
    assert minis is not None and prompts == 2 * minis, "ratios are all 1 without a second mini-batch"


def test_every_row_is_on_the_page() -> None:
    names = set(re.findall(r"^\| `?([^`|*]+?)`? \|", learning_table.PAGE.read_text(), re.MULTILINE))
    missing = sorted(set(rows()) - names)
    assert missing == [], f"train them with: python -m benchmarks.learning_table --only {' '.join(missing)}"


def test_page_and_plot_show_what_was_measured(tmp_path: Path) -> None:
    kept = Results(learning_table.RESULTS, [*COMMON, f"run.steps={STEPS}"])
    page, plot = tmp_path / "learning.md", tmp_path / "table.svg"
    page.write_text(learning_table.PAGE.read_text())
    learning_page.write_page(kept, list(rows().values()), page)
    learning_plot.write_plot(kept, list(rows().values()), plot)
    assert page.read_text() == learning_table.PAGE.read_text(), "python -m benchmarks.learning_table --draw"
    assert plot.read_text() == learning_table.PLOT.read_text(), "python -m benchmarks.learning_table --draw"


def test_a_row_shows_means_and_its_extremes(results: Results) -> None:
    cells = dict(
        zip(learning_page.HEADINGS, learning_page.cells([results.of("grpo", s) for s in range(3)]), strict=True)
    )
    assert cells["accuracy"] == "0.770 (0.700 to 0.860)"
    assert (cells["mismatch"], cells["clipped"], cells["CPU s"], cells["seeds"]) == ("3e-05", "1.5%", "20", "3")


def test_terminal_table_is_aligned_and_says_what_is_missing(results: Results) -> None:
    table = learning_page.lines(results, TWO)
    assert [line.split("  ")[0].strip() or line.split()[0] for line in table][1] == "start"
    ends = {
        match.end() for line in table if (match := re.search(r"0\.770 \(0\.700 to 0\.860\)|not measured yet", line))
    }
    assert len(ends) == 1 and sum("not measured yet" in line for line in table) == 1


def test_page_keeps_its_prose(results: Results, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{learning_page.BEGIN}\nold\n{learning_page.END}\nafter\n")
    learning_page.write_page(results, TWO, page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| `grpo` | 0.770 (0.700 to 0.860) |" in text and "| kl k3 | not measured yet |" in text


def test_plot_has_a_dot_for_every_seed(results: Results, tmp_path: Path) -> None:
    results.keep("kl k3", 1, figures(0.3))
    learning_plot.write_plot(results, TWO, tmp_path / "plot.svg")
    tree = ElementTree.parse(tmp_path / "plot.svg")
    assert len(tree.findall(".//{*}circle")) == 4 and len(tree.findall(".//{*}polyline")) == 2
    texts = [text.text for text in tree.findall(".//{*}text")]
    assert "grpo" in texts and "0.770" in texts and "0.300  1 of 3 seeds" in texts


def test_what_was_measured_comes_back(results: Results) -> None:
    again = Results(results.file, ["a=1"])
    assert again.has("grpo", 2) and not again.has("grpo", 3) and not again.has("kl k3", 0)
    assert again.seeds("grpo") == [0, 1, 2] and again.of("grpo", 1) == results.of("grpo", 1)
    assert again.start == {"accuracy": 0.5, "pass_at_n": 0.9, "greedy": 1.0}
    assert json.loads(results.file.read_text())["settings"] == ["a=1"]


def test_other_settings_are_not_mixed(results: Results) -> None:
    with pytest.raises(UserError, match=r"other settings \(a=1, a=2\)"):
        Results(results.file, ["a=2"])


def test_rows_of_another_start_are_not_mixed(results: Results) -> None:
    assert results.start is not None
    results.begin_with({**results.start})
    with pytest.raises(UserError, match=r'a start with \{"accuracy": 0.5, .* this one has \{"accuracy": 0.472, '):
        results.begin_with({**results.start, "accuracy": 0.472})


def test_a_row_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"--only nothing: no such row; allowed is grpo, "):
        learning_table.chosen(["grpo", "nothing"])


def test_a_row_that_needs_other_processes_has_its_own() -> None:
    from benchmarks.learning_runs import needs_processes

    assert not needs_processes(learning_rows.Row("x", "", ("algorithm.clip_low=0.1", "policy.optimizer.lr=1e-3")))
    assert needs_processes(learning_rows.Row("x", "", ("policy.ranks=1", "policy.layout.expert=1")))
