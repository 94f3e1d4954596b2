"""Every family in vLLM's CPU engine: log-probs of transformers, and nothing stale after syncs and sleep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.residency import ENGINE
from skyrl_mega.config.schema import Config, ModelConfig, RolloutConfig, WeightsConfig
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.sync import WeightSync
from tests.families import engines
from tests.families.engines import EngineResults
from tests.families.models import CORRECTION_BIAS, IN_FLOAT32_ENGINES, UNROUNDED, read_hf
from tests.support.engines import complete, difference_from_transformers, serving, spec_of, start_engine
from tests.support.ranks import free_port, run_ranks
from tests.support.shards import REQUESTS, cut, holders

TOLERANCE = 1e-4
FLOAT32 = [(name, "float32") for name in IN_FLOAT32_ENGINES]
BFLOAT16 = [(name, "bfloat16") for name in ("glm4_moe",)]
CASES = FLOAT32 + BFLOAT16
"""Models, with the dtype of policy and engine."""


@pytest.fixture(scope="module")
def results(families: Path) -> dict[str, EngineResults]:
    answers = run_ranks(engines.POLICY.ranks + 1, engines.sweep, families, free_port(), CASES, timeout=800)
    results: dict[str, EngineResults] = answers[-1]
    return results


def test_log_probs_are_those_of_transformers_after_every_sync(results: dict[str, EngineResults]) -> None:
    differences = {
        (name, occasion): value
        for name, _ in FLOAT32
        for occasion, value in results[f"{name} float32"].differences.items()
    }
    assert len(differences) == len(FLOAT32) * (len(engines.SYNCS) + 1)
    assert not {case: value for case, value in differences.items() if not value < TOLERANCE}


def test_nothing_of_an_engine_is_stale_after_a_sync(results: dict[str, EngineResults]) -> None:
    """Compares parameters, buffers and derived tensors bit by bit with an engine that loaded the same files."""
    for name, result in results.items():
        assert result.compared > 10
        assert not {occasion: stale for occasion, stale in result.stale.items() if stale}, name
        assert result.check == [], name


def test_correction_biases_arrive_unrounded_in_a_bfloat16_run(
    families: Path, results: dict[str, EngineResults]
) -> None:
    for name, _ in BFLOAT16:
        biases = results[f"{name} bfloat16"].biases
        source = load_file(families / f"{name}-0-bfloat16" / "model.safetensors")
        expected = {tensor: values for tensor, values in source.items() if tensor.endswith(CORRECTION_BIAS)}
        assert expected and expected.keys() <= biases.keys()  # vLLM registers a bias under two names
        for tensor, values in expected.items():
            assert values[0] == biases[tensor][0] == UNROUNDED
            assert biases[tensor].dtype == torch.float32 and torch.equal(biases[tensor], values), tensor


def test_float32_parameters_of_a_bfloat16_engine_are_those_that_blocks_name(
    families: Path, results: dict[str, EngineResults]
) -> None:
    for name, _ in BFLOAT16:
        hf, dtypes = read_hf(families / f"{name}-0"), results[f"{name} bfloat16"].dtypes
        parameters = architecture(hf).engine_shard(hf, 1, 0).params
        float32 = {parameter for parameter in parameters if dtypes.get(parameter) == torch.float32}
        assert float32 == architecture(hf).describe(hf).engine_float32


# ---- several workers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with session(actors=8):
        yield


def compare(engines: ActorGroup, path: Path) -> None:
    """Checks the log-probs of an engine's answers."""
    completions = complete(engines, REQUESTS)
    for request in REQUESTS:
        assert difference_from_transformers(path, request, completions[request.id]) < TOLERANCE


TWO_WORKERS: list[tuple[str, dict[str, bool]]] = [
    *((name, {}) for name in IN_FLOAT32_ENGINES),
    ("gpt_oss", {"enable_expert_parallel": True}),
]
"""Models, with options of vLLM."""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "options"), TWO_WORKERS, ids=[" ".join([n, *o]) for n, o in TWO_WORKERS])
def test_two_workers_take_the_weights_of_four_ranks(
    ray: None, families: Path, tmp_path: Path, name: str, options: dict[str, bool]
) -> None:
    """Loads an engine of TP2, syncs a policy of TP2·EP2·PP2 twice and after sleep; log-probs are transformers', and
    every tensor of each worker is the one that vLLM itself loaded."""
    paths = [families / f"{name}-{seed}" for seed in (1, 0)]
    rollout, hf = RolloutConfig(tensor=2, kv_cache_gib=0.05, options=options), read_hf(paths[0])
    config = Config(model=ModelConfig(dtype="float32"), rollout=rollout, weights=WeightsConfig(timeout_s=120))
    parallel = ParallelDims(ranks=4, tensor=2, expert=2, pipeline=2)
    extension = {"worker_extension_cls": "tests.support.compared.Fingerprints"}
    spec = spec_of(paths[1], rollout, sleeps=ENGINE, weights="auto", extra=extension)
    group = start_engine("engine", spec, tmp_path)
    fleet = serving(group)
    policy = holders(parallel, hf, tmp_path)
    try:
        compare(group, paths[1])
        loaded = group.call_one(0, "workers", "fingerprints", timeout=120)
        assert len(loaded) == 2 and len(loaded[0]) > 10
        sync = WeightSync(policy, fleet, hf, cut(config, parallel), plans=tmp_path / "plans")
        for version, path in enumerate([*paths, paths[1]], 1):
            policy.call_all("load", path, timeout=120)
            if version == 3:
                fleet.sleep(ENGINE)
                fleet.wake(["engine_weights"])
            sync.sync(version)
            fleet.wake(["kv_cache"])
            compare(group, path)
            fingerprints = group.call_one(0, "workers", "fingerprints", timeout=120)
            changed = [differing(*pair) for pair in zip(loaded, fingerprints, strict=True)]
            assert all(changed) if path == paths[0] else not any(changed), (version, changed)
            biases = group.call_one(0, "workers", "second_biases", timeout=120)
            check_second_biases(biases, path, by_expert=bool(options))
            assert [c.different for c in sync.check()] == [[], []]
    finally:
        fleet.close()
        policy.shutdown()
        group.shutdown()


def differing(expected: dict[str, str], actual: dict[str, str]) -> list[str]:
    """Returns the names of tensors that are unlike."""
    return sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))


def check_second_biases(biases: list[dict[str, list[list[float]]]], path: Path, by_expert: bool) -> None:
    """Checks the biases of the experts' second projections: each worker has its own experts', or the first worker all
    and the other worker zeros, because the workers' sums are added."""
    files = {
        name: bias for name, bias in load_file(path / "model.safetensors").items() if name.endswith("down_proj_bias")
    }
    assert [len(each) for each in biases] == [len(files)] * 2
    for number, expected in enumerate(files[name] for name in sorted(files)):
        first, second = (torch.tensor(list(each.values())[number]) for each in biases)
        if by_expert:
            assert torch.equal(torch.cat([first, second]), expected)
        else:
            assert torch.equal(first, expected) and not second.any() and second.shape == expected.shape
