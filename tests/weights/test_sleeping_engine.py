"""Sleeping engines: weights and cache release and regain memory, and no stale result is served."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray as ray_module

from skyrl_mega.cluster.errors import ActorFailed
from skyrl_mega.cluster.fleet import Fleet, NoServingActor
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.cluster.ray_session import session
from skyrl_mega.config.residency import ENGINE
from skyrl_mega.config.schema import Config, ModelConfig, RolloutConfig, WeightsConfig
from skyrl_mega.config.schema.drafts import DraftsConfig
from skyrl_mega.engines.base import Request
from skyrl_mega.engines.presence import CACHE, WEIGHTS
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.sync import WeightSync
from tests.support.engines import build_model, complete, spec_of, start_engine
from tests.support.shards import REQUESTS, cut, holders

SIZES: dict[str, Any] = {"hidden": 512, "experts": 8, "expert_ffn": 512, "heads": 8, "head_dim": 64}
CACHE_GIB = 0.1
EXACT = 0.05
"""The largest relative difference between the process's memory and the computed bytes."""


@dataclass
class Place:
    """An engine, a policy as the source of weights, and the answers before the first sleep."""

    model: Path
    policy: ActorGroup
    engines: ActorGroup
    fleet: Fleet
    sync: WeightSync
    answers: list[tuple[list[int], list[float]]] = field(default_factory=list)

    def ask(self) -> list[tuple[list[int], list[float]]]:
        """Returns tokens and log-probs of all requests, computed with an empty cache."""
        self.fleet.ask("forget", timeout=120)
        completions = complete(self.engines, REQUESTS)
        return [(list(completions[r.id].tokens), list(completions[r.id].logprobs)) for r in REQUESTS]

    def call(self, method: str, *args: Any) -> Any:
        return ray_module.get(getattr(self.engines.actors[0], method).remote(*args), timeout=120)

    def resident(self) -> int:
        """Returns the resident bytes of the single worker."""
        return int(self.call("workers", "resident")[0])

    def rest_and_return(self, version: int = 2) -> None:
        """Runs the engine side of a step: sleep, weights for a sync, cache for the next generation."""
        self.fleet.sleep(ENGINE)
        self.fleet.wake([WEIGHTS])
        self.sync.sync(version)
        self.fleet.wake([CACHE])


@contextmanager
def place_of(
    folder: Path,
    kind: str,
    tensor: int = 1,
    *,
    drafts: DraftsConfig | None = None,
    routes: bool = False,
    prepare: Callable[[Path], None] | None = None,
    **sizes: Any,
) -> Iterator[Place]:
    """Yields a place with an engine of `tensor` workers; `prepare` changes the model's files first."""
    model = build_model(folder / kind, kind, 0, **sizes)
    if prepare is not None:
        prepare(model)
    hf = json.loads((model / "config.json").read_text())
    rollout = RolloutConfig(kv_cache_gib=CACHE_GIB, tensor=tensor, drafts=drafts or DraftsConfig())
    weights = WeightsConfig(bucket_mib=1, timeout_s=60)
    config = Config(model=ModelConfig(dtype="float32"), rollout=rollout, weights=weights)
    extension = {"worker_extension_cls": "tests.support.sleeping.GarbageAfterWake"}
    engines = start_engine("engine", spec_of(model, rollout, sleeps=ENGINE, extra=extension, routes=routes), folder)
    fleet = Fleet(engines, restarts=2, start_timeout_s=300)
    parallel = ParallelDims(ranks=1)
    policy = holders(parallel, hf, folder)
    policy.call_all("load", model, timeout=120)
    place = Place(
        model, policy, engines, fleet, WeightSync(policy, fleet, hf, cut(config, parallel), plans=folder / "plans")
    )
    place.sync.sync(1)
    place.answers = place.ask()
    yield place
    fleet.close()
    policy.shutdown()
    engines.shutdown()


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    with session(actors=8):
        yield


@pytest.fixture(scope="module")
def place(ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place_of(tmp_path_factory.mktemp("sleep"), "qwen3_moe", **SIZES) as new_place:
        yield new_place


def computed(place: Place) -> dict[str, int]:
    """Returns the bytes of each part: CPU kernels pack embedding and output projection a second time, next to the
    parameter.
    """
    hf = json.loads((place.model / "config.json").read_text())
    weights = 4 * sum(piece.box.numel for piece in architecture(hf).engine_shard(hf, 1, 0).pieces)
    return {WEIGHTS: weights + 2 * 4 * hf["vocab_size"] * hf["hidden_size"], CACHE: int(CACHE_GIB * 2**30)}


def test_memory_goes_and_comes_back_and_log_probs_are_the_same_bits(place: Place) -> None:
    place.rest_and_return()  # the cache's pages are touched for the first time
    assert place.ask() == place.answers
    parts = computed(place)
    awake = place.resident()
    place.fleet.sleep([CACHE])
    place.fleet.sleep([CACHE])
    without_cache = place.resident()
    assert awake - without_cache == pytest.approx(parts[CACHE], rel=EXACT)
    place.fleet.sleep([WEIGHTS])
    asleep = place.resident()
    assert without_cache - asleep == pytest.approx(parts[WEIGHTS], rel=EXACT)
    place.fleet.wake([WEIGHTS])
    place.fleet.wake([WEIGHTS])
    place.sync.sync(3)
    assert place.resident() - asleep == pytest.approx(parts[WEIGHTS], rel=EXACT)
    place.fleet.wake([CACHE])
    assert place.resident() - asleep == pytest.approx(sum(parts.values()), rel=EXACT)
    assert place.ask() == place.answers


def refused(place: Place, call: Any) -> str:
    """Returns the error message of a refused call."""
    with pytest.raises(ray_module.exceptions.RayTaskError) as raised:
        call()
    return str(raised.value.cause)


def test_without_weights_no_request_is_answered(place: Place) -> None:
    fleet = place.fleet
    fleet.sleep(ENGINE)
    assert fleet.serving == []
    with pytest.raises(NoServingActor, match="asleep: engine_weights, kv_cache"):
        fleet.ask("forget", timeout=60)
    assert refused(place, lambda: complete(place.engines, REQUESTS)).startswith(
        "the engine is asleep: engine_weights, kv_cache"
    )
    assert refused(place, lambda: place.call("begin_update")).startswith(
        "the engine is asleep: engine_weights; call `wake`"
    )
    assert refused(place, lambda: place.call("check_weights")).startswith(
        "the engine is asleep: engine_weights; call `wake`"
    )
    assert place.call("health") == place.call("health")
    place.call("probe")
    fleet.wake(ENGINE)
    assert fleet.serving == []
    assert refused(place, lambda: complete(place.engines, REQUESTS)).startswith("the engine's weights are undefined")
    assert refused(place, lambda: place.call("resume")).startswith("the engine's weights are undefined")
    place.sync.sync(4)
    assert fleet.serving == [0]
    assert place.ask() == place.answers


def test_an_update_that_fails_half_way_leaves_nothing_to_be_served(place: Place) -> None:
    place.fleet.sleep([WEIGHTS])
    place.fleet.wake([WEIGHTS])
    place.call("begin_update")
    lacking = refused(place, lambda: place.call("end_update", 5))
    assert "did not receive model.embed_tokens.weight" in lacking
    place.call("abandon_update")
    assert refused(place, lambda: complete(place.engines, REQUESTS)).startswith("the engine's weights are undefined")
    place.sync.sync(5)
    assert place.ask() == place.answers
    # Engines with kept weights hold half of an update, too.
    place.call("begin_update")
    place.call("abandon_update")
    assert refused(place, lambda: complete(place.engines, REQUESTS)).startswith("the engine's weights are undefined")
    place.sync.sync(6)


def test_requests_under_way_wait_and_go_on_with_the_same_tokens(place: Place) -> None:
    long = [Request(f"long {i}", [5, 20, 40, 60, 7 + i], 110, seed=i) for i in range(24)]
    undisturbed = complete(place.engines, long)
    with ThreadPoolExecutor(1) as background:
        place.fleet.ask("forget", timeout=60)
        place.call("measured")
        asking = background.submit(complete, place.engines, long)
        while not place.call("measured")[0][1]:  # before the first step
            assert not asking.done()
        place.fleet.sleep(ENGINE)
        place.fleet.wake(ENGINE)
        place.sync.sync(7)
        completions = asking.result(timeout=120)
    assert any(len(c.versions) > 1 or c.versions[0][0] == 7 for c in completions.values()), "none was under way"
    assert {name: list(c.tokens) for name, c in completions.items()} == {
        n: list(c.tokens) for n, c in undisturbed.items()
    }


def grown(place: Place, cycles: int) -> int:
    """Returns the growth in bytes of the awake process after these cycles."""
    place.rest_and_return()
    before = place.resident()
    for _ in range(cycles):
        place.rest_and_return()
        assert place.ask() == place.answers
    return place.resident() - before


def test_cycles_leave_nothing_behind(place: Place) -> None:
    assert grown(place, 3) < EXACT * sum(computed(place).values())


@pytest.mark.slow
def test_twenty_cycles_leave_nothing_behind(place: Place) -> None:
    assert grown(place, 20) < EXACT * sum(computed(place).values())


@pytest.mark.slow
def test_workers_with_tied_embeddings_and_biases_sleep_too(ray: None, tmp_path: Path) -> None:
    with place_of(tmp_path, "qwen2", tensor=2, tied=True, hidden=128) as place:
        for _ in range(2):
            place.rest_and_return()
            assert place.ask() == place.answers
        assert not any(worker_check.different for worker_check in place.sync.check())


@pytest.mark.slow
def test_one_that_is_killed_asleep_starts_when_there_is_room_and_serves_the_same(place: Place) -> None:
    """Kills the only engine while asleep: the engine restarts for the sync while room is made, and puts its cache to
    sleep before the room is taken back.
    """
    fleet, moments = place.fleet, []

    @contextmanager
    def room(rank: int) -> Iterator[None]:
        moments.append(("made", rank, set(fleet.asleep)))
        yield
        moments.append(("taken", rank, place.resident()))

    fleet.make_room = room
    fleet.sleep(ENGINE)
    old = place.engines.where[0].pid
    os.kill(old, signal.SIGKILL)
    fleet.wake([WEIGHTS])
    assert moments == []
    place.sync.sync(8)
    assert [moment[:2] for moment in moments] == [("made", 0), ("taken", 0)]
    assert moments[0][2] == {CACHE}
    assert place.engines.where[0].pid != old
    fleet.wake([CACHE])
    assert place.ask() == place.answers
    fleet.restarts = 0
    os.kill(place.engines.where[0].pid, signal.SIGKILL)
    with pytest.raises(ActorFailed, match=r"^engine-0 .* sleep: its process died"):
        fleet.sleep(ENGINE)
