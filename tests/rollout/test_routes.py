"""Lost, moved, stale or invalid routes are detected before training."""

from __future__ import annotations

import importlib.util
from array import array
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from skyrl_mega.config.schema import AlgorithmConfig, BuildConfig, RolloutConfig
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.arguments import names
from skyrl_mega.engines.vllm.routes import RouteRecorder, TokenRoutes, output_routes, verified_routes
from skyrl_mega.engines.vllm.spec import EngineSpec, environment
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.models.routes import COLUMN, RouteShape, WrongRoutes
from skyrl_mega.models.tiny import build
from skyrl_mega.rollout.agent.routes import TurnRoutes
from skyrl_mega.trainer.replay import check_routes, replay_metrics
from skyrl_mega.trajectories.sequences import Column, Sequences
from skyrl_mega.trajectories.trajectory import Group, Kind, Status, Trajectory, TrajectoryStep
from tests.support.batches import make_batch

SHAPE = RouteShape(layers=(0, 2), experts=4, per_token=2)
PROMPT = Prompt(0, [], "", {})


def route_of(token: int) -> list[list[int]]:
    """Returns a route identifying the token, [M, K]."""
    first, second = token % 4, (token + 1 + token // 4 % 3) % 4
    return [[first + 1, second + 1], [second + 1, first + 1]]


def routes_of(tokens: list[int]) -> np.ndarray:
    return np.array([route_of(token) for token in tokens], SHAPE.dtype).reshape(-1, 2, 2)


def empty() -> Trajectory:
    return Trajectory(
        PROMPT,
        0,
        tokens=array("i"),
        mask=array("b"),
        logprobs=array("f"),
        prompt_length=0,
        reward=1.0,
        status=Status.COMPLETED,
        turns=0,
    )


def say(t: Trajectory, kind: Kind, tokens: list[int]) -> None:
    is_policy = int(kind is Kind.RESPONSE)
    t.steps.append(TrajectoryStep(kind, len(t.tokens), len(t.tokens) + len(tokens)))
    t.tokens.extend(tokens)
    t.mask.extend([is_policy] * len(tokens))
    t.logprobs.extend([-1.0 * is_policy] * len(tokens))


def speak(t: Trajectory, routes: TurnRoutes, tokens: list[int], version: int = 3, shift: int = 0) -> None:
    """Adds a turn as the agent loop does, with the requested routes."""
    first = routes.first(t) + shift
    read = [*t.context, *tokens[:-1]]
    routes.add(t, Completion("r", tokens, [-1.0] * len(tokens), "stop", ((version, 0),), routes_of(read[first:])))
    say(t, Kind.RESPONSE, tokens)


def played(rewritten: bool) -> Trajectory:
    """Returns a trajectory of two turns, or three with a new conversation; unread tokens have no route."""
    t, routes = empty(), TurnRoutes()
    say(t, Kind.PROMPT, [1, 2, 3])
    speak(t, routes, [4, 5])
    say(t, Kind.OBSERVATION, [6, 7])
    speak(t, routes, [8, 9, 10])
    if rewritten:
        say(t, Kind.PROMPT, [11, 12])
        speak(t, routes, [13])
    routes.keep(t)
    return t


@pytest.mark.parametrize("rewritten", [False, True])
def test_every_turn_brings_the_routes_of_what_is_new(rewritten: bool) -> None:
    """Checks each token's route, except for the unread last token of every conversation."""
    t = played(rewritten)
    column = t.columns[COLUMN]
    assert column.aligned == "input" and column.values.dtype == torch.uint8
    unread = {9, 12} if rewritten else {9}
    for position, (token, route) in enumerate(zip(t.tokens, column.values.tolist(), strict=True)):
        assert route == ([[0, 0], [0, 0]] if position in unread else route_of(token)), position


def test_an_engine_that_gives_none_leaves_no_column() -> None:
    t, routes = empty(), TurnRoutes()
    say(t, Kind.PROMPT, [1, 2])
    routes.add(t, Completion("r", [3], [-1.0], "stop", ((0, 0),)))
    say(t, Kind.RESPONSE, [3])
    routes.keep(t)
    assert not t.columns


def test_a_turn_with_too_few_routes_is_refused() -> None:
    t, routes = empty(), TurnRoutes()
    say(t, Kind.PROMPT, [1, 2, 3])
    with pytest.raises(WrongRoutes, match="request r: the engine returned routes of 3 tokens instead of 4"):
        speak(t, routes, [4, 5], shift=1)


def test_turns_before_a_sync_keep_the_routes_that_they_were_drawn_with() -> None:
    """Plays a turn before and a turn after a sync; the latter brings only the routes of new tokens."""
    t, routes = empty(), TurnRoutes()
    say(t, Kind.PROMPT, [1, 2, 3])
    speak(t, routes, [4, 5], version=3)
    assert routes.first(t) == 4
    speak(t, routes, [6], version=4)
    routes.keep(t)
    assert t.columns[COLUMN].values.tolist() == [*(route_of(token) for token in [1, 2, 3, 4, 5]), [[0, 0], [0, 0]]]


# ---- routes from an engine -------------------------------------------------------------------------------------------


def read(tokens: list[int], version: int = 3) -> TokenRoutes:
    return TokenRoutes(routes_of(tokens), np.array(tokens, np.int32), np.full(len(tokens), version, np.int32))


def check(routes: TokenRoutes | None, tokens: list[int], first: int = 0) -> np.ndarray:
    return verified_routes(routes, np.array(tokens, np.int32), first, {3}, shape=SHAPE, name="r")


def test_the_routes_of_a_request_are_cut_to_what_is_wanted() -> None:
    """Takes routes of more tokens than needed, as the engine may compute another token."""
    assert check(read([1, 2, 3, 4, 5, 6]), [1, 2, 3, 4, 5], first=2).tolist() == routes_of([3, 4, 5]).tolist()


class Table:
    """A block table: two requests of the same prompt share the first cache block of four tokens."""

    block_size = 4
    block_table = SimpleNamespace(np=np.array([[3, 5], [3, 6]]))


@pytest.mark.parametrize("names", [("old", "new"), ("new", "old")])
def test_a_prefix_that_another_request_writes_in_the_same_step_is_known(names: tuple[str, str]) -> None:
    """Records a preempted request, reading the prompt again, and a request with most of the prompt in the cache, in
    both orders."""
    prompt, first = [1, 2, 3, 4, 5], {"old": 0, "new": 4}
    tokens = [token for name in names for token in prompt[first[name] :]]
    recorder = object.__new__(RouteRecorder)
    recorder.shape, recorder.version, recorder.requests, recorder.group = SHAPE, 3, {}, 1
    recorder.cached = TokenRoutes(SHAPE.none(32), *np.full((2, 32), -1, np.int32))
    recorder.step = torch.from_numpy(routes_of(tokens).astype(np.int16) - 1)
    recorder.runner = SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=[f"{name}-12345678" for name in names],
            num_computed_tokens_cpu=np.array([first[name] for name in names]),
            block_table=[None, Table],  # of a sliding window, and of full attention
        ),
        input_ids=SimpleNamespace(cpu=torch.tensor(tokens, dtype=torch.int32)),
    )
    counts = {f"{name}-12345678": len(prompt) - at for name, at in first.items()}
    recorder._record(SimpleNamespace(total_num_scheduled_tokens=len(tokens), num_scheduled_tokens=counts))
    for name in names:
        assert check(recorder.take(name), prompt).tolist() == routes_of(prompt).tolist()


@pytest.mark.parametrize(
    ("layers", "kinds", "why"),
    [
        ([0, 1], [int, int], r"vLLM has experts in layers \[0, 1\], but config\.json in \[0, 2\]"),
        ([0, 2], [int, str], r"vLLM's expert routers in layers \[2\] cannot be captured"),
    ],
)
def test_routers_that_cannot_be_captured(
    layers: list[int], kinds: list[type], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.model_executor.layers.fused_moe.layer.MoERunner", SimpleNamespace)
    monkeypatch.setattr("vllm.model_executor.layers.fused_moe.router.base_router.BaseRouter", int)
    blocks = [SimpleNamespace(layer_id=layer, router=kind()) for layer, kind in zip(layers, kinds, strict=True)]
    recorder = object.__new__(RouteRecorder)
    recorder.shape = SHAPE
    recorder.runner = SimpleNamespace(model=SimpleNamespace(modules=lambda: blocks))
    with pytest.raises(WrongRoutes, match=rf"recorded: {why}; give policy\.moe\.replay=off"):
        recorder._install_capture()


def test_planted_faults_of_an_engine_are_refused() -> None:
    tokens = [1, 2, 3, 4, 5]
    lost = read(tokens)
    lost.routes[3, 1] = 0
    twice = read(tokens)
    twice.routes[2, 0] = 4
    beyond = read(tokens)
    beyond.routes[2, 0, 1] = 5
    stale = read(tokens)
    stale.versions[:3] = 2
    for routes, why in (
        (None, "routes of 0 tokens are recorded, but the engine has read 5"),
        (read(tokens[:-1]), "routes of 4 tokens are recorded, but the engine has read 5"),
        (
            read([2, 3, 4, 5, 6]),
            "at position 0 were recorded for token 2, but the request has token 1 there; give policy",
        ),
        (
            read([1, 2, 4, 3, 5]),
            "at position 2 were recorded for token 4, but the request has token 3 there; give policy",
        ),
        (stale, r"at position 0 are of weight version 2, but the request was sampled with \[3\]"),
        (lost, r"token 3 in layer 2 has experts \[-1, -1\]"),
        (twice, r"token 2 in layer 0 has experts \[3, 3\]"),
        (beyond, r"token 2 in layer 0 has experts \[2, 4\]|token 2 in layer 0 has experts \[3, 4\]"),
    ):
        with pytest.raises(WrongRoutes, match=why):
            check(routes, tokens)


def test_vllms_own_routes_lose_the_layers_without_experts() -> None:
    """Converts `CompletionOutput.routed_experts`: routes of every decoder layer, with experts numbered from 0."""
    wanted = routes_of([1, 2, 3])
    given = np.full((3, 3, 2), 7, np.uint8)
    given[:, [0, 2]] = wanted - 1
    assert output_routes(given, 3, shape=SHAPE, name="r").tolist() == wanted.tolist()
    for wrong, why in (
        (None, "returned no expert routes"),
        (given[:, :2], "lack layer 2"),
        (given[:2], r"\[2, 2, 2\]; needed is \[3"),
    ):
        with pytest.raises(WrongRoutes, match=why):
            output_routes(wrong, 3, shape=SHAPE, name="r")


def test_an_engine_on_cuda_reads_the_routes_that_vllm_gives(tmp_path: Path) -> None:
    """Sets the environment variable of vLLM's runner, and compares names with the installed vLLM."""
    build(BuildConfig(), tmp_path / "m")
    spec = EngineSpec(str(tmp_path / "m"), "bfloat16", "cuda", RolloutConfig(), 64, routes=True)
    assert environment(spec)["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "enable_return_routed_experts" in names()
    folder = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))  # type: ignore[union-attr,arg-type]
    assert "routed_experts_prompt_start: int" in (folder / "sampling_params.py").read_text()
    assert "routed_experts: np.ndarray | None" in (folder / "outputs.py").read_text()
    engine = VllmEngine(spec)
    given = np.array([[[0, 1], [2, 3]], [[7, 6], [5, 4]]], np.uint8)
    result = SimpleNamespace(
        token_ids=[5, 6],
        logprobs=SimpleNamespace(logprobs=[-1.0, -2.0]),
        finish_reason="stop",
        weight_versions=None,
        routed_experts=given,
    )
    completion = engine._completion(Request("r", [1, 2, 3], 4, 0, routes_from=2), result)
    assert completion.routes is not None and completion.routes.tolist() == (given + 1).tolist()
    with pytest.raises(WrongRoutes, match=r"request r: routes have shape \[2, 2, 2\]; needed is \[4, 2, 2\]"):
        engine._completion(Request("r", [1, 2, 3], 4, 0), result)


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.int16)])
def test_a_route_fits_its_type(experts: int, dtype: type) -> None:
    shape = RouteShape((0,), experts, 1)
    assert shape.dtype is dtype
    shape.check(np.full((1, 1, 1), experts, dtype), 1, "r")


# ---- routes in training ----------------------------------------------------------------------------------------------


def batch_of(*trajectories: Trajectory, step_wise: str = "off") -> Sequences:
    return make_batch([Group(PROMPT, list(trajectories))], AlgorithmConfig(), RolloutConfig(step_wise=step_wise)).tokens


@pytest.mark.parametrize("step_wise", ["off", "turns", "merged"])
def test_a_batch_needs_the_routes_of_all_that_a_token_was_drawn_after(step_wise: str) -> None:
    """Removes each route of each layer: an error is raised only if a counted token follows."""
    rewritten = step_wise != "off"
    batch = batch_of(played(rewritten), step_wise=step_wise)
    check_routes(batch)
    is_policy = batch["mask"] != 0
    for at in range(len(batch.tokens)):
        for layer in range(2):
            lost = batch[COLUMN].clone()
            if not lost[at].any():
                continue
            lost[at, layer] = 0
            sample = int(torch.searchsorted(batch.lengths.cumsum(0), at, right=True))
            start, end = int(batch.starts[sample]), int(batch.starts[sample] + batch.lengths[sample])
            planted = batch.part(0, len(batch))
            planted.columns = {**batch.columns, COLUMN: Column(lost, "input")}
            if is_policy[at + 1 : end].any():
                with pytest.raises(WrongRoutes, match=f"sample {sample} .* position {at - start} in MoE layer {layer}"):
                    check_routes(planted)
            else:
                check_routes(planted)


def test_what_failed_needs_no_routes_and_an_engine_has_to_give_some() -> None:
    failed = played(False)
    failed.columns, failed.status = {}, Status.ERROR_ENV
    check_routes(batch_of(played(False), failed))
    with pytest.raises(WrongRoutes, match="the engines returned no expert routes"):
        check_routes(batch_of(failed))


def test_metrics_are_shares_of_the_whole_step() -> None:
    one = {"replay_tokens_0": 10, "replay_replayed_0": 8, "replay_differs_0": 2, "replay_wrong_0": 0}
    two = {"replay_tokens_2": 10, "replay_replayed_2": 10, "replay_differs_2": 5, "replay_wrong_2": 0}
    # From a later optimizer step, whose weights generated nothing
    moved = {"replay_differs_0": 8, "replay_differs_2": 10}
    updates = [{**one, **two, "loss": 1.0}, {**one, **two, **moved}]
    metrics = replay_metrics(updates, updates[:1])
    assert metrics == {
        "replay/replayed_fraction": 36 / 40,
        "replay/route_mismatch": 14 / 36,
        "replay/mismatched": 0,
        "replay/route_mismatch_layer_0": 0.25,
        "replay/route_mismatch_layer_2": 0.5,
    }
    assert replay_metrics(updates, updates)["replay/route_mismatch"] == 25 / 36
    assert replay_metrics([{"loss": 1.0}], []) == {}
