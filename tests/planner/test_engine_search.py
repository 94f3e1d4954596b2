"""The search for engines next to a policy, against trying every share of every cut with every choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyrl_mega.config.derived import length_limit
from skyrl_mega.config.schema import Config
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import fit
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.engine_search import FRACTIONS, KEEPS, PolicyRanks, engine_choices, fastest_engines
from skyrl_mega.planner.memory import engine_memory
from skyrl_mega.planner.moves import residency_time
from skyrl_mega.planner.shared import shared_gpus
from skyrl_mega.planner.times import generate_time, step_time, time_without_generation
from tests.planner.test_residency import model, shared
from tests.weights.grids import REAL

LAYOUTS = [{"tensor": 2, "expert": 8}, {"tensor": 4, "pipeline": 2, "expert": 4}, {"expert": 16}]


def case(sizes: dict[str, int], gib: float, recompute: str) -> tuple[Config, ParallelDims]:
    c = shared(None)
    c.cluster.gpu_memory_gib, c.policy.recompute = gib, recompute
    c.rollout.concurrency, c.rollout.max_prompt_tokens, c.rollout.sampling.max_tokens = 1024, 2048, 2048
    c.data.prompts_per_step, c.data.samples_per_prompt = 512, 8
    for name, size in sizes.items():
        setattr(c.policy.layout, name, size)
    for name in {"tensor", "pipeline", "expert"} - set(sizes):
        setattr(c.policy.layout, name, 1)
    return c, ParallelDims.from_config(c.policy.layout, 16)


@pytest.mark.parametrize("gib", [60.0, 79.1, 139.0])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("recompute", ["full", "none"])
def test_the_fastest_that_fits_is_found(sizes: dict[str, int], gib: float, recompute: str) -> None:
    c, parallel = case(sizes, gib, recompute)
    d = model()
    best: float | None = None
    planned = batch(c, parallel)
    for tensor in (1, 2, 4, 8):
        for fraction in (*FRACTIONS[True], c.rollout.memory_fraction):
            for dealt in (False, True)[: 1 + (tensor > 1)]:
                options = {"enable_expert_parallel": True} if dealt else {}
                cut = replace(c.rollout, tensor=tensor, engines=16 // tensor, memory_fraction=fraction, options=options)
                cut_config = replace(c, rollout=cut)
                if engine_memory(cut_config, d).tokens < length_limit(cut):
                    continue
                seconds = generate_time(cut_config, d, planned)
                for keep in KEEPS:
                    tried = replace(cut_config, residency=replace(c.residency, keep=None if keep is None else [*keep]))
                    if all(gpu.fits(strict=True) for gpu in shared_gpus(tried, d, parallel)):
                        total = seconds + residency_time(tried, d, parallel)
                        best = total if best is None else min(best, total)
    candidates = []
    for pair in fastest_engines(c, PolicyRanks(c, d, parallel), engine_choices(c, d, 16)):
        settings = replace(
            c, rollout=pair.engine.rollout(pair.fraction), residency=replace(c.residency, keep=pair.keep)
        )
        fit.check(settings, REAL["30B"], strict=True)
        assert engine_memory(settings, d).tokens == pair.tokens
        candidates.append(pair.seconds + residency_time(settings, d, parallel))
        assert time_without_generation(settings, d, parallel) + candidates[-1] == pytest.approx(
            step_time(settings, d, parallel).step
        )
    assert min(candidates, default=None) == (None if best is None else pytest.approx(best))


def test_layouts_are_ordered_by_the_groups_trained_on() -> None:
    """With few rounds of dynamic sampling a step trains on fewer groups; the search counts as the dry run does."""
    c, parallel = case(LAYOUTS[0], 79.1, "full")
    c.algorithm.dynamic_sampling = replace(c.algorithm.dynamic_sampling, enabled=True, max_rounds=1, oversample=1.0)
    d = architecture(REAL["30B"]).describe(REAL["30B"])
    planned = step_time(c, d, parallel)
    c.algorithm.dynamic_sampling.enabled = False
    assert planned.train < step_time(c, d, parallel).train
    c.algorithm.dynamic_sampling.enabled = True
    assert time_without_generation(c, d, parallel) == pytest.approx(
        planned.step - planned.generate - planned.residency - planned.tools
    )


def test_a_choice_of_the_users_own_is_tried_too() -> None:
    c, parallel = case(LAYOUTS[0], 79.1, "full")
    c.residency.keep = ["engine_weights"]
    d = architecture(REAL["30B"]).describe(REAL["30B"])
    keeps = [pair.keep for pair in fastest_engines(c, PolicyRanks(c, d, parallel), engine_choices(c, d, 16))]
    assert ["engine_weights"] in keeps and [] in keeps
    c.algorithm.advantage, c.cluster.nodes = "gae", 4
    keeps = [pair.keep for pair in fastest_engines(c, PolicyRanks(c, d, parallel), engine_choices(c, d, 16))]
    assert ["critic"] in keeps, "a critic has GPUs of its own and stays"
