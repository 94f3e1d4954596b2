"""Random agents over HTTP and vLLM: the trained tokens are vLLM's, and the policy's log-probs of every branch agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.schema import AlgorithmConfig, RolloutConfig, SamplingConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.engines.vllm.spec import EngineSpec
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout.agent.renderer import Renderer
from skyrl_mega.rollout.generator import Generator
from tests.megatron.layouts import policy_logprobs
from tests.rollout.endpoint.test_trajectory import ENVIRONMENT, check_samples, check_tokens
from tests.support.batches import make_batch
from tests.support.engines import Recorder, build_model, serving, start_engine

LONGEST = 500
ROLLOUT = RolloutConfig(
    kv_cache_gib=0.1,
    max_turns=60,
    max_prompt_tokens=100,
    max_length=LONGEST,
    max_response_tokens=400,
    step_wise="merged",
    trajectory_timeout_s=300.0,
    sampling=SamplingConfig(max_tokens=20, stop=[*"Ze4#tqK(", "?", "xy"]),
)


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    with session(actors=1):
        yield


@pytest.mark.slow
@pytest.mark.nightly
def test_log_probs_of_every_branch_are_the_engines(tmp_path: Path) -> None:
    model = build_model(tmp_path / "moe", "qwen3_moe", seed=3, max_length=LONGEST)
    spec = EngineSpec(
        path=str(model), dtype="float32", device="cpu", rollout=ROLLOUT, max_length=LONGEST, weights="auto"
    )
    engine = start_engine("agents", spec, tmp_path, kind=Recorder)
    prompts = [
        Prompt(
            uid,
            [{"role": "user", "content": "hello"}],
            "random",
            {"extra_info": {"seed": f"v{uid}", "hurried": uid % 4 == 0, "vocabulary": 100}},
        )
        for uid in range(24)
    ]
    try:
        with Generator(serving(engine), Renderer(str(model)), ROLLOUT, ENVIRONMENT) as generator:
            groups = generator.generate(prompts, 1, ROLLOUT.sampling, seed="agents")
        seen = engine.call_one(0, "recording", timeout=180)
    finally:
        engine.shutdown()
    trajectories = [t for group in groups for t in group.trajectories]
    for place, t in enumerate(trajectories):
        assert not t.status.failed, t.metadata
        names = [name for name in seen if name.startswith(f"agents/{place}/")]
        recorded = [
            (
                Request(name, seen[name]["given"], 0, 0),
                Completion(name, seen[name]["produced"], seen[name]["logprobs"], seen[name]["finish"], ((0, 0),)),
            )
            for name in names
        ]
        check_tokens(t, recorded)
        check_samples(t)
    assert sum(t.metrics["agent_branches"] for t in trajectories) > 2 * len(trajectories)
    batch = make_batch(groups, AlgorithmConfig(), ROLLOUT)
    logprobs = policy_logprobs(model, batch.tokens, ranks=2, context=2)
    trained = batch.tokens["mask"].numpy() == 1
    assert trained.sum() == sum(t.written for t in trajectories) > 1000
    assert np.abs(logprobs - batch.tokens["rollout_logprobs"].numpy())[trained].max() < 1e-4
