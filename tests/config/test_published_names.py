"""The table of docs/algorithms.md with the settings of published algorithms."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from skyrl_mega.algorithms.advantages import ADVANTAGES
from skyrl_mega.algorithms.losses import LOSSES
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.checks.unused import unused_notes
from skyrl_mega.config.compose import compose
from skyrl_mega.config.keys import keys

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "algorithms.md"


def lines() -> dict[str, list[str]]:
    """Returns the settings of each name in the table."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## Published names and their settings\n")
    rows = re.findall(r"^\| ([^|`]+) \| `([^`]+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    return {name: shlex.split(settings) for name, settings in rows}


LINES = lines()


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_accepted_whole(name: str, base: Path) -> None:
    config = compose(base, LINES[name])
    check(config, planned=True)
    assert unused_notes(config) == []


@pytest.mark.parametrize("name", LINES)
def test_a_line_says_nothing_that_is_the_default(name: str) -> None:
    for setting in LINES[name]:
        key, _, value = setting.partition("=")
        if key in keys():
            default = keys()[key].default
            assert value != (str(default).lower() if isinstance(default, bool) else str(default)), setting


def test_no_two_names_are_the_same_line() -> None:
    assert len({tuple(sorted(settings)) for settings in LINES.values()}) == len(LINES) > 30


def test_every_advantage_and_loss_has_a_line() -> None:
    settings = {setting for line in LINES.values() for setting in line}
    assert {name for name in ADVANTAGES if f"algorithm.advantage={name}" not in settings} == {"grpo"}
    assert {name for name in LOSSES if f"algorithm.loss={name}" not in settings} == {"ppo"}


@pytest.mark.parametrize("name", [name for name, line in LINES.items() if "algorithm.kl.where=reward" in line])
def test_kl_in_the_reward_over_a_recipe_whose_kl_has_a_mean_of_its_own(name: str) -> None:
    recipe = ROOT / "configs" / "gsm8k_cpu.yaml"
    with pytest.raises(
        UserError, match=re.escape("algorithm.kl.mean = sequences: ") + ".* give algorithm.kl.mean=loss"
    ):
        check(compose(recipe, LINES[name]), planned=True)
    check(compose(recipe, [*LINES[name], "algorithm.kl.mean=loss"]), planned=True)


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        (
            ["algorithm.dynamic_sampling.enabled=true"],
            "algorithm.advantage=reinforce and algorithm.dynamic_sampling.ena",
        ),
        ([], "give algorithm.advantage=reinforce"),
        (
            ["algorithm.advantage=reinforce++", "algorithm.dynamic_sampling.enabled=true"],
            "needs at least 2; or give algorithm.dynamic_sampling.enabled=false",
        ),
    ],
)
def test_one_sample_of_a_prompt_where_some_are_compared(settings: list[str], fix: str, base: Path) -> None:
    with pytest.raises(UserError, match=re.escape(fix)):
        check(compose(base, ["data.samples_per_prompt=1", *settings]), planned=True)
    fixes = ["algorithm.dynamic_sampling.enabled=false"] if settings else []
    fixes += ["algorithm.advantage=reinforce"] if "advantage=reinforce " in fix + " " else []
    check(compose(base, ["data.samples_per_prompt=1", *settings, *fixes]), planned=True)
