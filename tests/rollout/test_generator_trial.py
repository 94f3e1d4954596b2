"""A generator is tried before a run, and settings that it cannot keep are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_mega.common import trials
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.generators import check_generator
from skyrl_mega.config.schema import Config, EnvironmentConfig, RolloutConfig
from skyrl_mega.rollout.generators import load, trial
from skyrl_mega.trainer import plan_trial
from tests.support.generators import write_class

JUDGED = "await (await (await service.open(i)).sample()).step() for i in range(group.samples)"


def config_of(generator: str, turns: int = 1, **options: object) -> Config:
    config = Config()
    config.rollout = RolloutConfig(generator=generator, generator_options=dict(options), max_turns=turns)
    return config


def refusal(config: Config) -> str:
    with pytest.raises(UserError) as refused:
        trial.check(config)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_generators_that_work_pass(tmp_path: Path) -> None:
    for name in load.BUILT_IN:
        trial.check(config_of(name, turns=3))
    trial.check(config_of(write_class(tmp_path, f"return [{JUDGED}]")))
    trial.check(Config())


def test_names_and_options_are_checked(tmp_path: Path) -> None:
    assert "did you mean tree_search? allowed is one of best_of_n, " in refusal(config_of("treesearch"))
    assert "generator_options.dept: there is no such option" in refusal(config_of("tree_search", dept=1))
    assert f"{tmp_path}/none.py does not exist" in refusal(config_of(f"{tmp_path}/none.py:Mine"))
    path = write_class(tmp_path, "return []")
    assert "has no class Min; did you mean Mine?" in refusal(config_of(path[:-1]))
    (tmp_path / "a.py").write_text("class Mine:\n    pass\n")
    assert "it is no generator; allowed is a class that inherits from" in refusal(config_of(f"{tmp_path}/a.py:Mine"))
    head = "from skyrl_mega.rollout.generators import TrajectoryGenerator\nclass Mine(TrajectoryGenerator):\n"
    for i, (body, error) in enumerate(
        (
            ("    pass", "Mine.generate is missing; write `async def generate(self, group, service)`"),
            ("    def generate(self, group, service): pass", "Mine.generate is not async"),
            ("    async def generate(self, group): pass", "Mine.generate cannot be called by generate(group, service)"),
            (
                "    OPTIONS = {'n': 5}\n    async def generate(self, g, s): pass",
                "Mine.OPTIONS is {n: 5}; allowed is a map",
            ),
            (
                "    OPTIONS = ['n']\n    async def generate(self, g, s): pass",
                "Mine.OPTIONS is [n]; allowed is a mapping",
            ),
            ("    shared = 'half'\n    async def generate(self, g, s): pass", "Mine.shared is half; allowed is each"),
        )
    ):
        (tmp_path / f"b{i}.py").write_text(head + body)
        assert error in refusal(config_of(f"{tmp_path}/b{i}.py:Mine"))
    (tmp_path / "c.py").write_text("class Mine(TrajectoryGenerator): pass")
    assert "add `from skyrl_mega.rollout.generators import" in refusal(config_of(f"{tmp_path}/c.py:Mine"))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import sys\nsys.exit(0)", "Mine.generate raised SystemExit: '0' ("),
        ("raise asyncio.CancelledError", "Mine.generate raised CancelledError: "),
        ("await asyncio.gather(asyncio.sleep(0, 1 / 0))", "raised ZeroDivisionError: division by zero ("),
        ("b = await service.open()\nawait b.sample(max_tokens='8')", "/mine.py, line 8)"),
        ("return [1] * group.samples", "generator Mine: generate returned [1, 1, "),
        ("return service.tree()", "AttributeError: "),
        ("return [await (await service.open()).samples()]", "object has no attribute"),
        ("import random\nreturn [await (await (await service.open()).sample(random.randint(1, 9**9))).step() "
         "for _ in range(group.samples) if await service.sample([random.randint(1, 99)], 1)]",
         "take random numbers from service.random()"),
        ("b = await service.open()\nfor _ in range(3):\n"
         "    b = (await b.sample()).tell([{'role': 'user', 'content': ''}])",
         "tell: this leads to turn 2 of a trajectory, and rollout.max_turns is 1; give at least 2"),
    ],
)  # fmt: skip
def test_a_call_with_stand_ins_finds_errors(tmp_path: Path, body: str, error: str) -> None:
    assert error in refusal(config_of(write_class(tmp_path, body)))


def test_a_generator_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LONGEST_S", 0.2)
    assert "Mine.generate did not end within 0.2 s" in refusal(
        config_of(write_class(tmp_path, "await asyncio.sleep(99)"))
    )
    endless = "while True:\n    await service.sample([1], 1)"
    monkeypatch.setattr(trial, "LONGEST_S", 60.0)
    monkeypatch.setattr("skyrl_mega.rollout.generators.group_state.MOST_REQUESTS", 50)
    assert "asked the engines for more than 50 answers" in refusal(config_of(write_class(tmp_path, endless, "endless")))


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n    pass",
        "import time\ntime.sleep(3600)",
        "while True:\n    try:\n        await asyncio.sleep(9)\n    except asyncio.CancelledError:\n        pass",
    ],
)
def test_a_generator_that_ignores_the_event_loop_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.setattr(trials, "LONGEST_S", 0.5)
    monkeypatch.setattr(trial, "LONGEST_S", 0.2)
    error = refusal(config_of(write_class(tmp_path, body)))
    assert "Mine.generate did not end within 0.5 s, although the stand-ins answer at once (" in error
    assert ".py, line " in error


def test_settings_that_a_generator_cannot_keep_are_refused() -> None:
    config = config_of("tree_search")
    check_generator(config)
    config.run.deterministic = True
    with pytest.raises(UserError, match=r"run.deterministic = true: rollout.generator=tree_search decides"):
        check_generator(config)
    config.run.deterministic = False
    config.environment = EnvironmentConfig(slots=4)
    with pytest.raises(UserError, match=r"environment.slots = 4"):
        check_generator(config)


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "generators.md").read_text()
    for name, lines in (("my_generator.py", 40), ("my_step.py", 40)):
        (tmp_path / name).write_text(text := page.split(f"# {name}\n")[1].split("```")[0])
        assert len(text.splitlines()) <= lines
    trial.check(config_of(f"{tmp_path}/my_generator.py:SecondThoughts", tries=3))
    config = Config()
    config.run.loop = f"{tmp_path}/my_step.py:two_generations"
    plan_trial.check(config)
