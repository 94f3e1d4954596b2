"""Generating ahead: impossible or wrong settings raise an error with a working fix."""

from __future__ import annotations

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose

FULL = ["asynchrony.mode=full", "algorithm.importance_cap=2"]
ONE = ["asynchrony.mode=one_step", "algorithm.importance_cap=2"]


def refused(*settings: str) -> str | None:
    config = compose(None, ["model.path=m", "data.train=[t.parquet]", "cluster.device=cpu", *settings])
    try:
        check(config)
    except UserError as error:
        return str(error)
    return None


SAMPLING = "algorithm.dynamic_sampling"
BARE, BARE_ONE = FULL[0], ONE[0]


@pytest.mark.parametrize(
    ("settings", "said", "fix"),
    [
        (["asynchrony.max_staleness=3"], "asynchrony.mode=full", [*FULL, "asynchrony.max_staleness=3"]),
        ([*ONE, "asynchrony.max_staleness=2"], "allowed is 0 or 1", [*FULL, "asynchrony.max_staleness=2"]),
        ([*FULL, "cluster.shared=true"], "they take turns with asynchrony.mode=off", FULL),
        ([*ONE, "residency.keep=[]"], "residency.keep=null", ONE),
        ([BARE], "algorithm.old_logprobs=engine", [BARE, "algorithm.old_logprobs=engine"]),
        ([BARE], "max_staleness=0", [BARE, "asynchrony.max_staleness=0"]),
        ([BARE_ONE], "rejection.level=token", [BARE_ONE, "algorithm.rejection.level=token"]),
        ([*FULL, "run.deterministic=true"], "the clock decides", [*ONE, "run.deterministic=true"]),
        ([*FULL, "algorithm.advantage=remax"], "asynchrony.mode=one_step", [*ONE, "algorithm.advantage=remax"]),
        ([*FULL, SAMPLING + "={enabled: true, mode: replace}"], "mode = replace", [*FULL, SAMPLING + ".enabled=true"]),
        ([*FULL, SAMPLING + "={enabled: true, oversample: 2}"], "oversample = 2", [*FULL, SAMPLING + ".enabled=true"]),
    ],
)
def test_what_cannot_be_ahead_is_refused(settings: list[str], said: str, fix: list[str]) -> None:
    text = refused(*settings)
    assert text and said in text and "\n" not in text
    assert refused(*fix) is None, "what it advises passes"


def test_a_loss_of_ones_own_may_correct_in_its_own_way() -> None:
    assert refused("asynchrony.mode=full", "algorithm.loss=tests.algorithms.own:loss") is None


def test_suggestions_are_of_synchronous_steps(capsys: pytest.CaptureFixture[str]) -> None:
    from skyrl_mega.cli.train import main

    assert main(["--config", "configs/dapo.yaml", *FULL, "cluster.shared=false", "--suggest"]) == 2
    assert "asynchrony.mode=off" in capsys.readouterr().err
