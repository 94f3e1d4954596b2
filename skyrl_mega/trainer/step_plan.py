"""The parts of an RL step in an order of one's own (`run.loop`, docs/generators.md).

A step generates, trains and syncs, each part possibly several times. Metrics, checkpoints, evaluations, health and
signals belong to every step, whatever the order of its parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from skyrl_mega.common import imports
from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config.schema import Config
from skyrl_mega.trainer.run import Run
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.trajectory import Group

KEY = "run.loop"
MOST_CALLS = 1000
"""Most calls of `generate` in a step: a function that calls more often probably never ends."""
MOST_EMPTY = 100
"""Most calls of `generate` in a row that return no groups, as all calls do at the end of the data."""
TrainOn = Callable[[Run, Step, list[Group]], None]
"""Type of `loop.train_on`."""
HandedOut = WeakValueDictionary[int, Group]
"""Groups returned by `generate`, by `id`."""


class PlanFault(UserError):
    """A function of `run.loop` called a part at the wrong time or with something wrong."""

    def __init__(self, text: str) -> None:
        super().__init__(text, key=KEY, fix="see docs/generators.md for the parts of a step")


class StepPlan:
    """An RL step in progress. As a context manager: the block calls the parts; its end completes the step.

    Args:
        run: The run.
        step: The step.
        train_on: Trains on groups (`loop.train_on`).
    """

    def __init__(self, run: Run, step: Step, train_on: TrainOn) -> None:
        self.run, self.config, self.step, self._train_on = run, run.config, step, train_on
        self._stack = ExitStack()
        self._order = PartOrder(run.config, run.handed_out)

    @property
    def number(self) -> int:
        """Number of the step."""
        return self.step.number

    def generate(self) -> list[Group]:
        """Generates groups for `data.prompts_per_step` further prompts and returns the groups; fewer or none at the end
        of the data, or if dynamic sampling finds no signal.

        Raises:
            PlanFault: The step has trained or evaluated, has its groups and `asynchrony.mode` is `one_step`, or called
                `generate` so often that it probably never ends.
            ActorFailed: An engine or a rollout worker failed, and none restarts.
            StaleTooFar: A token is older than `asynchrony.max_staleness` allows.
            WrongRoutes: An engine's expert routes do not match the tokens.
            UserError: A trajectory lacks the reward named by `algorithm.dynamic_sampling.reward`, or the generator or
                the chat template is unusable.
            Stopped: The run must end; the step is abandoned.
        """
        self._order.generate()
        return self._order.hand_out(self.run.rollouts.next_groups(self.step))

    def train(self, groups: Sequence[Group]) -> None:
        """Trains policy and critic on groups: log-probs, advantages over all of these groups, optimizer steps by
        `data.mini_batch_prompts`. Without groups trains nothing. Records the step's trajectories first, unless recorded
        already. The metrics of a second call replace those of the first.

        Raises:
            PlanFault: The value is no list of different groups that `generate` of this run returned, nothing was
                generated in this step, or the engines already have weights of this step.
            GracefulStop: A graceful end was requested before the step's trajectories were recorded; the step is
                abandoned.
            Stopped: An immediate end was requested.
            EngineDiffers: Engine and policy differ by more than `health.mismatch` allows.
            ActorFailed: A rank failed.
            ClusterError: The trajectories' arrays are lost, or writing took too long.
            WrongRoutes: Routes to replay are missing.
            UserError: Too many environments failed, or a function of the user is wrong.
            OSError: A file of the run could not be written.
        """
        self._order.train(groups)
        self._record_rollouts()
        if groups:
            self._train_on(self.run, self.step, [*groups])
            self.run.version = self.number
            self.run.end_if_engine_differs(self.step)

    def sync(self) -> None:
        """Sends the policy's weights to the engines, once in a step; does nothing if the step has not trained. A step
        that trained always ends with a sync, so that only parts that follow the sync need this call.

        Raises:
            PlanFault: The engines already have weights of this step.
            Stopped: An immediate end was requested.
            ActorFailed: A policy rank failed, or no engine could be updated.
            UserError: A process rejected the settings, or the next step's batch, complete before the sync, is unusable.
            OSError: A cached plan cannot be removed.
        """
        if self._order.sync():
            self.run.rollouts.before_sync(self.step)
            with self.step.phase("sync"):
                self.step.record(self.run.sync.sync(self.number))
            self.run.rollouts.synced(self.number)

    def evaluate(self) -> None:
        """Syncs if needed, and scores the evaluation prompts: records `eval/…`. Without this call, `evaluation.every`
        decides if the step is evaluated.

        Raises:
            PlanFault: Nothing was generated in this step.
            GracefulStop: A graceful end was requested before the step's trajectories were recorded; the step is
                abandoned.
            Stopped: An immediate end was requested.
            ActorFailed: A policy rank failed, or no engine is left and none restarts.
            ClusterError: The trajectories' arrays are lost, or writing took too long.
            UserError: Too many environments failed, or a process rejected the settings.
            OSError: A file could not be written, or a cached plan cannot be removed.
        """
        self._record_rollouts()
        self.sync_if_trained()
        self._order.evaluated = True
        self.run.evaluate(self.step)

    def record(self, metrics: Mapping[str, float]) -> None:
        """Sets metrics, by full name such as `mine/share`, in the step's row; replaces earlier values of the name.
        Raises PlanFault if a name is no text or a value no number."""
        self.step.record(checked_metrics(metrics))

    def sync_if_trained(self) -> None:
        """Syncs if the step trained and the engines do not have its weights. Raises the errors of `sync`: Stopped,
        ActorFailed, UserError, OSError."""
        if self._order.stale:
            self.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None:
            with self._stack:
                self._finish()
        else:
            self._stack.__exit__(kind, error, where)

    def _record_rollouts(self) -> None:
        """Ends the part of the step that a requested end of the run abandons: writes trajectories and their metrics."""
        self._order.check_generated()
        if not self._order.recorded:
            self._stack.enter_context(self.run.shutdown.defer())
            self.run.record_rollouts(self.step)
            self._order.recorded = True

    def _finish(self) -> None:
        run, step = self.run, self.step
        self._record_rollouts()
        self.sync_if_trained()
        if not self._order.evaluated and run.due(run.config.evaluation.every, step.number):
            run.evaluate(step)
        run.complete(step)
        run.save_if_due()
        run.health.end_if_stuck(step.number)


class PartOrder:
    """The functions of a step (`generate`, `train`, `sync`, …) called so far, and the rules of their order. A method of
    this class only checks and notes the call of the function with its name.

    Args:
        config: The settings.
        handed_out: The groups of the run.
    """

    def __init__(self, config: Config, handed_out: HandedOut) -> None:
        self.config, self.handed_out = config, handed_out
        self.generated = self.empty = 0
        self.recorded = self.trained = self.synced = self.evaluated = False

    @property
    def stale(self) -> bool:
        """True if the step trained and the engines do not have its weights."""
        return self.trained and not self.synced

    def generate(self) -> None:
        """Counts a call of `generate`. Raises PlanFault if the call is not allowed now."""
        if self.recorded:
            raise PlanFault("generate comes after train or evaluate; a step's groups are of one policy: generate first")
        if self.generated and self.config.asynchrony.mode == "one_step":
            raise PlanFault("generate is called twice; asynchrony.mode=one_step has one batch for a step; give off")
        if self.generated >= MOST_CALLS:
            raise PlanFault(
                f"generate is called more than {MOST_CALLS:,} times in a step; end the function's loop earlier"
            )
        if self.empty >= MOST_EMPTY:
            text = f"generate returned no groups {MOST_EMPTY} times in a row, as it always does at the end of the data"
            raise PlanFault(f"{text}; leave a loop of the function when generate returns none")
        self.generated += 1

    def check_generated(self) -> None:
        """Raises PlanFault if `generate` was not called in this step."""
        if not self.generated:
            raise PlanFault("the step has no groups; call generate in every step")

    def hand_out(self, groups: list[Group]) -> list[Group]:
        """Notes groups as returned by `generate` of this run, for the check in `train`, and returns the groups
        unchanged."""
        self.empty = 0 if groups else self.empty + 1
        self.handed_out.update({id(group): group for group in groups})
        return groups

    def train(self, groups: object) -> None:
        """Checks a call of `train` with the value `groups`, and notes that the step has trained unless `groups` is
        empty.

        Raises:
            PlanFault: `generate` was not called in this step; the engines already have this step's weights; `groups` is
                no list or tuple of groups that `generate` of this run returned; or a group occurs twice, unless dynamic
                sampling works with the mode `replace`.
        """
        if not isinstance(groups, list | tuple):
            raise PlanFault(f"train is given {type(groups).__name__}; allowed is a list of groups from generate")
        if not self.generated:
            raise PlanFault("train comes before generate; a step trains on groups of its own: generate first")
        if self.synced:
            raise PlanFault("train comes after sync; engines get one version of the weights in a step: train first")
        for group in groups:
            if not isinstance(group, Group):
                raise PlanFault(f"train is given a {type(group).__name__}; allowed is a list of groups from generate")
            if self.handed_out.get(id(group)) is not group:
                raise PlanFault("train is given a group that generate of this run did not return; give no copies")
        sampling = self.config.algorithm.dynamic_sampling
        copies = sampling.enabled and sampling.mode == "replace"  # generate itself returns groups several times
        if len({*map(id, groups)}) < len(groups) and not copies:
            raise PlanFault("train is given a group twice, which would count twice; give each group once")
        self.trained = self.trained or bool(groups)

    def sync(self) -> bool:
        """Notes a call of `sync`, and returns True if the step has trained, so that weights must be sent. Raises
        PlanFault if the engines already have weights of this step."""
        if self.synced:
            raise PlanFault("sync is called twice; engines get one version of the weights in a step: sync once")
        self.synced = self.trained
        return self.trained


def checked_metrics(metrics: object) -> dict[str, float]:
    """Returns metrics for a step's row as plain numbers; raises PlanFault unless all are numbers by name."""
    if not isinstance(metrics, Mapping):
        raise PlanFault(f"record is given {shown(metrics)}; allowed is a mapping of names with numbers")
    for name, value in metrics.items():
        if not isinstance(name, str) or not isinstance(value, Real):
            raise PlanFault(f"record is given {shown({name: value})}; allowed are names with numbers")
    return {name: float(value) for name, value in metrics.items()}


StepFunction = Callable[[StepPlan], object]


def one_update(plan: StepPlan) -> None:
    """Runs the built-in step: generates groups and trains; the sync follows at the end of the step.

    Raises:
        GracefulStop, Stopped: The run must end.
        EngineDiffers, StaleTooFar: A bound of `health.mismatch` or `asynchrony.max_staleness` is exceeded.
        ActorFailed, ClusterError: A process failed, or arrays are lost.
        WrongRoutes: Expert routes are missing or do not match the tokens.
        UserError: Too many environments failed, or a function of the user is wrong.
        OSError: A file of the run could not be written.
    """
    plan.train(plan.generate())


def step_function(config: Config) -> StepFunction:
    """Returns the function of `run.loop`; the built-in step without the setting.

    Raises:
        UserError: The function cannot be imported, is async or a generator, or cannot be called with a plan.
    """
    path = config.run.loop
    if path is None:
        return one_update
    function: StepFunction = imports.load(path, KEY, kind="function")
    if not callable(function):
        raise UserError("it is not callable; allowed is a function of a StepPlan", key=KEY, value=path)
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(kind(function) for kind in kinds):
        text = "it is async or has a yield, so that a call would run nothing"
        raise UserError(text, key=KEY, value=path, fix="write `def`, without await and yield")
    imports.check_takes(function, f"{KEY} = {path}", "a StepPlan", count=1)
    return function
