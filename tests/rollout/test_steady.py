"""Steady batches against vLLM's own scheduler: the same schedules, state and outputs in every step."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from benchmarks.scheduler import VOCABULARY, Loop, request, scheduler, settings
from skyrl_mega.engines.vllm import scheduler as held
from skyrl_mega.engines.vllm import steady
from skyrl_mega.engines.vllm.scheduler import HoldingScheduler
from skyrl_mega.engines.vllm.steady import is_plain, supported

BLOCK = 16
LONGEST = 96
MIX: list[dict[str, Any]] = [
    {"max_tokens": 60},
    {"max_tokens": 200},  # until the longest sequence
    {"max_tokens": 60, "stop_token_ids": [5, 17, 60]},
    {"max_tokens": 60, "stop_token_ids": list(range(9)), "min_tokens": 20},
    {"max_tokens": 1},
    {"max_tokens": 30, "extra_args": None},
]
"""Sampling parameters of the requests of a test."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return settings(tmp_path_factory.mktemp("steady"), max_model_len=LONGEST, max_num_seqs=12, block_size=BLOCK)


class Pair:
    """vLLM's scheduler and ours, with the same requests and events, compared after every step."""

    def __init__(self, config: VllmConfig, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(held.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(steady, "CAPACITY", 4)  # so that columns are added
        self.config = config
        self.vllm, self.ours = (Loop(scheduler(kind, config, blocks)) for kind in (Scheduler, HoldingScheduler))
        self.aborted: set[str] = set()
        self.steady = 0
        """Steps of a steady batch."""
        self.preempted = False

    @property
    def schedulers(self) -> tuple[Any, Any]:
        return self.vllm.scheduler, self.ours.scheduler

    def add(self, name: str, prompt: list[int], **parameters: Any) -> None:
        for one in self.schedulers:
            one.add_request(request(name, prompt, self.config, client=len(name) % 2, **parameters))

    def abort(self, name: str) -> None:
        self.aborted.add(name)
        for one in self.schedulers:
            one.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        self.now += 0.03
        expected, seen = self.vllm.step(), self.ours.step()
        assert seen == expected
        assert list(seen.num_scheduled_tokens) == list(expected.num_scheduled_tokens)
        vllm, ours = self.schedulers
        assert state(ours) == state(vllm)
        self.steady += ours.batch is not None
        self.preempted |= any(r.num_preemptions for r in vllm.requests.values())
        for key, tokens in self.ours.tokens.items():
            assert tokens == self.vllm.tokens[key][: len(tokens)]

    def pause(self, steps: int) -> None:
        """Pauses in flight: everything sampled is sent before the pause is complete."""
        for one in self.schedulers:
            one.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(steps):
            self.step()
            assert not self.ours.scheduler.has_requests()
            self.check_sent()
        for one in self.schedulers:
            one.set_pause_state(PauseState.UNPAUSED)

    def drop_cache(self) -> None:
        """Preempts all requests and empties the cache, as vLLM does when weights change."""
        assert [one.reset_prefix_cache(reset_running_requests=True) for one in self.schedulers] == [True, True]

    def check_sent(self) -> None:
        for key, tokens in self.vllm.tokens.items():
            if key[0] not in self.aborted:
                assert self.ours.tokens[key] == tokens
                assert self.ours.logprobs[key] == self.vllm.logprobs[key]
        assert self.ours.ends == self.vllm.ends

    def finish(self) -> None:
        while self.vllm.scheduler.has_requests():
            self.step()
        self.check_sent()
        assert not self.ours.scheduler.has_requests()
        assert not any(self.ours.scheduler.held.values())


def state(one: Any) -> dict[str, Any]:
    """Returns the state of a scheduler and its cache."""
    pool = one.kv_cache_manager.block_pool
    (manager,) = one.kv_cache_manager.coordinator.single_type_managers
    return {
        "queues": [[r.request_id for r in queue] for queue in (one.running, one.waiting, one.kv_holding_waiting)],
        "requests": {name: request_state(r) for name, r in one.requests.items()},
        "blocks": {name: [block.block_id for block in blocks] for name, blocks in manager.req_to_blocks.items()},
        "cached": dict(manager.num_cached_block),
        "pool": [(block.ref_cnt, block.block_hash) for block in pool.blocks],
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "ended": one.finished_req_ids,
        "scheduled": one.prev_step_scheduled_req_ids,
        "prefills": one._inflight_prefills,
    }


def request_state(r: Request) -> dict[str, Any]:
    numbers = ("status", "num_computed_tokens", "num_in_flight_tokens", "num_preemptions", "is_prefill_chunk")
    lists = (list(r.output_token_ids), list(r.all_token_ids), list(r.block_hashes))
    return {name: getattr(r, name) for name in numbers} | {"lists": lists, "stop": r.stop_reason}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("blocks", [80, 25])
@pytest.mark.parametrize("seed", range(4))
def test_every_step_equals_vllms(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, seed: int, blocks: int, caching: bool
) -> None:
    """Draws arrivals in the middle, aborts, pauses in flight and dropped caches; 24 blocks also preempt."""
    draw = random.Random(f"{seed} {blocks} {caching}")
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", caching)
    pair = Pair(config, blocks, monkeypatch)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(draw.randrange(2, 36))] for _ in range(6)]
    mix = MIX if seed % 2 else MIX[:-1]
    for count in range(160):
        if draw.random() < 0.04 or not pair.vllm.scheduler.requests:
            for index in range(draw.randrange(1, 9)):
                pair.add(f"{count}-{index}", draw.choice(prompts), **draw.choice(mix))
        alive = sorted(pair.vllm.scheduler.requests)
        event = draw.random()
        if event < 0.02 and alive:
            pair.abort(draw.choice(alive))
        elif event < 0.03:
            pair.pause(draw.randrange(1, 3))
        elif event < 0.04:
            pair.drop_cache()
        pair.step()
    pair.finish()
    assert pair.steady > (10 if mix is MIX else 40), "the steady path was not tested"
    assert blocks == 80 or pair.preempted, "no request was preempted"


def test_an_abort_while_the_model_computes(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(config, 80, monkeypatch)
    for name in ("a", "b", "c"):
        pair.add(name, [3] * 9, max_tokens=40)
    for _ in range(9):
        pair.step()
    models = pair.vllm.model, pair.ours.model
    for loop, model in zip((pair.vllm, pair.ours), models, strict=True):

        def compute(scheduled: Any, loop: Loop = loop, model: Any = model) -> Any:
            loop.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
            return model(scheduled)

        loop.model = compute
    pair.aborted.add("b")
    pair.step()
    pair.vllm.model, pair.ours.model = models
    pair.finish()
    assert len(pair.ours.tokens["a", 1]) == 40


def test_only_events_reach_vllms_loops(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts vLLM's work per request: an allocation at both ends of a block, and updates for first and last tokens."""
    calls = {"allocate_slots": 0, "_update_request_with_output": 0}
    for owner, name in ((KVCacheManager, "allocate_slots"), (Scheduler, "_update_request_with_output")):
        original = getattr(owner, name)

        def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
    loop = Loop(scheduler(HoldingScheduler, config, 90))
    lengths = [20 + 5 * index for index in range(12)]
    for index, length in enumerate(lengths):
        loop.scheduler.add_request(request(str(index), [index] * BLOCK, config, max_tokens=length))
    while loop.scheduler.has_requests():
        loop.step()
    assert sorted(map(len, loop.tokens.values())) == lengths
    assert calls["_update_request_with_output"] == 2 * len(lengths)
    assert calls["allocate_slots"] <= sum(1 + 2 * (1 + length // BLOCK) for length in lengths) < sum(lengths) / 3


@pytest.mark.parametrize(
    "name",
    [
        "connector",
        "ec_connector",
        "aux_output_connector",
        "lora_config",
        "return_sampling_mask",
        "log_stats",
        "enable_kv_cache_events",
        "use_v2_model_runner",
    ],
)
def test_other_features_leave_every_step_to_vllm(config: VllmConfig, name: str) -> None:
    one = scheduler(HoldingScheduler, config, 20)
    assert supported(one)
    setattr(one, name, True)
    assert not supported(one)


@pytest.mark.parametrize(
    "parameters",
    [
        {"extra_args": None},
        {"logprobs": None},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=3)},
    ],
)
def test_requests_that_need_more_than_tokens_are_not_plain(config: VllmConfig, parameters: dict[str, Any]) -> None:
    def running(**more: Any) -> Request:
        one = request("a", [1, 2, 3], config, max_tokens=9, **more)
        one.status, one.num_computed_tokens, one.prefill_stats = RequestStatus.RUNNING, 3, None
        one.append_output_token_ids(4)
        return one

    assert is_plain(running())
    assert not is_plain(running(**parameters))
