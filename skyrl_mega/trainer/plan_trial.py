"""Trial of a function of `run.loop` before a run: a few steps with stand-ins, without a process.

Without a trial, a wrong name or a wrong order appears only in the first step, after the start of engines and policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from io import StringIO
from typing import Self, cast

from skyrl_mega.common import imports, trials
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.engines.base import Completion
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent import edits
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.run import Run
from skyrl_mega.trainer.step import Step
from skyrl_mega.trainer.step_plan import (
    KEY,
    HandedOut,
    PartOrder,
    PlanFault,
    StepFunction,
    StepPlan,
    step_function,
)
from skyrl_mega.trajectories.trajectory import Group, Status, Trajectory, new_trajectory

STEPS = (1, 2, 3, 50)
"""Numbers of the steps tried; the last is without groups, as at the end of the data."""


class _NotRunnableHere(Exception):
    """The function uses a part of the run that exists only in a run."""


class TrialPlan(StepPlan):
    """A `StepPlan` with stand-ins: the same methods and the same order, without effect. A call at the wrong time, or
    with something wrong, raises PlanFault.

    Args:
        config: The settings.
        number: Number of the step.
        handed_out: Stand-ins of this trial.
        empty: True if no groups come.
    """

    def __init__(self, config: Config, number: int, handed_out: HandedOut, *, empty: bool) -> None:
        self.run, self.config, self.empty = cast(Run, _RunProbe()), config, empty
        self.step = Step(number, Console(StringIO()))
        self._order = PartOrder(config, handed_out)

    def __enter__(self) -> Self:
        """Raises PlanFault: only the run itself enters a plan."""
        raise PlanFault("the plan is given to `with`, which would end the step twice; call its methods alone")

    @property
    def generated(self) -> int:
        """Number of calls of `generate`."""
        return self._order.generated

    def generate(self) -> list[Group]:
        """Returns a group of each of two prompts; [] with `empty`. Raises PlanFault if generation is not allowed at
        this point of the step."""
        self._order.generate()
        groups = [] if self.empty else [_group(i, self.config.data.samples_per_prompt) for i in range(2)]
        self.step.trajectories += [t for group in groups for t in group.trajectories]
        return self._order.hand_out(groups)

    def train(self, groups: Sequence[Group]) -> None:
        """Notes a training on groups; trains nothing. The list of groups may be empty. Raises PlanFault if training is
        not allowed at this point of the step, or the value is no list of groups of this trial."""
        self._order.train(groups)
        self._order.recorded = True

    def sync(self) -> None:
        """Notes a weight sync; syncs nothing. Raises PlanFault if a sync is not allowed at this point of the step."""
        self._order.sync()

    def evaluate(self) -> None:
        """Notes an evaluation, and a weight sync before the evaluation if the step trained and has not synced.

        Evaluates nothing. Afterwards `generate` raises PlanFault in this step. Raises PlanFault if nothing was
        generated in this step.
        """
        self._order.check_generated()
        self._order.recorded = True
        self.sync_if_trained()


def check(config: Config) -> None:
    """Calls the function of `run.loop` for a few steps with stand-ins. Does nothing without the setting. A function
    that uses `plan.run` is tried only up to that use. The function's module is imported for the trial alone: variables
    that the function sets in its module do not reach the run.

    Raises:
        UserError: The function cannot be imported, raises, does not end, names a part that does not exist, calls the
            parts in an impossible order, or generates nothing.
    """
    if config.run.loop is None:
        return
    with imports.unshared(config.run.loop):
        _try(step_function(config), config, config.run.loop)


def _try(function: StepFunction, config: Config, path: str) -> None:
    handed_out = HandedOut()
    for number in STEPS:
        plan = TrialPlan(config, number, handed_out, empty=number == STEPS[-1])
        try:
            with trials.limited():
                function(plan)
        except _NotRunnableHere:
            return
        except UserError:
            raise
        except trials.FAULTS as error:
            raise _refusal(error, function, path) from error
        if not plan.generated:
            raise PlanFault("it ends a step without generate, and the run would never end; call generate in every step")


def _refusal(error: BaseException, function: StepFunction, path: str) -> UserError:
    place = trials.place(error, function)
    text = str(error).replace(TrialPlan.__name__, StepPlan.__name__)
    text = (
        f"it {text}{place}" if isinstance(error, trials.Endless) else f"it raised {type(error).__name__}: {text}{place}"
    )
    fix = ""
    if isinstance(error, AttributeError) and isinstance(error.obj, TrialPlan | _RunProbe):
        known = StepPlan if isinstance(error.obj, TrialPlan) else Run
        names = sorted(name for name in {*dir(known), *_fields(known)} if not name.startswith("_"))
        near = get_close_matches(error.name or "", names, n=1)
        what = "the plan" if known is StepPlan else "the run"
        text = f"{what} has no {error.name}{place}"
        fix = f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}"
    return UserError(text, key=KEY, value=path, fix=fix)


class _RunProbe:
    """Stands for the run: every part that a run has ends the trial."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or name not in {*dir(Run), *_fields(Run)}:
            raise AttributeError(f"the run has no {name}", name=name, obj=self)
        raise _NotRunnableHere


def _fields(cls: type) -> set[str]:
    if cls is StepPlan:
        return {"run", "config", "number", "step"}
    return set(getattr(cls, "__dataclass_fields__", {}))


def _group(number: int, samples: int) -> Group:
    """Returns a group whose rewards are 0, 1, 0, …."""
    prompt = Prompt(number, [{"role": "user", "content": "q"}], "trial", {})
    return Group(prompt, [_trajectory(prompt, sample) for sample in range(samples)])


def _trajectory(prompt: Prompt, sample: int) -> Trajectory:
    t = new_trajectory(prompt, sample)
    edits.set_prompt(t, prompt.messages, [1])
    edits.add_response(t, Completion("trial", [2, 3], [-0.5, -0.5], "stop", ((0, 0),)), at_s=0.0, generate_s=0.0)
    edits.append_messages(t, [{"role": "assistant", "content": "a"}])
    t.reward, t.status, t.turns = float(sample % 2), Status.COMPLETED, 1
    return t
