"""Training for `benchmarks.learning_table`: a single set of processes trains every row and seed from the same weights
with a fresh optimizer. A row with other processes gets a separate run."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.learning_rows import FOLDER, SAMPLES, START, START_SEED, WARMUP, Row, rows
from skyrl_mega.cli import inputs, prepare
from skyrl_mega.config.checks import check
from skyrl_mega.config.schema import Config
from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.telemetry.run_dir import run_folder
from skyrl_mega.telemetry.trackers.trackers import open_trackers
from skyrl_mega.trainer import loop
from skyrl_mega.trainer.evaluation import Evaluator
from skyrl_mega.trainer.reference import ReferenceModel
from skyrl_mega.trainer.rollout_source import RolloutSource
from skyrl_mega.trainer.run import Run
from skyrl_mega.trainer.setup import open_run, stream_of

ACCURACY, PASS = "eval/addition/mean", f"eval/addition/pass_at_{SAMPLES}"
Result = dict[str, float | list[float]]


@dataclass
class Session:
    """Processes to train rows consecutively."""

    run: Run

    def train(self, row: Row, seed: int, steps: int) -> Result:
        """Trains a row from the start and returns the figures."""
        config = decided(row.config(seed, steps), self.run.config)
        check(config)
        folder = self.run.folder / f"{_plain(row.name)}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        with ExitStack() as stack:
            trackers = stack.enter_context(open_trackers(config, folder, self.run.console.say))
            trackers.start(config, None)
            run = self._restarted(config, folder)
            run.trackers = trackers
            return trained(run)

    def accuracy_at_the_start(self) -> Result:
        """Returns the scores before training, shared by all rows."""
        return scores(self._restarted(self.run.config, self.run.folder))

    def _restarted(self, config: Config, folder: Path) -> Run:
        """Returns a run with these processes before the first step: weights, optimizer, order of prompts, health."""
        old = self.run
        old.policy.set_algorithm(config.algorithm)
        old.policy.load(Path(START))
        old.policy.reset_optimizer(config.policy.optimizer)
        reference = None
        if config.reference.path:
            old.policy.keep_reference(Path(config.reference.path))
            reference = ReferenceModel(old.policy)
        old.sync.sync(0)
        stream = stream_of(config, len(old.rollouts.prompts))
        source = RolloutSource(config, old.rollouts.prompts, stream, old.rollouts.generator)
        evaluator = Evaluator(config, old.evaluator.prompts, old.evaluator.generator, old.console.say)
        parts = {"stream": stream, "rollouts": source, "evaluator": evaluator, "reference": reference}
        fresh = {"step": 0, "first_evaluation": {}, "last_evaluation": {}, "checkpoint_metrics": {}, "stream_state": {}}
        return replace(old, config=config, folder=folder, **parts, **fresh)


@contextmanager
def session(steps: int, say: Callable[[str], None]) -> Iterator[Session]:
    """Opens the processes. The first time, trains the start: a new model's supervised warm-up."""
    start = Path(START)
    config = rows()["grpo"].config(START_SEED, steps)
    if not start.exists():
        config = replace(config, warmup=replace(config.warmup, steps=WARMUP))
        say("the start's supervised warm-up comes first, once")
    with opened(config) as run:
        if not start.exists():
            partial = start.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            run.policy.export(partial, Path(config.model.path).absolute())
            partial.rename(start)
        yield Session(run)


def alone(row: Row, seed: int, steps: int) -> Result:
    """Trains a row with other processes, in a separate run from the same start."""
    config = row.config(seed, steps)
    name = f"{_plain(row.name)}-{seed}"
    shutil.rmtree(Path(FOLDER) / name, ignore_errors=True)
    model = replace(config.model, path=START, build=None)
    with opened(replace(config, model=model, run=replace(config.run, name=name))) as run:
        return trained(run)


def needs_processes(row: Row) -> bool:
    """Returns True if settings beyond losses, data, reference and optimizer differ from the common settings."""
    config, common = row.config(0, 1), rows()["grpo"].config(0, 1)
    return decided(config, common) != config


def decided(config: Config, started: Config) -> Config:
    """Returns a row's settings for processes started with other settings."""
    policy = replace(started.policy, optimizer=config.policy.optimizer)
    parts = {name: getattr(config, name) for name in ("run", "algorithm", "data", "reference", "warmup")}
    return replace(started, policy=policy, **parts)


@contextmanager
def opened(config: Config) -> Iterator[Run]:
    """Opens a run before the first step; output goes to the run's log."""
    check(config)
    inputs.check_inputs(config)
    log = Path(FOLDER) / f"{config.run.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out, Console(out) as console, run_folder(config) as folder:
        config = prepare.prepare(config, console)
        with open_run(config, folder, console) as run:
            yield run


def trained(run: Run) -> Result:
    """Runs all steps and returns the figures.

    accuracy and pass_at_n: held-out prompts, sampled as in training; greedy: accuracy at temperature 0. mismatch: the
    largest difference of log-probs between engine and policy at any token. reward: the mean of every step.
    """
    began, used = time.perf_counter(), cpu_seconds(run)
    loop.train(run)
    seconds, used = time.perf_counter() - began, cpu_seconds(run) - used
    steps = [row for row in read(run.trackers.path) if row["step"]]
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used, 2),
        "mismatch": max(row["mismatch/logprob_abs_max"] or 0.0 for row in steps if "mismatch/logprob_abs_max" in row),
        "entropy": round(steps[-1].get("policy/entropy") or 0.0, 4),
        "clipped": round(sum(row.get("policy/clip_fraction") or 0.0 for row in steps) / len(steps), 5),
        "skipped": sum(row.get("policy/steps_skipped") or 0.0 for row in steps),
        "reward": [round(row["reward/mean"] or 0.0, 4) for row in steps],
        **scores(run, run.last_evaluation),
    }


def scores(run: Run, sampled: dict[str, float] | None = None) -> Result:
    """Returns the accuracy on held-out prompts: sampled (unless already measured), and greedy."""
    greedy = replace(run.config, evaluation=replace(run.config.evaluation, temperature=0.0, samples=1))
    evaluators = (run.evaluator, Evaluator(greedy, run.evaluator.prompts, run.evaluator.generator, run.console.say))
    evaluations = []
    for evaluator, known in zip(evaluators, (sampled, None), strict=True):
        with run.console.phase("eval", total=evaluator.samples) as progress:
            evaluations.append(known or evaluator.evaluate(run.step, progress))
    names = {
        "accuracy": evaluations[0][ACCURACY],
        "pass_at_n": evaluations[0][PASS],
        "greedy": evaluations[1][ACCURACY],
    }
    return {name: round(value, 4) for name, value in names.items()}


def cpu_seconds(run: Run) -> float:
    """Returns the CPU time so far of driver, policy and engines, the cost of a row on a busy machine."""
    actors = [*run.policy.group.where, *run.sync.fleet.group.where]
    processes = [psutil.Process(), *(psutil.Process(actor.pid) for actor in actors)]
    processes += [child for process in processes[1:] for child in process.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _plain(name: str) -> str:
    return re.sub(r"\W+", "_", name)
