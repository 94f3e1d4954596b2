"""Memory of a GPU by phase against sums by hand: exactly the parts listed by `config.residency`."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.devices import check_residency
from skyrl_mega.config.residency import NEEDS, PARTS
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import fit
from skyrl_mega.planner.batch import batch
from skyrl_mega.planner.engine_search import PolicyRanks
from skyrl_mega.planner.host_memory import host_memory, numa_warnings
from skyrl_mega.planner.memory import (
    GIB,
    GRAPHS,
    LIBRARIES,
    OUTSIDE_BUDGET,
    SWAP,
    critic_dims,
    critic_memory,
    engine_memory,
    fp8_copies,
    policy_memory,
    reference_memory,
)
from skyrl_mega.planner.moves import residency_time
from skyrl_mega.planner.placement import nodes
from skyrl_mega.planner.processes import PHASES
from skyrl_mega.planner.shared import fullest, shared_gpus, stage_ranks
from skyrl_mega.planner.times import step_time
from tests.weights.grids import REAL

PARALLEL = ParallelDims(16, tensor=2, expert=8)
STEP = ("generate", "logprobs", "train", "sync")
KEEPS = st.none() | st.lists(st.sampled_from(PARTS), unique=True)


@cache
def model() -> Decoder:
    return architecture(REAL["30B"]).describe(REAL["30B"])


def shared(keep: list[str] | None, fraction: float = 0.6, kl: float = 0.001) -> Config:
    """Returns the settings of the 30B on two nodes, policy and engines on the same GPUs."""
    c = Config()
    c.cluster.nodes, c.cluster.shared, c.cluster.device, c.cluster.gpu_memory_gib = 2, True, "cuda", 79.1
    c.policy.ranks, c.policy.recompute = 16, "full"
    c.policy.layout.tensor, c.policy.layout.expert = 2, 8
    c.rollout.engines, c.rollout.tensor, c.rollout.memory_fraction = 2, 8, fraction
    c.algorithm.kl.coefficient = kl
    c.residency.keep = keep
    return c


def by_hand(c: Config, phase: str) -> int:
    """Returns a shared GPU's bytes in a phase, from the pieces and the table alone."""
    d, keep = model(), set(PARTS) if c.residency.keep is None else set(c.residency.keep)
    resident = keep | set(NEEDS[phase])
    rank = policy_memory(c, d, PARALLEL, 0)
    total = c.cluster.gpu_reserve_gib * GIB + GIB + 3 * 64 * 2**20  # reserve, gaps, buckets of the sync
    total += rank.state.weights * ("parameters" in resident) + rank.state.gradients * ("gradients" in resident)
    total += rank.state.optimizer * ("optimizer" in resident)
    if phase == "logprobs":
        total += rank.activations.forward + rank.activations.forward_logits + SWAP * (c.algorithm.kl.coefficient > 0)
    if phase == "train":
        total += rank.activations.train + rank.activations.train_logits
    worker = engine_memory(c, d)
    total += OUTSIDE_BUDGET
    if {"engine_weights", "kv_cache"} <= resident:
        return int(total) + int(c.rollout.memory_fraction * int(79.1 * GIB))
    total += LIBRARIES + GRAPHS + worker.weights * ("engine_weights" in resident) + worker.kv * ("kv_cache" in resident)
    return int(total)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(keep=KEEPS, fraction=st.sampled_from([0.2, 0.3, 0.45, 0.6, 0.7, 0.8, 0.9]), kl=st.sampled_from([0.0, 0.001]))
def test_what_is_left_of_a_shared_gpu_and_what_is_refused(keep: list[str] | None, fraction: float, kl: float) -> None:
    c = shared(keep, fraction, kl)
    gpu = min(shared_gpus(c, model(), PARALLEL), key=lambda gpu: gpu.least_free)
    size = int(79.1 * GIB)
    left = {phase: size - by_hand(c, phase) for phase in STEP}
    assert {phase: gpu.free(phase) for phase in STEP} == left
    assert gpu.least_free == min(left.values())
    ranks = PolicyRanks(c, model(), PARALLEL)  # the form used by a search
    assert all(ranks.peak_in(phase, keep) == gpu.policy.totals[phase] for phase in STEP)
    if min(left.values()) >= 0:
        fit.check(c, REAL["30B"], strict=True)
        return
    with pytest.raises(UserError, match=f"in phase {min(left, key=lambda phase: left[phase])},"):
        fit.check(c, REAL["30B"], strict=True)


@settings(max_examples=30, deadline=None)
@given(keep=KEEPS, fraction=st.sampled_from([0.5, 0.7, 0.9]), strict=st.booleans())
def test_what_a_refusal_says_would_fit_fits(keep: list[str] | None, fraction: float, strict: bool) -> None:
    """Follows the fix of an error message, by estimates without margin, even if the error itself used the margin."""
    c = shared(keep, fraction)
    gpu = min(shared_gpus(c, model(), PARALLEL), key=lambda gpu: gpu.least_free)
    assume(not gpu.fits(strict))
    message = refused(c, strict)
    if "no fraction fits" in message:
        for other in (0.15, 0.25, 0.35, 0.45, 0.55, 0.65):
            with pytest.raises(UserError):
                fit.check(shared(keep, other), REAL["30B"], strict=True)
    else:
        largest = float(message.partition("the largest fraction that fits is ")[2].partition(";")[0].partition(",")[0])
        assert largest < fraction
        fit.check(shared(keep, largest), REAL["30B"], strict=True)
        with pytest.raises(UserError):
            fit.check(shared(keep, round(largest + 0.01, 2)), REAL["30B"], strict=True)
    if "without " in message:
        part = message.partition("without ")[2].split()[0]
        fit.check(shared([p for p in keep or PARTS if p != part], fraction), REAL["30B"], strict=True)
    elif "with residency.keep=[" in message:
        rest = message.partition("with residency.keep=[")[2].partition("]")[0].split(",")
        fit.check(shared([*filter(None, rest)], fraction), REAL["30B"], strict=True)
    else:
        assert "whatever residency.keep may leave out" in message and problem(shared([], fraction))


def refused(c: Config, strict: bool = False) -> str:
    """Returns the error message."""
    with pytest.raises(UserError) as caught:
        fit.check(c, REAL["30B"], strict=strict)
    return str(caught.value)


@pytest.mark.parametrize(
    ("gib", "options", "offered"),
    [
        (340, {}, "engine_weights,parameters,gradients"),
        (171, {}, "engine_weights,optimizer"),
        (123, {}, None),
        (None, {"cpu_offload_gb": 10}, None),
    ],
    ids=["room", "less room", "no room", "weights that may not leave"],
)
def test_the_fewest_parts_that_may_leave_are_offered(
    gib: float | None, options: dict[str, int], offered: str | None
) -> None:
    """Compares with every choice, at a share with many parts moved, for hosts with more and less memory."""
    c = shared(None, 0.6, kl=0.0)
    c.cluster.host_memory_gib, c.rollout.options = gib, options
    choices = [[p for p in PARTS[:5] if p not in leaves] for n in range(6) for leaves in combinations(PARTS[:5], n)]
    works = [keep for keep in choices if problem(replace(c, residency=replace(c.residency, keep=keep))) is None]
    match, message = re.search(r"with residency\.keep=\[(.*?)\] it fits", refused(c)), refused(c)
    assert (match[1] if match else None) == offered, message
    assert (",".join(works[0]) if works else None) == offered, "the first of all"
    assert bool(works) != ("whatever residency.keep may leave out" in message)


def problem(c: Config) -> str | None:
    """Returns the error message by estimates without margin, or None."""
    try:
        check_residency(c)
        fit.check(c, REAL["30B"], strict=True)
    except UserError as error:
        return str(error)
    return None


def test_the_largest_share_is_that_of_the_fullest_stage() -> None:
    c = shared(None, 0.9, kl=0.0)
    c.policy.layout.pipeline, c.policy.layout.expert = 4, 2
    parallel = ParallelDims(16, tensor=2, pipeline=4, expert=2)
    with pytest.raises(UserError) as caught:
        fit.check(c, REAL["30B"])
    c.rollout.memory_fraction = float(re.findall(r"fraction that fits is ([\d.]+\d)", str(caught.value))[0])
    assert all(gpu.fits(strict=True) for gpu in shared_gpus(c, model(), parallel))


def test_everything_stays_where_nothing_is_said() -> None:
    """Checks the default: the whole policy in every phase, an engine's full share, no host memory, no time."""
    c, d = shared(None, 0.3), model()
    rank, worker = policy_memory(c, d, PARALLEL, 0), engine_memory(c, d)
    held = rank.state.weights + rank.state.gradients + rank.state.optimizer + rank.sync + rank.reserve + rank.gaps
    assert {rank.totals[phase] for phase in ("generate", "sync")} == {held}
    assert rank.totals["logprobs"] == held + rank.reference + rank.activations.forward + rank.activations.forward_logits
    assert rank.totals["train"] == rank.peak == held + rank.activations.train + rank.activations.train_logits
    assert set(worker.totals.values()) == {worker.budget + worker.beside}
    assert rank.pinned == 0 == residency_time(c, d, PARALLEL)
    assert shared(list(PARTS)).residency.keep != c.residency.keep
    assert policy_memory(shared(list(PARTS), 0.3), d, PARALLEL, 0).totals == rank.totals


def test_what_leaves_lies_in_host_memory_beside_its_gpu() -> None:
    c, d = shared([], kl=0.0), model()
    held = policy_memory(c, d, PARALLEL, 0).state
    node, without = (host_memory(each, d, PARALLEL, None, nodes(c)[1], first=False) for each in (c, shared(None, kl=0)))
    assert node.parked == 8 * (held.weights + held.optimizer), "gradients are dropped"
    assert node.total - without.total == node.parked and without.parked == 0
    c.cluster.host_memory_gib = node.total / GIB
    with pytest.raises(UserError, match=r"cluster.host_memory_gib = .*, parked \d"):
        fit.check(c, REAL["30B"])
    c.cluster.host_memory_gib = node.total / GIB * 1.1
    fit.check(c, REAL["30B"])
    kept = shared(["optimizer"], kl=0.0)
    assert host_memory(kept, d, PARALLEL, None, nodes(c)[1], first=False).parked == 8 * held.weights


def test_sockets_that_are_known_are_looked_at() -> None:
    c, d = shared([], kl=0.0), model()
    c.cluster.host_memory_gib, c.cluster.numa_nodes = 400.0, 2
    each = 4 * policy_memory(c, d, PARALLEL, 0).pinned
    assert numa_warnings(c, d, PARALLEL) == [] and each < 200 * GIB
    c.cluster.host_memory_gib = 1.9 * each / GIB
    warnings = numa_warnings(c, d, PARALLEL)
    assert [note.partition(":")[0] for note in warnings] == ["node 0", "node 0", "node 1", "node 1"]
    assert f"{each / GIB:.0f} GiB are pinned for the GPUs of NUMA node 1" in warnings[1]
    c.cluster.numa_nodes = None
    assert numa_warnings(c, d, PARALLEL) == []


def test_moving_takes_the_links_time_or_the_nodes() -> None:
    c, d = shared([], kl=0.0), model()
    held = policy_memory(c, d, PARALLEL, 0).state
    there_and_back = 2 * (held.weights + held.optimizer)
    assert residency_time(c, d, PARALLEL) == pytest.approx(there_and_back / 50e9)
    c.cluster.rates.host_node_gb_s = 80.0  # 10 for each of eight GPUs
    assert residency_time(c, d, PARALLEL) == pytest.approx(there_and_back / 10e9)
    assert step_time(c, d, PARALLEL).residency == residency_time(c, d, PARALLEL)
    assert residency_time(shared(["parameters", "optimizer"]), d, PARALLEL) == 0.0


def test_a_streamed_optimizer_is_on_the_device_in_pieces_and_in_host_memory_always() -> None:
    d = model()
    for keep in (None, []):
        plain, c = shared(keep, kl=0.0), shared(keep, kl=0.0)
        c.policy.optimizer.streamed = True
        whole, rank = policy_memory(plain, d, PARALLEL, 0), policy_memory(c, d, PARALLEL, 0)
        assert rank.streamed == whole.state.optimizer > 20 * GIB, "12 bytes of each parameter that it trains"
        # An embedding of 151,936 × 2,048: a tensor-parallel rank holds half, a data-parallel rank an eighth.
        largest = 151936 * 2048 // 2 * 12
        assert whole.state.largest <= largest
        masters = whole.state.optimizer // 3
        pieces = 3 * max(256 * 2**20, whole.state.largest)
        assert rank.state.optimizer == max(pieces, masters - rank.activations.train - rank.activations.train_logits)
        for phase in STEP:
            here = keep is None or phase == "train"
            lacking = (whole.state.optimizer - rank.state.optimizer) * here
            assert whole.totals[phase] - rank.totals[phase] == lacking, phase
        leaves = rank.state.weights if keep == [] else 0
        assert rank.pinned == leaves + rank.streamed and rank.offloaded == leaves
        node, without = (host_memory(each, d, PARALLEL, None, nodes(c)[1], first=False) for each in (c, plain))
        assert node.parked == 8 * rank.pinned
        assert node.parked - without.parked == (0 if keep == [] else 8 * rank.streamed)


def test_streaming_takes_an_optimizer_steps_bytes_over_the_link_both_ways_at_once() -> None:
    plain, c, d = shared(None, kl=0.0), shared(None, kl=0.0), model()
    c.policy.optimizer.streamed = True
    state = policy_memory(plain, d, PARALLEL, 0).state.optimizer
    for node_gb_s, rate in (
        (1e4, 50e9),
        (400.0, 25e9),
    ):  # an eighth of the node's rate, for two directions
        for each in (plain, c):
            each.cluster.rates.host_node_gb_s = node_gb_s
        longer = step_time(c, d, PARALLEL).train - step_time(plain, d, PARALLEL).train
        updates = batch(c, PARALLEL).mini_batches * batch(c, PARALLEL).epochs
        assert longer == pytest.approx(updates * state / rate, rel=0.01)
        assert step_time(c, d, PARALLEL).residency == step_time(plain, d, PARALLEL).residency == 0.0


def test_a_critic_and_a_reference_on_gpus_of_their_own() -> None:
    c, d = shared([], kl=0.0), model()
    c.algorithm.advantage, c.critic.ranks = "gae", 16
    parallel = critic_dims(c)
    assert parallel is not None
    critic = critic_memory(c, d, parallel, 0)
    idle = critic.reserve + critic.gaps
    held = critic.state.weights + critic.state.gradients + critic.state.optimizer
    assert critic.totals["generate"] == critic.totals["train"] == idle, "its work has phases of its own"
    assert critic.totals["values"] == idle + held + critic.activations.forward + critic.activations.forward_logits
    assert critic.totals["critic"] == critic.peak == idle + held + critic.activations.train
    assert critic.pinned == critic.state.weights + critic.state.optimizer
    policy = policy_memory(c, d, PARALLEL, 0)
    assert residency_time(c, d, PARALLEL) == pytest.approx(2 * (policy.pinned + critic.pinned) / 50e9)
    c.residency.keep = ["critic"]
    assert critic_memory(c, d, parallel, 0).pinned == 0
    c.residency.keep, c.algorithm.kl.coefficient = [], 0.001
    frozen = reference_memory(c, d, PARALLEL, 0)
    assert min(frozen.totals.values()) == frozen.totals["generate"] > frozen.state.weights and frozen.pinned == 0


def test_the_table_is_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds a part to a phase of the table and expects its bytes in this phase."""
    c, d = shared([]), model()
    held, before = policy_memory(c, d, PARALLEL, 0).state, policy_memory(c, d, PARALLEL, 0).totals
    monkeypatch.setattr("skyrl_mega.config.residency.NEEDS", {**NEEDS, "sync": NEEDS["sync"] | {"optimizer"}})
    after = policy_memory(c, d, PARALLEL, 0).totals
    changed = {phase: after[phase] - before[phase] for phase in PHASES}
    assert changed == {phase: held.optimizer * (phase == "sync") for phase in PHASES}


def test_the_fullest_of_the_stages_is_looked_at() -> None:
    c, d = shared([], 0.5), model()
    c.policy.layout.pipeline, c.policy.layout.expert = 4, 2
    parallel = ParallelDims(16, tensor=2, pipeline=4, expert=2)
    gpus, worker = [*shared_gpus(c, d, parallel)], engine_memory(c, d)
    assert len(gpus) == len(stage_ranks(parallel)) == 4
    ranks = [policy_memory(c, d, parallel, rank) for rank in range(16)]
    every = [gpus[0].size - rank.totals[phase] - worker.totals[phase] for rank in ranks for phase in STEP]
    assert min(gpu.least_free for gpu in gpus) == min(every)
    assert [min(every[i::4]) for i in range(4)] == [fullest(gpus, phase).free(phase) for phase in STEP]
    assert PolicyRanks(c, d, parallel).peak([]) == max(rank.totals[phase] for rank in ranks for phase in STEP)
    other = replace(c.residency, keep=["gradients"])
    assert PolicyRanks(c, d, parallel).peak(["gradients"]) == max(
        policy_memory(replace(c, residency=other), d, parallel, rank).peak for rank in range(16)
    )


def test_rounded_weights_of_a_pass_are_counted_in_it() -> None:
    """Compares with Qwen3-30B-A3B's sizes: a byte per direction for a rank with TP2 EP8, except embedding and head."""
    c, d = shared([], kl=0.0), model()
    before = policy_memory(c, d, PARALLEL, 0)
    c.policy.precision.recipe = "fp8_blockwise"
    after = policy_memory(c, d, PARALLEL, 0)
    attention = (2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048) // 2
    experts = 128 // 8 * 3 * 2048 * 768
    small = 2 * 2048 + 2 * 128 + 2048 * 128  # norms and the router
    weights = 48 * (attention + experts + small)
    assert after.activations.forward - before.activations.forward == weights
    assert after.activations.train - before.activations.train == 2 * weights
    assert after.totals["generate"] == before.totals["generate"]
    c.policy.precision.parameters = "fp8"
    kept = policy_memory(c, d, PARALLEL, 0)
    assert kept.activations == before.activations, (
        "a byte for each direction in the parameters themselves, which were two in bfloat16"
    )
    c.policy.precision.parameters = "model"
    c.policy.precision.first_layers = c.policy.precision.last_layers = 4
    assert 48 * (policy_memory(c, d, PARALLEL, 0).activations.train - before.activations.train) == 40 * 2 * weights
    c.policy.precision.first_layers = c.policy.precision.last_layers = 0
    stages = ParallelDims(16, tensor=2, pipeline=4, expert=2)
    each = [fp8_copies(c, one, stages, pp) for one in (d, d.critic) for pp in range(4)]
    assert len({*each}) == 1, "twelve layers, whatever a stage's ends are"
