"""Tests of swapping the reference's weights with the policy's: bit by bit, in place, through a bounded buffer, also
after an error. Copies are real on a CPU; requests to a GPU are tested with fake tensors of device `cuda`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.megatron import objectives, reference
from skyrl_mega.megatron.reference import Reference
from skyrl_mega.models.tiny import build
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import memory
from skyrl_mega.trajectories.sequences import Sequences
from tests.megatron import layouts
from tests.support.ranks import run_ranks

PIECE = 128
COPIES = 6 * 7
"""Number of copies there and back for the parameters below: 336 elements of two bytes, and 17 of four."""


class Copies(TorchDispatchMode):
    """Counts copies and allocated bytes; the copies numbered in `fail` raise, before or (`late`) after the copy."""

    def __init__(self, fail: set[int] = frozenset(), late: bool = False) -> None:  # type: ignore[assignment]
        super().__init__()
        self.fail, self.late = fail, late
        self.copies = self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default):
                self.allocated += out.nbytes
            return out
        self.copies += 1
        failing = self.copies in self.fail
        if failing and not self.late:
            raise KeyboardInterrupt
        out = func(*args, **(kwargs or {}))
        if failing:
            raise KeyboardInterrupt
        return out


def parameters() -> list[Tensor]:
    """Returns three parameters in one buffer with padding between, and a frozen one outside; random bits with NaNs."""
    buffer = torch.randint(-(2**15), 2**15, (500,), dtype=torch.int16).view(torch.bfloat16)
    inside = [buffer[64 : 64 + 90].view(9, 10), buffer[192:193], buffer[256:400].view(2, 72)]
    return [*inside, torch.randint(-(2**31), 2**31, (17,), dtype=torch.int32).view(torch.float32)]


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], Reference, list[bytes], list[bytes]]:
    """Returns parameters, a reference with different weights, and the bits of both."""
    monkeypatch.setattr(reference, "PIECE", PIECE)
    torch.manual_seed(0)
    params, other = parameters(), parameters()
    policy_bits = bits(params)
    swapped = Reference(params)
    with swapped.swapped():
        assert all(not p.any() for p in params), "zeros, until something is loaded"
        for p, o in zip(params, other, strict=True):
            p.copy_(o)
    assert bits(params) == policy_bits
    return params, swapped, policy_bits, bits(other)


def test_weights_change_places_bit_by_bit_and_stay_where_they_are(pair: Any) -> None:
    params, held, policy_bits, other = pair
    where = [p.data_ptr() for p in params]
    for _ in range(2):
        with held.swapped():
            assert bits(params) == other
            assert [p.data_ptr() for p in params] == where
        assert bits(params) == policy_bits


def test_what_lies_between_parameters_stays_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the buffer around the parameters: a data-parallel buffer holds other data before and after."""
    monkeypatch.setattr(reference, "PIECE", PIECE)
    buffer = torch.arange(100.0)
    held = Reference([buffer[20:40], buffer[50:70]])
    with held.swapped():
        assert buffer[:20].tolist() == list(range(20)) and buffer[70:].tolist() == list(range(70, 100))
    assert buffer.tolist() == list(range(100))


def test_an_exchange_takes_one_piece_of_memory(pair: Any) -> None:
    params, held, _, _ = pair
    size = sum(p.nbytes for p in params)
    assert size > 3 * PIECE
    with Copies() as copies, held.swapped():
        pass
    assert copies.allocated == PIECE
    assert copies.copies == COPIES
    assert held.host_size == 2 * (400 - 64) + 4 * 17, "one set of weights, and the paddings between them"


def everywhere() -> Iterator[tuple[set[int], bool]]:
    """Yields errors at every copy of a swap, before and after the copy; and at two copies."""
    for late in (False, True):
        for k in range(1, COPIES + 1):
            yield {k}, late
            yield {k, k + 1}, late
            yield {k, k + 4}, late


def test_after_an_error_anywhere_the_weights_are_the_policys_own(pair: Any) -> None:
    params, held, policy_bits, other = pair
    broken = 0
    for fail, late in everywhere():
        with Copies(fail, late) as copies:
            try:
                with held.swapped():
                    pass
            except KeyboardInterrupt:
                broken += 1
            # After an error on the way back, the next user of the weights must restore.
            while bits(params) != policy_bits:
                try:
                    held.restore_policy()
                except KeyboardInterrupt:
                    continue
                break
        assert bits(params) == policy_bits, (fail, late, copies.copies)
        with held.swapped():
            assert bits(params) == other, (fail, late)
        assert bits(params) == policy_bits
    assert broken > 150


def test_one_error_on_the_way_there_needs_no_help(pair: Any) -> None:
    params, held, policy_bits, _ = pair
    for k in range(1, COPIES // 2 + 1):
        with pytest.raises(KeyboardInterrupt), Copies({k}, late=bool(k % 2)), held.swapped():
            raise AssertionError("never comes here")
        assert bits(params) == policy_bits


def test_an_error_inside_gives_the_weights_back(pair: Any) -> None:
    params, held, policy_bits, _ = pair
    with pytest.raises(ZeroDivisionError), held.swapped():
        _ = 1 / 0
    assert bits(params) == policy_bits


def test_parameters_that_are_strided_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 2\) is not contiguous"):
        Reference([torch.zeros(2, 3).T])


def test_on_a_gpu_host_memory_is_pinned_and_the_device_gives_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    allocated: list[int] = []
    known: dict[int, Any] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if (kwargs or {}).get("pin_memory"):
                pinned.append(out.nbytes)
            elif isinstance(out, Tensor) and out.device.type == "cuda":
                storage = out.untyped_storage()
                if storage.nbytes() and storage._cdata not in known:
                    allocated.append(storage.nbytes())
                known[storage._cdata] = storage  # referenced, so that no other storage reuses the number
            return out

    # torch's Tensor.copy_ needs CUDA's device guard, missing in a build without CUDA.
    copy = lambda self, source, non_blocking=False: torch.ops.aten.copy_(self, source, non_blocking)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    with FakeTensorMode():
        buffer = torch.empty(100 * 2**20, dtype=torch.bfloat16, device="cuda")
        known[buffer.untyped_storage()._cdata] = buffer.untyped_storage()
        params = [buffer.narrow(0, 0, 60 * 2**20), buffer.narrow(0, 61 * 2**20, 39 * 2**20)]
        with Watch():
            held = Reference(params)
            assert sum(pinned) == held.host_size == 200 * 2**20
            assert all(size & (size - 1) == 0 for size in pinned[:-1]), "torch rounds pinned blocks up to powers of two"
            assert sum(allocated) == 0
            with held.swapped():
                pass
    assert sum(allocated) == reference.PIECE == memory.SWAP


# ---- in a real rank -------------------------------------------------------------------------------------------------


def in_a_rank(rank: int, address: str, path: Path, other: Path, parallel: ParallelDims, batch: Sequences) -> Any:
    opened = layouts.open_rank(rank, address, path, parallel, layouts.policy_config(), torch.bfloat16)
    _, micros = layouts.deal(batch, opened)
    where = {name: p.data_ptr() for name, p in opened.params.items()}
    policy_weights = {name: p.detach().clone() for name, p in opened.params.items()}

    before = arrays(opened.logprobs(micros))
    opened.keep_reference(other)
    run, moved = opened._run, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        moved.append([name for name, p in opened.params.items() if p.data_ptr() != where[name]])
        return run(*args, **kwargs)

    opened._run = watched  # type: ignore[method-assign]
    reference_logprobs = arrays(opened.logprobs(micros, reference=True))
    after = arrays(opened.logprobs(micros))

    def failing(*args: Any, **kwargs: Any) -> Any:
        run(*args, **kwargs)
        raise ZeroDivisionError

    opened._run = failing  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        opened.logprobs(micros, reference=True)
    same = all(torch.equal(p, policy_weights[name]) for name, p in opened.params.items())
    opened._run = run  # type: ignore[method-assign]
    metrics = [opened.train(micros, objectives.supervised) for _ in range(2)]
    return before, reference_logprobs, after, moved, same, metrics


def arrays(pairs: list[tuple[torch.Tensor, torch.Tensor]] | None) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(logprobs.numpy(), entropy.numpy()) for logprobs, entropy in pairs or ()]


def alone(rank: int, address: str, path: Path, parallel: ParallelDims, batch: Sequences, steps: int) -> Any:
    opened = layouts.open_rank(rank, address, path, parallel, layouts.policy_config(), torch.bfloat16)
    _, micros = layouts.deal(batch, opened)
    return arrays(opened.logprobs(micros)), [opened.train(micros, objectives.supervised) for _ in range(steps)]


def test_a_rank_computes_with_the_reference_and_trains_its_own(tmp_path: Path) -> None:
    for seed, name in ((1, "own"), (2, "other")):
        build(BuildConfig(), tmp_path / name, seed=seed)
    batch, parallel = layouts.some_batch(100), layouts.layout(2, expert=2)
    answers = run_ranks(2, in_a_rank, tmp_path / "own", tmp_path / "other", parallel, batch)
    undisturbed = run_ranks(2, alone, tmp_path / "own", parallel, batch, 2)
    of_other = run_ranks(2, alone, tmp_path / "other", parallel, batch, 0)
    for rank, (before, by_reference, after, moved, same, metrics) in enumerate(answers):
        assert moved == [[], []], "no parameter has moved, with the reference's weights or with its own"
        assert same, "after an error the weights are the policy's own, to the bit"
        np.testing.assert_equal(before, undisturbed[rank][0])
        np.testing.assert_equal(after, before)
        np.testing.assert_equal(by_reference, of_other[rank][0])
        assert metrics == undisturbed[rank][1]


# ---- memory that is taken at the start ------------------------------------------------------------------------------


def moments(rank: int, address: str, path: Path, batch: Sequences, late: bool) -> Any:
    opened = layouts.open_rank(rank, address, path, layouts.layout(2, expert=2), layouts.policy_config())
    inner = [part.optimizer for part in opened.optimizer.chained_optimizers]
    allocated = [
        all(optimizer.state[p].keys() >= {"exp_avg", "exp_avg_sq"} for p in group["params"])
        for optimizer in inner
        for group in optimizer.param_groups
    ]
    if late:
        for optimizer in inner:
            optimizer.state.clear()
    _, micros = layouts.deal(batch, opened)
    metrics = [opened.train(micros, objectives.supervised) for _ in range(2)]
    return allocated, metrics, {name: t.numpy().copy() for name, t in opened.weights().items()}


def test_moments_are_there_before_the_first_step_and_change_nothing(tmp_path: Path) -> None:
    build(BuildConfig(), tmp_path / "model", seed=1)
    batch = layouts.some_batch(100)
    early, late = (run_ranks(2, moments, tmp_path / "model", batch, late) for late in (False, True))
    for (allocated, *actual), (_, *wanted) in zip(early, late, strict=True):
        assert allocated and all(allocated)
        np.testing.assert_equal(actual, wanted)


ACTOR = """
import os, torch
torch.cuda.set_device = lambda *_: None
from skyrl_mega.config.schema import AlgorithmConfig, PolicyConfig
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.megatron.actor import MegatronActor
MegatronActor(0, ParallelDims(), {}, PolicyConfig(spec="local"), AlgorithmConfig(), dtype="bfloat16", device=DEVICE)
import json
print(json.dumps(torch._C._accelerator_getAllocatorSettings()))
"""


@pytest.mark.parametrize(
    ("device", "user", "settings"),
    [
        ("cuda", {}, "expandable_segments:True"),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "max_split_size_mb:512"),
        ("cuda", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
        ("cpu", {}, ""),
    ],
)
def test_segments_expand_in_a_policy_process_unless_the_user_says_otherwise(
    device: str, user: dict[str, str], settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    program = ACTOR.replace("DEVICE", repr(device))
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == settings
