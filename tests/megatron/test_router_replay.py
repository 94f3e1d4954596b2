"""Tests of router replay: the policy's routers follow the given routes in every layout, and a pass with a deviation
fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_mega.config.schema import BuildConfig, MoeConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.megatron import objectives
from skyrl_mega.megatron.packing import MicroBatch, RowRoutes
from skyrl_mega.megatron.router_replay import RouterReplay
from skyrl_mega.models import tiny
from skyrl_mega.models.routes import COLUMN, RouteShape, WrongRoutes
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.trajectories.sequences import Column, Sequences
from tests.megatron import layouts
from tests.support.engines import LOADING, build_model_of
from tests.support.ranks import run_ranks

LAYOUTS: dict[str, tuple[int, dict[str, int], str]] = {
    "one process, recomputed": (1, {}, "full"),
    "DP2": (2, {}, "none"),
    "TP2 ETP2": (2, {"tensor": 2}, "none"),
    "PP2": (2, {"pipeline": 2}, "none"),
    "CP2": (2, {"context": 2}, "none"),
    "EP2": (2, {"expert": 2}, "none"),
    "TP2 EP2": (2, {"tensor": 2, "expert": 2}, "none"),
    "PP2 VPP2, recomputed": (2, {"pipeline": 2, "virtual_pipeline": 2}, "full"),
}
SHAPE = RouteShape(layers=(0, 2, 3), experts=8, per_token=2)
"""Routes of the model below; its second layer is dense."""
SMOOTH = OptimizerConfig(lr=1e-2, eps=1e-2)
aten = torch.ops.aten
Found = dict[str, Any]
"""`logprobs` [T], `recorded` [T, M, K], metrics of two steps with `rollout` and of two with `policy`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay")
    return build_model_of(path, tiny.hf_config(BuildConfig(layers=4)) | {"mlp_only_layers": [1]}, seed=2)


def routed() -> Sequences:
    """Returns random sequences with random routes; the last token of each sequence and one whole sequence lack a
    route."""
    batch = layouts.some_batch(100)
    scores = np.random.default_rng(0).random((len(batch.tokens), len(SHAPE.layers), SHAPE.experts))
    routes = (scores.argsort(-1)[..., : SHAPE.per_token] + 1).astype(SHAPE.dtype)
    ends = batch.lengths.cumsum(0)
    routes[ends.numpy() - 1] = 0
    routes[int(ends[3]) : int(ends[4])] = 0
    batch.add(COLUMN, Column(torch.from_numpy(routes), "input"))
    return batch


def policy(**changes: Any) -> PolicyConfig:
    """Returns settings with router replay and balanced experts."""
    return layouts.policy_config(moe=MoeConfig(aux_loss=0.05, replay="rollout"), optimizer=SMOOTH, **changes)


def train(rank: int, address: str, path: Path, parallel: ParallelDims, config: PolicyConfig) -> Any:
    """Returns log-probs and two steps with given routes, then two steps with routes recorded by the policy."""
    opened = layouts.open_rank(rank, address, path, parallel, config)
    rows, micros = layouts.deal(routed(), opened)
    answer = opened.logprobs(micros)
    given = [opened.train(micros, objectives.supervised) for _ in range(2)]
    opened.load(path)
    opened.reset_optimizer(config.optimizer)
    opened.policy = replace(config, moe=replace(config.moe, replay="policy"))
    opened.logprobs(micros)
    recorded = [micro[COLUMN].numpy() for micro in micros]
    with_recorded = [opened.train(micros, objectives.supervised) for _ in range(2)]
    at = parallel.coordinates(rank)
    logprobs = [values.numpy() for values, _ in answer] if answer and not at.tp and not at.cp else None
    return rows, logprobs, recorded, given, with_recorded


def run(path: Path, ranks: int, sizes: dict[str, int], **changes: Any) -> Found:
    """Returns the joined results of all ranks."""
    answers = run_ranks(ranks, train, path, layouts.layout(ranks, **sizes), policy(**changes))
    batch = routed()
    logprobs = np.full(len(batch.tokens), np.nan)
    recorded = np.zeros(batch[COLUMN].shape, SHAPE.dtype)
    for rows, values, routes, _, _ in answers:
        for place, of in enumerate(rows):
            at = batch.index(of).numpy()
            recorded[at] = np.maximum(recorded[at], routes[place])
            if values is not None:
                logprobs[at] = values[place]
    given, with_recorded = max((answer[3:] for answer in answers), key=lambda both: len(both[0][0]))
    return {"logprobs": logprobs, "recorded": recorded, "given": given, "own": with_recorded}


@pytest.fixture(scope="module")
def single(model: Path) -> Found:
    """Returns the results of a single process with a single micro-batch."""
    return run(model, 1, {}, micro_tokens=10_000)


@pytest.mark.parametrize(("ranks", "sizes", "recompute"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_goes_where_the_routes_say(
    model: Path, single: Found, ranks: int, sizes: dict[str, int], recompute: str
) -> None:
    """Compares results. Every pass checks the route of each token in each layer, and raises on a deviation."""
    actual = run(model, ranks, sizes, recompute=recompute)
    np.testing.assert_allclose(actual["logprobs"], single["logprobs"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(actual["recorded"], single["recorded"])
    assert (actual["recorded"] > 0).all()
    given = float((routed()[COLUMN][:, 0, 0] > 0).float().mean())
    for which, share in (("given", given), ("own", 1.0)):
        for step, expected in zip(actual[which], single[which], strict=True):
            for name in ("loss", "grad_norm", "expert_balance"):
                assert step[name] == pytest.approx(expected[name], rel=1e-5), (which, name)
            for layer in SHAPE.layers:
                assert step[f"replay_replayed_{layer}"] / step[f"replay_tokens_{layer}"] == pytest.approx(share)
                assert step[f"replay_wrong_{layer}"] == 0


def train_with_routes_on_rank_0(rank: int, address: str, path: Path, parallel: ParallelDims) -> dict[str, float]:
    opened = layouts.open_rank(rank, address, path, parallel, policy())
    _, micros = layouts.deal(routed(), opened)
    if rank:
        for micro in micros:
            del micro.columns[COLUMN]
    return opened.train(micros, objectives.supervised)


def test_a_rank_whose_trajectories_all_failed_takes_part_in_replay(model: Path) -> None:
    """A trajectory that fails before its first answer has no routes."""
    both = run_ranks(2, train_with_routes_on_rank_0, model, layouts.layout(2))
    metrics = max(both, key=len)
    for layer in SHAPE.layers:
        assert 0 < metrics[f"replay_replayed_{layer}"] < metrics[f"replay_tokens_{layer}"]


def test_replay_matters(single: Found) -> None:
    """Checks the routes: given routes differ from the policy's routes, and recorded routes stay while the weights
    change."""
    for layer in SHAPE.layers:
        first, second = (step[f"replay_differs_{layer}"] for step in single["own"])
        assert first == 0 < second
        assert single["given"][0][f"replay_differs_{layer}"] > 0.8 * single["given"][0][f"replay_replayed_{layer}"]
    assert single["given"][0]["grad_norm"] != pytest.approx(single["own"][0]["grad_norm"], rel=1e-2)


def test_forced_and_recorded_routes_against_transformers(model: Path, single: Found) -> None:
    """Compares with transformers: log-probs with forced routers, and chosen experts with free routers."""
    batch = routed()
    with LOADING:
        from transformers import AutoModelForCausalLM

        reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    gates = [reference.model.layers[layer].mlp.gate for layer in SHAPE.layers]
    for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True):
        rows = slice(start, start + length)
        tokens, seen = batch.tokens[rows].long(), {}
        for forced in (True, False):
            for place, gate in enumerate(gates):
                routes = batch[COLUMN][rows, place].long() - 1 if forced else torch.full((length, 2), -1)
                gate.forward = router(gate.weight, routes, seen, place)
            with torch.no_grad():
                logprobs = torch.log_softmax(reference(tokens[None]).logits[0], -1)[:-1].gather(1, tokens[1:, None])
            if forced:
                wanted = np.where(batch["weights"][rows][1:] != 0, logprobs[:, 0], 0)
                np.testing.assert_allclose(single["logprobs"][rows][1:], wanted, atol=1e-4)
        chosen = np.stack([seen[place] for place in range(len(gates))], 1) + 1
        np.testing.assert_array_equal(np.sort(single["recorded"][rows], -1), np.sort(chosen, -1))


def router(weight: torch.Tensor, routes: torch.Tensor, seen: dict[int, Any], place: int) -> Callable[..., Any]:
    """Returns a router with softmax over the chosen experts only: `routes` [n, K], or the highest logits for routes of
    -1."""

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ weight.T
        chosen = torch.where(routes >= 0, routes, logits.topk(SHAPE.per_token).indices)
        seen[place] = chosen.numpy()
        return logits, logits.gather(1, chosen).softmax(-1), chosen

    return forward


class NoWait(TorchDispatchMode):
    """Mode that refuses every operation on `meta` tensors that would wait for a GPU.

    Tensors on `meta` have shapes and no values. So torch refuses any value on the host (`item`, `int`, `bool`,
    `tolist`, `cpu`, any copy to the host) and any shape decided by values (`nonzero`, reading with a mask,
    `masked_select`, `unique`, `repeat_interleave` without a size). This mode refuses three more operations: writing
    with a mask, because the positions are searched first; copies from unpinned host memory; and positions given on the
    host. Invisible are a wait inside a kernel, and a tensor created on the device from a list, because nothing is
    dispatched.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            for at in args[1]:
                assert at is None or at.dtype not in (torch.bool, torch.uint8), "looks for places"
                assert at is None or at.device == args[0].device, "copies places from the host"
        if func.overloadpacket in (aten.copy, aten.copy_):
            assert args[1].device == args[0].device, "copies from the host"
        if func.overloadpacket is aten._to_copy:
            to = (kwargs or {}).get("device")
            assert to is None or torch.device(to) == args[0].device, "copies between host and device"
        return func(*args, **(kwargs or {}))


MASK, NUMBERS = torch.zeros(4, dtype=torch.bool, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta")
WAITS: dict[str, Callable[[], object]] = {
    "item": lambda: NUMBERS[0].item(),
    "if": lambda: bool(MASK.any()),
    "a bound of a slice": lambda: NUMBERS[: NUMBERS[0]],
    "tolist": NUMBERS.tolist,
    "cpu": NUMBERS.cpu,
    "numpy": NUMBERS.numpy,
    "copy to the host": lambda: torch.zeros(4).copy_(NUMBERS),
    "copy from the host": lambda: torch.zeros(4).to("meta"),
    "copy from the host into": lambda: NUMBERS.clone().copy_(torch.zeros(4)),
    "places on the host": lambda: NUMBERS[torch.tensor([0, 1])],
    "nonzero": MASK.nonzero,
    "where": lambda: torch.where(MASK),
    "reading with a mask": lambda: NUMBERS[MASK],
    "writing with a mask": lambda: NUMBERS.clone().__setitem__(MASK, NUMBERS[:2]),
    "masked_select": lambda: NUMBERS.masked_select(MASK),
    "unique": NUMBERS.unique,
    "unique_consecutive": NUMBERS.unique_consecutive,
    "repeat_interleave": lambda: NUMBERS.repeat_interleave(NUMBERS),
    "bincount": NUMBERS.bincount,
    "equal": lambda: torch.equal(NUMBERS, NUMBERS),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_whatever_waits_for_the_device_is_seen(wait: Callable[[], object]) -> None:
    with NoWait(), pytest.raises((AssertionError, NotImplementedError, RuntimeError, TypeError)):
        wait()


def looked_at(device: str) -> RouterReplay:
    """Checks three tokens on the device; the second and the third deviate from the given routes."""
    replay = object.__new__(RouterReplay)
    replay.shape, replay.active = RouteShape(layers=(0,), experts=4, per_token=2), True
    replay.counts = torch.zeros(1, 4, dtype=torch.int64, device=device)
    replay.first = torch.full((1, 7), -1, device=device)
    replay.dtype = torch.uint8
    routes = torch.tensor([[[1, 2]], [[2, 3]], [[3, 4]]], dtype=torch.uint8).to(device)
    read, position = torch.arange(3, device=device), torch.tensor([10, 11, 12]).to(device)
    went = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [1, 1, 0, 0]], dtype=torch.bool).to(device)
    chosen, scores = torch.tensor([[0, 1]] * 3).to(device), torch.zeros(3, 4, device=device)
    with NoWait() if device == "meta" else nullcontext():
        for recorded in (torch.zeros_like(routes), None):
            row = RowRoutes(routes, routes, read=read, position=position, recorded=recorded)
            replay.rows = [row]
            replay.counts.zero_()
            replay.choose(0, scores, (scores[:, :2], chosen))
            replay._check_output(0, None, None, (scores, went))
    return replay


def test_routers_are_looked_at_without_waiting_for_the_device() -> None:
    """Checks deviations: the first token and the number of deviations stay on the device until the end of the pass."""
    looked_at("meta")
    replay = looked_at("cpu")
    assert replay.counts.tolist() == [[3, 3, 2, 2]] and replay.first.tolist() == [[11, 2, 3, 1, 0, 0, 1]]


# ---- planted faults -------------------------------------------------------------------------------------------------


def lost(batch: Sequences, micro: MicroBatch) -> None:
    """Drops a token's route in all layers."""
    micro.columns[COLUMN] = micro.columns[COLUMN].clone()
    micro.columns[COLUMN][5] = 0


def shifted(batch: Sequences, micro: MicroBatch) -> None:
    """Shifts every route to the next token."""
    micro.columns[COLUMN] = micro.columns[COLUMN].roll(1, 0)


def swapped(batch: Sequences, micro: MicroBatch) -> None:
    """Swaps the routes of two layers."""
    micro.columns[COLUMN] = micro.columns[COLUMN][:, [0, 2, 1]]


def fails(
    rank: int, address: str, path: Path, parallel: ParallelDims, fault: Callable[..., None] | None, misnumbered: bool
) -> str:
    """Returns the error of a pass with faulty packed routes, or with wrong layer numbers in the routers."""
    prepare, number = RouterReplay.prepare, TopKRouter.set_layer_number
    if fault is not None:
        RouterReplay.prepare = lambda self, batch, micro: (fault(batch, micro), prepare(self, batch, micro))[1]  # type: ignore[method-assign]
    if misnumbered:  # like a chunk that counts from its first layer
        TopKRouter.set_layer_number = lambda self, layer: number(self, {3: 1, 4: 3}.get(layer, layer))  # type: ignore[method-assign]
    opened = layouts.open_rank(rank, address, path, parallel, policy())
    _, micros = layouts.deal(routed(), opened)
    try:
        opened.train(micros, objectives.supervised)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("fault", "sizes"),
    [
        (lost, {}),
        (shifted, {"context": 2}),
        (swapped, {"tensor": 2}),
        (None, {"pipeline": 2, "virtual_pipeline": 2}),
    ],
    ids=["lost", "shifted", "swapped", "wrong layer after VPP"],
)
def test_a_planted_fault_ends_its_step_on_every_rank(
    model: Path, fault: Callable[..., None] | None, sizes: dict[str, int]
) -> None:
    ranks = 2 if sizes else 1
    errors = run_ranks(ranks, fails, model, layouts.layout(ranks, **sizes), fault, fault is None)
    assert len(set(errors)) == 1
    assert "WrongRoutes" in errors[0] and "first in layer" in errors[0] and "expected [" in errors[0], errors[0]


def recomputed_alone(rank: int, address: str, path: Path, parallel: ParallelDims) -> str:
    """Returns the error of an update with MoE parts recomputed in the backward pass outside the layers."""
    opened = layouts.open_rank(rank, address, path, parallel, policy(options={"moe_layer_recompute": True}))
    _, micros = layouts.deal(routed(), opened)
    with pytest.raises(WrongRoutes) as caught:
        opened.train(micros, objectives.supervised)
    return str(caught.value)


def test_a_router_that_has_lost_its_row_ends_the_step(model: Path) -> None:
    """Runs settings refused by `config/checks/policy.py`: the router would silently use the policy's experts."""
    (message,) = run_ranks(1, recomputed_alone, model, layouts.layout(1))
    assert "the routers of layers [0, 2, 3] ran without the routes of their tokens" in message
