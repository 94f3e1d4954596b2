"""Tests of offloading and reloading a rank's state: memory of real processes, every bit, the state after a failed
move."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_mega.config.residency import NEEDS, POLICY, resident
from skyrl_mega.config.schema import BuildConfig, OptimizerConfig, PolicyConfig
from skyrl_mega.megatron import moments, objectives
from skyrl_mega.megatron.residency import NotOnDevice, OffloadablePart, Resident, gradients
from skyrl_mega.megatron.worker import ModelWorker
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from tests.megatron import layouts
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
BATCH = layouts.some_batch(100)
STEPS = 3
LARGE = BuildConfig(hidden=256, layers=2, experts=16, expert_ffn=768)
"""Model with 19 million parameters: 38 MB in bfloat16, 77 MB of gradients, 230 MB of master weights and moments."""
CYCLES = 10


def memory() -> int:
    """Returns the bytes of this process's pages of all kinds."""
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))


def move(rank: ModelWorker, phase: str) -> None:
    """Moves parts between device and host as the ledger does, without kept parts."""
    wanted = resident(phase, [])
    rank.offload([part for part in POLICY if part not in wanted])
    rank.onload([part for part in POLICY if part in wanted])


def bits(tensors: Any) -> list[bytes]:
    """Returns the bits of copies: numpy blocks a later resize of the original storage."""
    return [
        t.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
        for t in tensors
    ]


# ---- storages --------------------------------------------------------------------------------------------------------


def some_storages() -> tuple[list[Tensor], list[Tensor]]:
    """Returns buffers of odd sizes with random bits, and views of the buffers; two views share a buffer."""
    torch.manual_seed(0)
    buffers = [torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16) for n in (7, 300, 70_001)]
    a, b, c = (buffer.view(torch.bfloat16) for buffer in buffers)
    return buffers, [a[1:4], b[10:20], b[100:250].view(10, 15).T, c[3:]]


def test_storages_leave_and_come_back_bit_by_bit() -> None:
    buffers, views = some_storages()
    before = bits(buffers), bits(views)
    part = OffloadablePart(CPU)
    for _ in range(3):
        assert part.offload(views) == sum(b.nbytes for b in buffers)
        assert [v.untyped_storage().nbytes() for v in views] == [0] * 4
        assert bits(part.host_view(v) for v in views) == before[1]
        assert part.offload(views) == 0, "it is away"
        assert part.onload() == sum(b.nbytes for b in buffers)
        assert (bits(buffers), bits(views)) == before
        assert part.onload() == 0 and part.host_view(views[0]) is None
        views[0] += 1
        before = bits(buffers), bits(views)


def test_what_is_dropped_comes_back_as_zeros() -> None:
    part, view = OffloadablePart(CPU, dropped=True), torch.ones(50)[10:]
    assert part.offload([view]) == 0 and not view.untyped_storage().nbytes()
    part.onload()
    assert view.tolist() == [0.0] * 40


class Broken(TorchDispatchMode):
    """Mode that raises at a copy, before or after the copy."""

    def __init__(self, at: int, late: bool) -> None:
        super().__init__()
        self.left, self.late = at, late

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.left -= 1
        if not self.left and not self.late:
            raise KeyboardInterrupt
        out = func(*args, **(kwargs or {}))
        if not self.left:
            raise KeyboardInterrupt
        return out


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("copy", [1, 2, 3])
def test_a_move_that_was_broken_off_is_made_again(copy: int, late: bool) -> None:
    _, views = some_storages()
    part, before = OffloadablePart(CPU), bits(views)
    with pytest.raises(KeyboardInterrupt), Broken(copy, late):
        part.offload(views)
    assert not part.offloaded and bits(views) == before, "nothing is lost"
    views[0] += 1
    before = bits(views)
    part.offload(views)
    with pytest.raises(KeyboardInterrupt), Broken(copy, late):
        part.onload()
    assert part.offloaded, "it is not there until all of it is"
    assert bits(part.host_view(v) for v in views) == before
    part.offload(views)
    assert [v.untyped_storage().nbytes() for v in views] == [0] * 4
    part.onload()
    assert bits(views) == before


def test_a_device_without_room_keeps_what_is_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, views = some_storages()
    part, before = OffloadablePart(CPU), bits(views)
    part.offload(views)

    def full(storage: object, size: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.raises(MemoryError):
            part.onload()
    part.onload()
    assert bits(views) == before


def test_a_storage_of_two_parts_belongs_to_the_first() -> None:
    """Offloads a storage shared by two parts: the master weights of a float32 model are the parameters."""
    shared, separate = torch.arange(8.0), torch.arange(3.0)
    view = shared[2:]
    both = Resident("policy", CPU, {"parameters": lambda: [shared], "optimizer": lambda: [view, separate]})
    both.offload(["optimizer"])
    assert shared.untyped_storage().nbytes() and not separate.untyped_storage().nbytes()
    both.offload(["parameters"])
    assert both.readable(view).tolist() == [2, 3, 4, 5, 6, 7] and both.readable(separate).tolist() == [0, 1, 2]
    both.onload(["optimizer"])
    assert not shared.untyped_storage().nbytes() and separate.tolist() == [0, 1, 2]


# ---- in a real rank --------------------------------------------------------------------------------------------------


def cycles(rank: int, address: str, path: Path, policy: PolicyConfig, turns: bool) -> Any:
    """Repeats log-probs, an optimizer step and rollouts; returns sizes, memory by phase, log-probs, and weights."""
    torch.backends.mkldnn.set_flags(False)  # oneDNN keeps memory for every seen shape
    opened = layouts.open_rank(rank, address, path, layouts.layout(1), policy, torch.bfloat16)
    micros = [layouts.some_batch(100, count=4)]
    sizes = {
        "parameters": sum(b.param_data.nbytes for c in opened.chunks for b in buffers(c)),
        "gradients": sum(g.nbytes for g in gradients(opened.chunks)),
        "optimizer": sum(t.nbytes for t in moments_and_masters(opened)),
    }
    used: dict[str, list[int]] = {phase: [] for phase in ("generate", "logprobs", "train", "sync")}
    seen = []
    for cycle in range(CYCLES):
        for phase in used:
            if turns:
                move(opened, phase)
            if phase == "logprobs":
                ((values, *_), *_) = opened.logprobs(micros) or [()]
                seen.append(values.numpy())
            if phase == "train" and cycle in (0, CYCLES // 2):
                seen.append(np.array([*opened.train(micros, objectives.supervised).values()]))
            opened.offload([])  # also releases memory kept by computation
            used[phase].append(memory())
    weights = {name: p.float().clone().numpy() for name, p in opened.weights().items()}
    return sizes, used, seen, weights


def buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def moments_and_masters(rank: ModelWorker) -> list[Tensor]:
    return [
        t
        for part in moments.inner_optimizers(rank.optimizer)
        for _, master in moments.master_weights(part)
        for t in (master, *(part.optimizer.state[master][kind] for kind in ("exp_avg", "exp_avg_sq")))
    ]


def test_a_processs_memory_is_that_of_its_phase_and_does_not_grow(tmp_path: Path) -> None:
    build(LARGE, tmp_path / "model", seed=1)
    policy = layouts.policy_config(micro_tokens=200)
    ((sizes, by_phase, seen, weights),) = run_ranks(1, cycles, tmp_path / "model", policy, True)
    ((_, _, wanted_seen, wanted),) = run_ranks(1, cycles, tmp_path / "model", policy, False)
    np.testing.assert_equal(seen, wanted_seen)
    np.testing.assert_equal(weights, wanted)
    assert sizes["parameters"] > 37e6 and sizes["optimizer"] == pytest.approx(6 * sizes["parameters"], rel=0.01)
    base = by_phase["generate"][1]
    for phase, (_, *used) in by_phase.items():  # in the first cycle the program itself grows
        planned = sum(size for part, size in sizes.items() if part in NEEDS[phase])
        off = max(abs(of_cycle - base - planned) for of_cycle in used)
        print(f"{phase}: {planned / 1e6:.1f} MB planned, at most {off / 1e6:.2f} MB off")
        assert off < 0.05 * (planned or sizes["parameters"]), phase


# ---- several ranks ---------------------------------------------------------------------------------------------------


def a_run(
    rank: int, address: str, paths: tuple[Path, Path], parallel: ParallelDims, options: Any, folder: Path, turns: bool
) -> Any:
    """Returns a policy's results in a run, with parts offloaded between phases or all parts on the device."""
    policy, dtype = options
    opened = layouts.open_rank(rank, address, paths[0], parallel, policy, dtype)
    _, micros = layouts.deal(BATCH, opened)
    opened.keep_reference(paths[1])
    results: list[Any] = []

    def phase(name: str) -> None:
        if turns:
            move(opened, name)

    def logprobs(**of: bool) -> np.ndarray:
        return np.concatenate([values.numpy() for values, *_ in opened.logprobs(micros, **of) or [(torch.zeros(0),)]])

    for step in range(STEPS):
        phase("generate")
        phase("logprobs")
        results += [logprobs(), logprobs(reference=True)]
        phase("train")
        results += [opened.train(micros, objectives.supervised) for _ in range(2)]
        phase("generate")  # offloads everything while the gather of an overlapping step may be open
        phase("sync")
        results.append({name: p.float().clone().numpy() for name, p in opened.weights().items()})
        phase("generate")
        if step == 1:
            opened.save(folder)  # saves from host memory
    phase("generate")
    opened.restore(folder)
    opened.keep_reference(paths[1])
    assert not turns or opened.resident.offloaded == set(POLICY), "what was away is away again"
    phase("logprobs")
    results.append(logprobs(reference=True))
    phase("train")
    results.append(opened.train(micros, objectives.supervised))
    phase("generate")
    opened.reset_optimizer(policy.optimizer)
    assert not turns or opened.resident.offloaded == set(POLICY)
    phase("train")
    results.append(opened.train(micros, objectives.supervised))
    opened.load(paths[1])
    results.append(logprobs())
    state = {
        name: [start, stop, {kind: values.float().clone().numpy() for kind, values in kinds.items()}]
        for name, (start, stop, kinds) in runs_of(opened).items()
    }
    return results, state


def runs_of(rank: ModelWorker) -> dict[str, Any]:
    """Returns parameter → first and last element trained by this rank's optimizer, and the state of these elements."""
    names, runs = {id(p): name for name, p in rank.params.items()}, {}
    for part in moments.inner_optimizers(rank.optimizer):
        for p, master in moments.master_weights(part):
            run, state = part._get_model_param_range_map(p)["param"], part.optimizer.state[master]
            kinds = {"master": master.detach(), **{kind: state[kind] for kind in ("exp_avg", "exp_avg_sq")}}
            kinds = {kind: rank.resident.readable(t) for kind, t in kinds.items()}
            runs[names[id(p)]] = run.start, run.end, kinds
    return runs


CASES = [
    pytest.param(2, {}, {"overlap": False}, torch.bfloat16, marks=pytest.mark.slow),
    pytest.param(2, {"tensor": 2}, {"overlap": False}, torch.bfloat16, marks=pytest.mark.slow),
    (2, {"expert": 2}, {"overlap": True}, torch.bfloat16),
    (4, {"tensor": 2, "expert": 2}, {"overlap": True}, torch.float32),
]


@pytest.mark.parametrize(("ranks", "sizes", "settings", "dtype"), CASES)
def test_taking_turns_changes_no_bit(
    tmp_path: Path, ranks: int, sizes: dict[str, int], settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Compares log-probs of policy and reference, losses, weights, checkpoints and moments."""
    paths = tmp_path / "own", tmp_path / "other"
    for seed, path in enumerate(paths):
        build(BuildConfig(), path, seed=seed + 1)
    policy = layouts.policy_config(optimizer=OptimizerConfig(lr=1e-2), **settings)
    answers = []
    for turns in (False, True):
        (folder := tmp_path / f"checkpoint-{turns}").mkdir()
        args = paths, layouts.layout(ranks, **sizes), (policy, dtype), folder, turns
        answers.append((run_ranks(ranks, a_run, *args), {f.name: f.read_bytes() for f in folder.iterdir()}))
    np.testing.assert_equal(answers[1][0], answers[0][0])
    assert answers[1][1] == answers[0][1] and len(answers[0][1]) > ranks, (
        "a checkpoint of what is away is the same files"
    )


def refusals(rank: int, address: str, path: Path) -> Any:
    opened = layouts.open_rank(rank, address, path, layouts.layout(1), layouts.policy_config())
    micros, messages = [BATCH], []

    def refused(what: Any) -> None:
        with pytest.raises(NotOnDevice) as caught:
            what()
        messages.append(str(caught.value))

    opened.offload(["optimizer"])
    refused(lambda: opened.train(micros, objectives.supervised))
    opened.offload(["critic"])  # all parts
    for what in (opened.logprobs, opened.values, lambda m: opened.measure(m, objectives.supervised)):
        refused(lambda what=what: what(micros))
    refused(opened.weights)
    opened.onload(["parameters", "gradients"])
    refused(lambda: opened.train(micros, objectives.supervised))
    opened.onload(["critic"])
    opened.train(micros, objectives.supervised)
    return messages


def test_nothing_computes_with_what_is_not_there(tmp_path: Path) -> None:
    build(BuildConfig(), tmp_path / "model", seed=1)
    (messages,) = run_ranks(1, refusals, tmp_path / "model")
    assert messages[0] == "policy: optimizer is not on the device; onload(['optimizer']) brings it back"
    assert [line.split()[1] for line in messages] == ["optimizer", *["parameters"] * 4, "optimizer"]
