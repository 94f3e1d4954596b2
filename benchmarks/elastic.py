"""Joins, leaves and kills of engines in an asynchronous run, and the speed of 1, 2 and 4 engines.

    .venv/bin/python -m benchmarks.elastic [--events 100] [--seed 0] [--no-file]

Real parts: Ray actors, fleet, weight sync, router, rollout service, admission (`asynchrony.mode=full`). Simulated: an
engine's token is a sleep, a weight transfer moves nothing, training is a sleep.

Churn: at random moments an engine joins, leaves (with and without time for its requests), or is killed; a few joins
hang. Checks: every trajectory requested is trained on exactly once, no token is staler than allowed, no sync takes
longer than `BOUND_S`, no restart is spent on a leave, and the run ends.

Scale: steps per second with 1 engine, then 2, then 4, joined while the run goes on; beside the simulator's steps per
second for the same work. Exits with 1 if a check fails, or if twice the engines are not twice as fast within 20 %.
Writes benchmarks/results/elastic.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.elastic_engine import QuietPolicy, SleepEngine
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup, ActorSpec
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.cluster.supervised_group import ALIVE, State
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import BuildConfig, Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.engines.base import Request, Sampling
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.rollout.event_loop import BackgroundLoop
from skyrl_mega.rollout.gate import Start
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.rollout.service import RolloutService
from skyrl_mega.simulation.engines import Speed
from skyrl_mega.simulation.rates import Rates
from skyrl_mega.simulation.simulate import simulate
from skyrl_mega.simulation.workload import LogNormal, Synthetic
from skyrl_mega.telemetry.console import Console
from skyrl_mega.telemetry.events import Event
from skyrl_mega.trainer.asynchronous import Asynchronous
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.trajectory import Status, Trajectory
from skyrl_mega.weights.sync import MARGIN_S, PLAN_S, PROBE_S, SETTLE_S, WeightSync

ROOT = Path(__file__).parents[1]
PROMPTS, SAMPLES, STALENESS, PLACES = 8, 4, 2, 4
"""Prompts of a step, samples of a prompt, `asynchrony.max_staleness`, sequences of an engine."""
TOKENS, TOKEN_S, TRAIN_S = 24, 0.04, 0.2
"""Tokens of an answer, seconds of a token, seconds of a step's training."""
TIMEOUT_S = 5.0
"""`weights.timeout_s`."""
BOUND_S = (TIMEOUT_S + PLAN_S + MARGIN_S) + SETTLE_S + PROBE_S + MARGIN_S
"""Longest allowed sync: one failed attempt within its limits; the next attempt takes less than a second."""
START_S = 40.0
"""`cluster.start_timeout_s`: a join that hangs is given up then."""
MOST = 8
"""Most engines at once."""
WITHIN = 0.2


class Player:
    """A player of trajectories of one to three turns, without environments."""

    def __init__(self, router: Router, turns: int) -> None:
        self.router, self.turns = router, turns

    async def play(self, prompt: Prompt, sample: int, name: str, start: Start | None = None) -> Trajectory:
        """Plays a trajectory on the engines."""
        t = Trajectory(
            prompt, sample, array("i", [1, 2]), array("b", [0, 0]), array("f", [0.0, 0.0]), 2, 0.0, Status.COMPLETED, 0
        )
        if start is not None:
            await start()
        t.metadata["name"] = name
        random = Random(name)
        for turn in range(random.randint(1, self.turns)):
            length = TOKENS if self.turns == 1 else random.randint(4, 2 * TOKENS)
            completion = await self.router.generate(Request(f"{name}/{turn}", list(t.tokens), length, 0))
            t.versions += [(version, len(t.tokens) + at) for version, at in completion.versions]
            t.tokens.extend(completion.tokens)
            t.mask.extend([1] * len(completion.tokens))
            t.logprobs.extend(completion.logprobs)
        t.turns = turn + 1
        return t


@dataclass
class Run:
    """An asynchronous run of real parts and simulated engines."""

    fleet: Fleet
    sync: WeightSync
    rollouts: Asynchronous
    step: int = 0
    trained: list[str] = field(default_factory=list)
    """Names of the trajectories trained on."""
    syncs: list[float] = field(default_factory=list)
    """Seconds of each sync."""
    stalest: int = 0

    def synced(self) -> None:
        """Syncs the weights of the present step."""
        start = time.monotonic()
        self.sync.sync(self.step)
        self.syncs.append(time.monotonic() - start)
        self.rollouts.synced(self.step)

    def advance(self) -> None:
        """Runs a step."""
        step = Step(self.step + 1, Console(StringIO()))
        groups = self.rollouts.next_groups(step)
        self.trained += [t.metadata["name"] for group in groups for t in group.trajectories]
        self.stalest = max(self.stalest, int(step.metrics["asynchrony/staleness_max"]))
        time.sleep(TRAIN_S)
        self.step += 1
        self.synced()


@contextmanager
def running(engines: int, turns: int, say: Any) -> Iterator[Run]:
    """Starts a run."""
    config = settings(engines)
    size = 10**5
    with session(actors=MOST + 2), tempfile.TemporaryDirectory() as folder, BackgroundLoop() as loop:
        logs = Path(folder, "logs")
        policy = ActorGroup.spawn("policy", QuietPolicy, [{}], timeout=120, logs=logs)
        arguments = [dict(token_s=TOKEN_S, places=PLACES)] * engines
        group = ActorGroup.spawn("engine", SleepEngine, arguments, timeout=120, logs=logs)
        facts = group.call_all("start", timeout=120)
        fleet = Fleet(group, restarts=1000, start_timeout_s=START_S, say=say, facts=facts)
        hf = hf_config(BuildConfig(architecture="qwen3_moe", hidden=64, experts=4))
        sync = WeightSync(policy, fleet, hf, config, plans=Path(folder, "plans"), say=lambda line: None)
        router = Router(fleet, Sampling(), PLACES, 600.0, service=True)
        service = RolloutService(Player(router, turns), fleet, loop, 60.0)
        prompts = [Prompt(i, [], "mine", {}) for i in range(size)]
        stream = PromptStream(size, batch=PROMPTS)
        run: Run
        rollouts = Asynchronous(config, prompts, stream, service, look=lambda: None, refill=lambda: run.synced())
        run = Run(fleet, sync, rollouts)
        try:
            run.synced()
            yield run
        finally:
            fleet.close()
            group.shutdown()
            policy.shutdown()


def settings(engines: int) -> Config:
    """Returns the settings of a run."""
    config: Config = compose(
        None,
        [
            *("model.path=x", "data.train=[x]", "cluster.device=cpu", "policy.ranks=1", f"rollout.engines={engines}"),
            *(f"rollout.elastic.most={MOST}", "asynchrony.mode=full", f"asynchrony.max_staleness={STALENESS}"),
            *(f"data.prompts_per_step={PROMPTS}", f"data.samples_per_prompt={SAMPLES}", "model.dtype=float32"),
            *(f"weights.timeout_s={TIMEOUT_S}", f"rollout.concurrency={PLACES}"),
        ],
    )
    config.run.steps = None
    return config


class Churn:
    """Random joins, leaves and kills of engines."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.random = fleet, Random(seed)
        self.counts: Counter[str] = Counter()

    def event(self) -> None:
        """Lets one thing happen."""
        fleet = self.fleet
        present, up = fleet.ranks(*ALIVE), fleet.up
        what = self.random.choice(["join", "leave", "kill"])
        if what == "join" and len(present) < MOST:
            hangs = self.random.random() < 0.1
            arguments = dict(token_s=TOKEN_S, places=PLACES, start_s=10 * START_S if hangs else self.random.random())
            fleet.add(ActorSpec(SleepEngine, arguments))
            self.counts["joins that hang" if hangs else "joins"] += 1
        elif what == "leave" and len(up) > 1:
            try:
                fleet.leave(self.random.choice(up), "removed by the benchmark", self.random.choice([0.01, 0.5, 10.0]))
                self.counts["leaves"] += 1
            except UserError:  # the others died meanwhile
                return
        elif what == "kill" and up:
            os.kill(fleet.group.where[self.random.choice(up)].pid, signal.SIGKILL)
            self.counts["kills"] += 1


def churn(events: int, seed: int) -> dict[str, Any]:
    """Runs with random events and returns what was observed."""
    said: list[Event] = []
    with running(2, 3, said.append) as run:
        chance = Churn(run.fleet, seed)
        moment = time.monotonic()

        def look() -> None:
            nonlocal moment
            if time.monotonic() > moment and chance.counts.total() < events:
                chance.event()
                moment = time.monotonic() + chance.random.uniform(0.2, 3.0)
            run.fleet.finish_joins()

        run.rollouts.look = look
        until = time.monotonic() + 3600
        while chance.counts.total() < events and time.monotonic() < until:
            run.advance()
            look()
        for _ in range(STALENESS + 2):
            run.advance()
        requested = run.rollouts.requested * SAMPLES
        held = {name for ticket in run.rollouts.service.under_way.values() for name in ticket.names}
        held |= {name for done in run.rollouts.done.values() for name in done.ticket.names}
        kinds = Counter(getattr(event, "kind", "line") for event in said)
        states = Counter(state.value for state in run.fleet.states)
    times = Counter(run.trained)
    return {
        "seed": seed,
        "events": dict(chance.counts),
        "reported": dict(kinds),
        "states": dict(states),
        "steps": run.step,
        "trajectories": len(run.trained),
        "doubled": sum(count > 1 for count in times.values()),
        "lost": requested - len({*times} | held),
        "staleness_max": run.stalest,
        "staleness_allowed": STALENESS,
        "sync_s": {"median": round(median(run.syncs), 3), "max": round(max(run.syncs), 3), "bound": BOUND_S},
        "restarts_spent": 2000 - run.fleet.restarts - run.fleet.joined_restarts,
    }


def scale(steps: int) -> list[dict[str, float]]:
    """Measures 1, 2 and 4 engines, the later ones joined, beside the simulator."""
    rows = []
    with running(1, 1, lambda line: None) as run:
        for engines in (1, 2, 4):
            while len(run.fleet.ranks(*ALIVE)) < engines:
                run.fleet.add(ActorSpec(SleepEngine, dict(token_s=TOKEN_S, places=PLACES)))
            while run.fleet.ranks(State.JOINING):
                run.fleet.finish_joins()
                time.sleep(0.05)
            for _ in range(STALENESS + 2):
                run.advance()
            start = time.monotonic()
            for _ in range(steps):
                run.advance()
            seconds = (time.monotonic() - start) / steps
            sync_s = median(run.syncs[-steps:])
            rows.append(
                {"engines": engines, "step_s": seconds, "sync_s": sync_s, "simulated_s": simulated(engines, sync_s)}
            )
    return rows


def simulated(engines: int, sync_s: float) -> float:
    """Returns the simulator's seconds of a step."""
    speed = Speed((0.0, *[TOKEN_S] * PLACES), prefill_s=0.0, cache_tokens=1e9)
    tokens = PROMPTS * SAMPLES * (TOKENS + 2)
    rates = Rates(engines, speed, train_s=TRAIN_S / tokens, sync_s=sync_s)
    workload = Synthetic(2, LogNormal(TOKENS, 0.0), LogNormal(0.0, 0.0), 1, TOKENS)
    return simulate(settings(engines), rates, workload, steps=30).seconds


def main() -> int:
    """Measures, prints and writes; returns 0 if all checks hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12, help="measured steps for each number of engines")
    parser.add_argument("--no-file", action="store_true", help="leave benchmarks/results alone")
    args = parser.parse_args()
    rows = scale(args.steps)
    for row in rows:
        print("  ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
    ratios = {name: [round(a[name] / b[name], 3) for a, b in pairwise(rows)] for name in ("step_s", "simulated_s")}
    print(f"twice the engines are faster by {ratios}", flush=True)
    observed = churn(args.events, args.seed)
    print(json.dumps(observed, indent=1))
    good = (
        observed["doubled"] == observed["lost"] == 0
        and observed["staleness_max"] <= STALENESS
        and observed["sync_s"]["max"] <= BOUND_S
        and all(abs(ratio / 2 - 1) <= WITHIN for of in ratios.values() for ratio in of)
    )
    if not args.no_file:
        result = {"scale": rows, "faster": ratios, "churn": observed}
        (ROOT / "benchmarks" / "results" / "elastic.json").write_text(json.dumps(result, indent=1) + "\n")
    print("all checks hold" if good else "a check FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
