"""A step's parts in an order of one's own (`run.loop`): tried before a run, and safe in a run."""

from __future__ import annotations

import inspect
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_mega.cluster.channel import StopRequest
from skyrl_mega.common import imports, trials
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trainer import loop, plan_trial
from skyrl_mega.trainer.plan_trial import TrialPlan
from skyrl_mega.trainer.shutdown import GracefulStop
from skyrl_mega.trainer.step_plan import PlanFault, StepPlan
from skyrl_mega.trajectories.trajectory import Group
from tests.trainer.test_stop import FakeRun, run, state, steps

__all__ = ["run"]


def write(folder: Path, body: str, head: str = "def mine(plan):") -> str:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    (folder / "plan.py").write_text(f"{head}\n{lines}\n")
    return f"{folder}/plan.py:mine"


def refusal(path: str, **settings: Any) -> str:
    config = Config()
    config.run.loop = path
    for name, value in settings.items():
        setattr(config.asynchrony, name, value)
    with pytest.raises(UserError) as refused:
        plan_trial.check(config)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def calls(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the parts of a run with a stand-in for training."""
    done: list[str] = []
    fake: Any = run.rollouts

    def generate(step: Any) -> list[Group]:
        run.next_groups(step)
        done.append("generate")
        return [Group(Prompt(0, [], "e", {}), [])]

    def sync(version: int) -> dict[str, float]:
        done.append(f"sync {version}")
        return {}

    fake.next_groups = generate
    fake.before_sync = lambda step: None
    fake.sync = sync
    fake.synced = lambda version: None
    monkeypatch.setattr(loop, "train_on", lambda run, step, groups: done.append(f"train {len(groups)}"))
    monkeypatch.setattr(run, "evaluate", lambda step: done.append("evaluate"))
    return done


def test_two_generations_for_an_update(run: FakeRun, calls: list[str], tmp_path: Path) -> None:
    body = "groups = plan.generate() + plan.generate()\nplan.train(groups)\nplan.record({'mine/groups': len(groups)})"
    run.config.run.loop, run.config.run.steps = write(tmp_path, body), 3
    plan_trial.check(run.config)
    loop.train(run)
    assert calls == [each for n in (1, 2, 3) for each in ("generate", "generate", "train 2", f"sync {n}")]
    assert [row["mine/groups"] for row in read(run.folder / "metrics.jsonl")] == [2, 2, 2]
    assert (state(run)["step"], state(run)["stream"]["position"], run.version) == (3, 60, 3)


def test_a_trial_leaves_nothing_in_the_module_of_the_run(
    run: FakeRun, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "BUFFER.extend(plan.generate())\nplan.train(BUFFER[-8:])"
    file = write(tmp_path, body, "BUFFER = []\n\n\ndef mine(plan):").rpartition(":")[0]
    package = tmp_path / "own_steps"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "step.py").write_text(Path(file).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    run.config.run.steps = 2
    for path in (f"{file}:mine", "own_steps.step:mine"):
        run.config.run.loop = path
        plan_trial.check(run.config)
        plan_trial.check(run.config)
        assert imports.load(path, "run.loop", kind="function").__globals__["BUFFER"] == []
        plan_trial.check(run.config)
        function = imports.load(path, "run.loop", kind="function")
        assert function.__globals__["BUFFER"] == [] and function.__globals__ is vars(sys.modules[function.__module__])
    assert sys.modules["own_steps"].step is sys.modules["own_steps.step"]
    loop.train(run)
    assert calls == ["generate", "train 1", "sync 1", "generate", "train 2", "sync 2"], "groups of earlier steps may"


def test_a_run_trains_on_groups_of_its_own_only(run: FakeRun, calls: list[str], tmp_path: Path) -> None:
    for value in ("[Group(g[0].prompt, [])]", "[copy(g[0])]", "[*g, 1]"):
        head = "from copy import copy\n\nfrom skyrl_mega.trajectories.trajectory import Group\n\n\ndef mine(plan):"
        folder = tmp_path / str(len(value))
        folder.mkdir()
        run.config.run.loop = write(folder, f"g = plan.generate()\nplan.train({value})", head)
        for start in (plan_trial.check, lambda config: loop.train(run)):
            with pytest.raises(PlanFault, match=r"train is given a (group that generate of this run did not|int)"):
                start(run.config)
    assert calls == ["generate"] * 3


def test_a_step_may_sync_and_evaluate_by_itself(run: FakeRun, calls: list[str], tmp_path: Path) -> None:
    body = "groups = plan.generate()\nplan.train(groups)\nplan.train(groups)\nif plan.number == 2:\n    plan.evaluate()"
    run.config.run.loop, run.config.run.steps, run.config.evaluation.every = write(tmp_path, body), 3, 2
    loop.train(run)
    assert calls == [
        *("generate", "train 1", "train 1", "sync 1"),
        *("generate", "train 1", "train 1", "sync 2", "evaluate"),
        *("generate", "train 1", "train 1", "sync 3", "evaluate"),
    ]


@pytest.mark.parametrize(("moment", "last"), [("sample", 2), ("learn", 3)])
def test_a_signal_abandons_or_finishes_such_a_step(
    run: FakeRun, calls: list[str], tmp_path: Path, moment: str, last: int
) -> None:
    run.config.run.loop = write(tmp_path, "plan.train(plan.generate() + plan.generate())")
    run.faults[moment, 3] = StopRequest.SOON
    with pytest.raises(GracefulStop):
        loop.train(run)
    assert steps(run) == list(range(1, last + 1)) and state(run)["step"] == last
    assert state(run)["stream"]["position"] == 20 * last


def test_an_error_in_the_function_is_the_one_that_is_raised(run: FakeRun, calls: list[str], tmp_path: Path) -> None:
    run.config.run.loop = write(
        tmp_path, "plan.train(plan.generate())\nif plan.number == 2:\n    raise KeyError('mine')"
    )
    run.faults["learn", 2] = StopRequest.SOON
    with pytest.raises(KeyError, match="mine"):
        loop.train(run)
    assert steps(run) == [1]


def test_the_trial_has_the_methods_of_a_run() -> None:
    names = [name for name, value in vars(StepPlan).items() if not name.startswith("_") and callable(value)]
    assert len(names) >= 6
    for name in names:
        assert inspect.signature(getattr(StepPlan, name)) == inspect.signature(getattr(TrialPlan, name))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("pass", "it ends a step without generate"),
        ("plan.train(plan.sample())", "the plan has no sample (", ),
        ("plan.train(plan.generat())", "did you mean generate?"),
        ("plan.train(plan.generate()[0])", "train is given Group; allowed is a list of groups"),
        ("plan.train([1]) if plan.generate() else None", "train is given a int; allowed is a list of groups"),
        ("plan.train([])", "train comes before generate"),
        ("plan.evaluate()", "the step has no groups; call generate in every step"),
        ("with plan:\n    plan.generate()", "the plan is given to `with`"),
        ("plan.train(plan.generate())\nplan.generate()", "generate comes after train"),
        ("plan.train(plan.generate())\nplan.sync()\nplan.sync()", "sync is called twice"),
        ("g = plan.generate()\nplan.train(g)\nplan.sync()\nplan.train(g)", "train comes after sync"),
        ("plan.record({'a': 'b'})", "record is given {a: b}"),
        ("plan.record(['a'])", "allowed is a mapping of names with numbers"),
        ("g = plan.generate()\nplan.train(g + g)", "train is given a group twice"),
        ("plan.train()", "StepPlan.train() missing 1 required"),
        ("plan.number = 1", "has no setter"),
        ("plan.generate()[0].rewards[0] = 1.0", "does not support item assignment"),
        ("raise SystemExit(0)", "it raised SystemExit: 0 ("),
        ("from asyncio import CancelledError\nraise CancelledError", "it raised CancelledError"),
        ("while True:\n    plan.generate()", "generate is called more than 1,000 times in a step"),
        ("g = []\nwhile len(g) < 4:\n    g += plan.generate()", "generate returned no groups 100 times in a row"),
        ("yield plan.generate()", "it is async or has a yield"),
        ("plan.generate()\nplan.run.polcy", "the run has no polcy ("),
        ("max(plan.generate(), key=len)", "it raised TypeError"),
        ("plan.train([max(plan.generate(), key=lambda group: sum(group.rewards))])", "it raised ValueError: max()"),
    ],
)  # fmt: skip
def test_a_trial_finds_wrong_names_and_orders(tmp_path: Path, body: str, error: str) -> None:
    assert error in refusal(write(tmp_path, body))


def test_paths_signatures_and_modes_are_checked(tmp_path: Path) -> None:
    assert "none.py does not exist" in refusal(f"{tmp_path}/none.py:mine")
    path = write(tmp_path, "pass", "def mine(run, step):")
    assert "it takes (run, step); give it one parameter, a StepPlan" in refusal(path)
    (tmp_path / "two.py").write_text("def mine(plan):\n    plan.train(plan.generate() + plan.generate())\n")
    assert "generate is called twice; asynchrony.mode=one_step" in refusal(f"{tmp_path}/two.py:mine", mode="one_step")
    config = Config()
    config.run.loop = f"{tmp_path}/two.py:mine"
    plan_trial.check(config)
    (tmp_path / "run.py").write_text("def mine(plan):\n    plan.train(plan.generate())\n    plan.run.policy.group\n")
    config.run.loop = f"{tmp_path}/run.py:mine"
    plan_trial.check(config)
    config.run.loop = None
    plan_trial.check(config)


def test_a_step_without_groups_ends_the_run(run: FakeRun, calls: list[str], tmp_path: Path) -> None:
    run.config.run.loop = write(tmp_path, "if plan.number == 1:\n    plan.generate()")
    with pytest.raises(PlanFault, match="call generate in every step"):
        loop.train(run)
    assert calls == ["generate"]


def test_an_async_function_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "plan.train(plan.generate())", "async def mine(plan):")
    assert "it is async or has a yield, so that a call would run nothing; write `def`" in refusal(path)


def test_a_trial_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    body = "import json\njson.loads(plan.generate)"
    assert f"({tmp_path}/plan.py, line 3)" in refusal(write(tmp_path, body))


@pytest.mark.parametrize("body", ["while True:\n    pass", "import time\ntime.sleep(3600)"])
def test_a_trial_ends_a_function_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(trials, "LONGEST_S", 0.2)
    before = signal.getsignal(signal.SIGALRM)
    error = refusal(write(tmp_path, body))
    assert "it did not end within 0.2 s" in error and f"({tmp_path}/plan.py, line " in error
    assert signal.getsignal(signal.SIGALRM) is before and not 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2


def test_a_run_does_not_wait_for_groups_after_the_end_of_the_data(
    run: FakeRun, calls: list[str], tmp_path: Path
) -> None:
    fake: Any = run.rollouts
    fake.next_groups = lambda step: calls.append("generate") or []
    run.config.run.loop = write(tmp_path, "while not plan.generate():\n    pass")
    with pytest.raises(PlanFault, match="leave a loop of the function when generate returns none"):
        loop.train(run)
    assert len(calls) == 100


def test_metrics_in_a_run_are_plain_numbers(run: FakeRun, calls: list[str], tmp_path: Path) -> None:
    body = "import numpy\nplan.generate()\nplan.record({'mine/x': numpy.float32(0.5) if plan.number == 1 else 'b'})"
    run.config.run.loop = write(tmp_path, body)
    with pytest.raises(PlanFault, match=r"record is given \{mine/x: b\}"):
        loop.train(run)
    assert [row["mine/x"] for row in read(run.folder / "metrics.jsonl")] == [0.5]


def test_copies_by_dynamic_sampling_may_train(run: FakeRun, calls: list[str], tmp_path: Path) -> None:
    sampling = run.config.algorithm.dynamic_sampling
    sampling.enabled, sampling.mode, run.config.run.steps = True, "replace", 1
    run.config.run.loop = write(tmp_path, "g = plan.generate()\nplan.train(g + g)")
    loop.train(run)
    assert calls == ["generate", "train 2", "sync 1"]
