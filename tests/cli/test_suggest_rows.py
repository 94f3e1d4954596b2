"""Rows of `--suggest`: distinct choices, costs and error bar, and the explanations below the table."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from skyrl_mega.cli import dry_run, suggest_rows, suggest_text
from skyrl_mega.cli.suggest_rows import Row
from skyrl_mega.cli.train import main
from skyrl_mega.config.compose import compose
from skyrl_mega.models.registry import architecture
from skyrl_mega.planner import rates
from tests.cli.test_suggest import suggestion
from tests.weights.grids import MODELS

GIB = 2**30


def planted(seconds: float, free: float = 10, host: float = 100, warning: str = "", differs: bool = False) -> Row:
    return Row(suggestion(seconds, 1, 0), int(free * GIB), warning, int(host * GIB), differs)


def test_a_row_is_shown_if_no_other_is_as_good_in_every_respect(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [planted(100), planted(104, free=12), planted(105, host=70), planted(110, free=13.5, host=60)]
    alike = [
        *(planted(98), planted(103, free=10.5), planted(104, free=9), planted(120, host=90)),
        *(planted(100, warning="close"), planted(100, differs=True), planted(106, free=12.5, host=99)),
    ]
    pool = {row.seconds + i * 1e-6: row for i, row in enumerate([*kept, *alike])}
    monkeypatch.setattr(suggest_rows, "row", lambda s, decoder: pool[s.seconds])
    suggestions = [suggestion(seconds, 1, 0) for seconds in pool]
    decoder = architecture(MODELS["qwen3_moe_mixed"]).describe(MODELS["qwen3_moe_mixed"])
    assert suggest_rows.distinct(suggestions, [], decoder) == kept
    good = planted(90, free=13.5, host=50)
    assert suggest_rows.distinct(suggestions, [good], decoder) == kept[:1], "the first is always shown"
    for row in (planted(87), planted(90, free=15), planted(90, host=37)):
        assert not good.covers(row)
    for row in (planted(88), planted(90, free=14.4), planted(200, host=38)):
        assert good.covers(row)
    assert not planted(90, warning="close").covers(planted(90)) and not planted(90, differs=True).covers(planted(90))


def test_rows_on_more_gpus_than_given_are_compared_by_their_gpu_hours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_mega.planner.search.SECONDS", 1)
    for gpus, compared in (("32", False), ("64", True)):
        assert main(["--config", "configs/searchr1_30b.yaml", "--suggest", gpus]) == 0
        out = capsys.readouterr().out
        assert ("GPU-h\n" in out) is compared and ("GPU-h: GPU-hours of a step" in out) is compared
        assert re.search(r"^error bar of row 1: ×0\.\d\d to ×[1-9]\.\d\d of its seconds, mostly ", out, re.MULTILINE)
    given = next(line.split() for line in out.splitlines() if line.split()[:2] == ["0", "32"])
    seconds, hours = map(float, (given[-3], given[-1]))
    assert hours == pytest.approx(seconds * 32 / 3600, abs=0.01)


def test_the_error_bar_counts_an_assumed_share_of_groups_with_a_signal() -> None:
    config = compose("configs/searchr1_30b.yaml", ["algorithm.dynamic_sampling.enabled=true"])
    hf, _ = dry_run.checked(config)
    config, used = rates.with_measured(config)
    decoder = architecture(hf).describe(hf)
    given = suggest_rows.as_suggestion(config, hf, decoder)
    causes = [cause.name for cause in suggest_rows.step_error_bar(given, decoder, used).causes]
    assert "share of groups with a signal" in causes


def test_a_warning_about_memory_is_explained_below_the_table() -> None:
    def legend(warning: str) -> str:
        return "\n".join(suggest_text._legend(suggest_rows.Rows(None, None, [planted(100, warning=warning)], None)))

    assert "within the estimates' margin" in legend("close") and "margin" not in legend("")


def test_gpu_hours_count_the_nodes_of_a_pool() -> None:
    pool = ["cluster.shared=false", "residency.keep=null", "cluster.pools.engines={gpu: H100, nodes: 2}"]
    config = compose("configs/searchr1_30b.yaml", pool)
    row = suggest_rows.Row(replace(suggestion(3600.0, 1, 0), config=config), 0, "", 0, False)
    assert row.gpu_hours == row.gpus + 2 * 8
