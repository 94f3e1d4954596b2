"""Router replay of a real engine's routes, over several turns and cached prefixes."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from skyrl_mega.config.schema import AlgorithmConfig, EnvironmentConfig, MoeConfig, RolloutConfig, SamplingConfig
from skyrl_mega.engines.base import Completion, Request, Sampling
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.spec import environment
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.routes import COLUMN, WrongRoutes
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.rollout.agent.agent_loop import Agent
from skyrl_mega.rollout.agent.env_pool import EnvPool
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.trainer.replay import check_routes
from skyrl_mega.trajectories.sequences import Sequences
from skyrl_mega.trajectories.trajectory import Group, Trajectory
from tests.megatron import layouts
from tests.support.batches import make_batch
from tests.support.engines import build_model, spec_of
from tests.support.ranks import run_ranks

ROLLOUT = RolloutConfig(
    kv_cache_gib=0.1,
    max_turns=3,
    max_prompt_tokens=60,
    max_length=128,
    max_response_tokens=80,
    sampling=SamplingConfig(max_tokens=16),
    options={"block_size": 32},  # makes most of a prompt a cached prefix
)
LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (1, {}),
    (2, {"tensor": 2, "expert": 2}),
    (2, {"pipeline": 2, "virtual_pipeline": 2}),
]


class Direct:
    """A `rollout.routing.router.Router` for an engine in this process, with a call per request."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine

    async def generate(self, request: Request) -> Completion:
        """Generates the answer to a request."""
        async for ended in self.engine.generate_many([request], Sampling()):
            for completion in ended:
                return completion
        raise AssertionError(request.id)


def play(rank: int, address: str, model: Path) -> list[Trajectory]:
    """Plays several turns with an engine that returns routes; afterwards requests stale prefixes and routes."""
    spec = replace(spec_of(model, ROLLOUT, weights="auto"), routes=True)
    os.environ.update(environment(spec))
    users = EnvironmentConfig(classes={"talk": "tests.rollout.user_envs:Talk"})
    prompts = [Prompt(i, [{"role": "user", "content": f"{i:02d} " * 12}], "talk", {}) for i in range(8)]

    async def all_of_it() -> list[Trajectory]:
        engine = VllmEngine(spec)
        await engine.start()
        try:
            return await played(engine)
        finally:
            engine.llm.shutdown()  # the core process would outlive this process, which is killed after its answer

    async def played(engine: VllmEngine) -> list[Trajectory]:
        agent = Agent(Direct(engine), Renderer(str(model)), users, TrajectoryLimits.of(ROLLOUT), EnvPool(8))  # type: ignore[arg-type]
        asked = [(prompt, sample) for prompt in prompts for sample in range(4)]
        trajectories = list(await asyncio.gather(*(agent.play(*one, str(i)) for i, one in enumerate(asked))))
        await engine.workers("routes_version", 5)  # simulates a sync without dropping the cached prefixes
        await engine.llm.update_weight_version("5")
        again = Request("stale", trajectories[0].tokens, 4, 0)
        stale = r"at position 0 are of weight version 0, but the request was sampled with \[5\]"
        with pytest.raises(WrongRoutes, match=stale):
            await Direct(engine).generate(again)
        return trajectories

    return asyncio.run(all_of_it())


def batch_of(trajectories: list[Trajectory]) -> Sequences:
    assert max(t.turns for t in trajectories) > 1
    groups = [Group(t.prompt, trajectories[i : i + 4]) for i, t in enumerate(trajectories) if not i % 4]
    return make_batch(groups, AlgorithmConfig(), ROLLOUT).tokens


def distance(
    rank: int, address: str, path: Path, parallel: ParallelDims, batch: Sequences, replay: str
) -> dict[str, float] | None:
    """Returns sum and count of |log π_engine − log π| over the policy's tokens, and the replay counts."""
    config = layouts.policy_config(micro_tokens=400, moe=MoeConfig(replay=replay))
    opened = layouts.open_rank(rank, address, path, parallel, config, torch.bfloat16)
    _, micros = layouts.deal(batch, opened)
    answer = opened.logprobs(micros)
    at = parallel.coordinates(rank)
    if answer is None or at.tp or at.cp:
        return None
    apart = [
        (values - micro["rollout_logprobs"]).abs()[micro["mask"] != 0]
        for micro, (values, _) in zip(micros, answer, strict=True)
    ]
    return {
        "sum": float(sum(part.sum() for part in apart)),
        "tokens": float(sum(map(len, apart))),
        **(opened.replay.metrics() if opened.replay else {}),
    }


def mismatch(path: Path, batch: Sequences, replay: str, ranks: int = 1, **sizes: int) -> tuple[float, dict[str, float]]:
    answers = run_ranks(ranks, distance, path, layouts.layout(ranks, **sizes), batch, replay)
    measured: list[dict[str, Any]] = [answer for answer in answers if answer]
    return sum(a["sum"] for a in measured) / sum(a["tokens"] for a in measured), measured[0]


@pytest.mark.slow
def test_the_engines_routes_halve_the_mismatch_of_bfloat16(tmp_path: Path) -> None:
    """Compares the mismatch with and without replay: the engine computes in float32 and the policy in bfloat16 with the
    same weights, as some CPUs cannot run vLLM in bfloat16. Every token has routes, and each pass checks the routers of
    every layout against the routes."""
    model = build_model(tmp_path / "moe", "qwen3_moe", seed=3, layers=4, experts=16)
    file = model / "model.safetensors"
    save_file({k: v.bfloat16().float() for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    batch = batch_of(run_ranks(1, play, model)[0])
    check_routes(batch)
    routed = (batch[COLUMN] > 0).all(-1).all(-1)
    unrouted = np.setdiff1d(np.arange(len(batch.tokens)), routed.nonzero()[:, 0].numpy())
    assert set(unrouted) <= set((batch.lengths.cumsum(0) - 1).tolist())
    off, _ = mismatch(model, batch, "off")
    for ranks, sizes in LAYOUTS:
        replayed, counts = mismatch(model, batch, "rollout", ranks, **sizes)
        print(f"{sizes}: mismatch {off:.5f} without, {replayed:.5f} with replay; {counts}")
        assert replayed < off / 2
        for layer in range(4):
            assert counts[f"replay_wrong_{layer}"] == 0
            assert 0 < counts[f"replay_differs_{layer}"] < 0.2 * counts[f"replay_replayed_{layer}"]
