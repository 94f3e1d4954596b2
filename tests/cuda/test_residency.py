"""Tests of moving a rank's state between a GPU and locked host memory: streams, locking, order of calls.

The device is simulated: tensors lie in host memory and report CUDA as their device. A stream counts its work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_mega.megatron.residency import OffloadablePart, Resident
from skyrl_mega.megatron.streamed_optimizer import StreamedPart
from tests.cuda import streams
from tests.cuda.fake_cuda import CUDA, CpuAsCuda


class Events(TorchDispatchMode):
    """Records copies with their stream and blocking mode."""

    def __init__(self, told: list[Any]) -> None:
        super().__init__()
        self.told = told

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            blocking = not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False))
            stream = streams.Stream.current
            stream.count += 1
            self.told.append(("copy", stream is streams.MAIN, blocking, args[0].data_ptr(), args[1].data_ptr()))
        return func(*args, **(kwargs or {}))


class Stream(streams.Stream):
    """Stream that also records waits."""

    told: list[Any]

    def wait_stream(self, other: streams.Stream) -> None:
        Stream.told.append("side waits")
        super().wait_stream(other)

    def synchronize(self) -> None:
        Stream.told.append("synchronized")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yields the list of calls to CUDA, in order."""
    calls: list[Any] = []
    Stream.told = calls

    def note(*event: Any) -> int:
        calls.append(event)
        return 0

    cudart = SimpleNamespace(
        cudaHostRegister=lambda at, size, flags: note("lock", at, size, flags),
        cudaHostUnregister=lambda at: note("unlock", at),
    )
    main = streams.MAIN
    monkeypatch.setattr(main, "wait_stream", lambda other: calls.append("main waits"), raising=False)
    names: dict[str, Any] = dict(
        Stream=Stream,
        stream=streams.on,
        current_stream=lambda *_: streams.Stream.current,
        cudart=lambda: cudart,
        check_error=lambda code: calls.append(("code", code)),
        empty_cache=lambda: calls.append("given back"),
    )
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with CpuAsCuda(), Events(calls):
        yield calls


def test_parts_go_to_locked_memory_on_a_stream_of_their_own(told: list[Any]) -> None:
    params = [torch.arange(5, dtype=torch.bfloat16), torch.randn(1000)]
    sizes, wanted = [p.untyped_storage().nbytes() for p in params], [p.tolist() for p in params]
    at = [p.data_ptr() for p in params]
    resident = Resident("policy", CUDA, {"parameters": lambda: params})
    told.clear()

    assert resident.offload(["parameters"]) == sum(sizes)
    (_, host, locked, flags), (_, code) = told[:2]
    assert told[0][0] == "lock" and locked >= sum(sizes) and flags == code == 0
    assert host % 4096 == 0, "whole pages"
    assert told[2:] == [
        "side waits",  # waits for computation on the parameters
        ("copy", False, False, host, at[0]),
        ("copy", False, False, host + 512, at[1]),
        "main waits",
        "synchronized",  # before the memory is reused
        "given back",
    ]
    told.clear()

    assert resident.onload(["parameters"]) == sum(sizes)
    back = [p.data_ptr() for p in params]
    assert told == [
        "side waits",  # waits for the former user of the memory
        ("copy", False, False, back[0], host),
        ("copy", False, False, back[1], host + 512),
        "main waits",
        "synchronized",
    ]
    assert [p.tolist() for p in params] == wanted
    told.clear()
    resident.offload(["parameters"])
    assert not [event for event in told if event[0] == "lock"], "locking takes long, and is done once"


def test_memory_of_another_size_is_unlocked_first(told: list[Any]) -> None:
    first, second = torch.zeros(300), torch.zeros(3000)
    held: list[Tensor] = [first]
    resident = Resident("policy", CUDA, {"optimizer": lambda: held})
    resident.offload(["optimizer"])
    resident.forget("optimizer")
    held[:] = [second]
    told.clear()
    resident.offload(["optimizer"])
    assert [event[0] for event in told if event[0] in ("lock", "unlock")] == ["unlock", "lock"]


def test_what_is_refused_is_an_error(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 2)
    parameter = torch.ones(10)
    resident = Resident("policy", CUDA, {"parameters": lambda: [parameter]})
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        resident.offload(["parameters"])
    assert not resident.offloaded and parameter.tolist() == [1.0] * 10


# ---- an optimizer in pieces ------------------------------------------------------------------------------------------


def a_streamed_part(count: int) -> tuple[StreamedPart, list[Tensor], list[Tensor], list[Any]]:
    """Returns an optimizer part with one parameter a piece in two groups, the weights, the masters, and the list of
    steps of a simulated Adam that adds 1."""
    weights = [torch.full((300,), float(i), dtype=torch.bfloat16) for i in range(count)]
    masters = [w.float() for w in weights]
    steps: list[Any] = []
    inner = SimpleNamespace(state=defaultdict(dict), param_groups=[{"params": masters[:2]}, {"params": masters[2:]}])

    def step(closure: Any) -> None:
        for group in inner.param_groups:
            if group["params"]:  # some versions of Transformer Engine do not count a step of an empty group
                group["step"] = group.get("step", 0) + 1
        (stepped,) = (group for group in inner.param_groups if group["params"])
        indices = [i for i, m in enumerate(masters) if any(m is w for w in stepped["params"])]
        steps.append(("step", indices, stepped["step"]))
        for i in indices:
            masters[i].add_(1)
            inner.state[masters[i]]["exp_avg"].add_(masters[i].grad)

    inner.step = step
    part: Any = SimpleNamespace(
        optimizer=inner,
        model_fp32_groups=[],
        shard_fp32_groups=[],
        model_float16_groups=[weights],
        shard_fp32_from_float16_groups=[masters],
        _get_model_param_range_map=lambda p: {"param": SimpleNamespace(start=0, end=p.numel())},
    )
    return StreamedPart(part, CUDA, 1), weights, masters, steps


def test_while_a_piece_is_stepped_one_comes_and_one_leaves(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    part, weights, masters, events = a_streamed_part(4)
    number = {id(piece.part): i for i, piece in enumerate(part.pieces)}
    words = {"begin_onload": "comes", "end_onload": "here", "begin_offload": "leaves", "end_offload": "gone"}

    def noting(of: Any, word: str) -> Any:
        def noted(self: OffloadablePart, *args: Any) -> Any:
            events.append((word, number[id(self)]))
            return of(self, *args)

        return noted

    for name, word in words.items():
        monkeypatch.setattr(OffloadablePart, name, noting(getattr(OffloadablePart, name), word))
    assert not any(m.untyped_storage().nbytes() for m in masters), "from the beginning on"
    for step in (1, 2):
        for m in masters:
            m.grad = torch.ones(300)
        events.clear()
        part.step()
        part.to_model()  # as megatron-core does after a step; already done here
        order = [("step", *event[1]) if event[0] == "step" else event for event in events]
        assert order == [
            ("comes", 0), ("comes", 1), ("here", 0), ("step", 0), ("leaves", 0),
            ("comes", 2), ("here", 1), ("step", 1), ("leaves", 1), ("gone", 0),
            ("comes", 3), ("here", 2), ("step", 2), ("leaves", 2), ("gone", 1),
            ("here", 3), ("step", 3), ("leaves", 3), ("gone", 2), ("gone", 3),
        ]  # fmt: skip
        assert {event[2] for event in events if event[0] == "step"} == {step}, "one step, not one for each piece"
        assert [w[0].item() for w in weights] == [i + step for i in range(4)]
    assert not any(m.untyped_storage().nbytes() for m in masters)
    on_host = [part.pieces[i].part.host_view(part.part.optimizer.state[m]["exp_avg"]) for i, m in enumerate(masters)]
    assert all(values is not None and values.tolist() == [2.0] * 300 for values in on_host)


def test_a_fault_half_way_leaves_nothing_on_the_device_and_no_step_counted(told: list[Any]) -> None:
    part, _, masters, _ = a_streamed_part(4)
    groups = part.part.optimizer.param_groups
    for m in masters:
        m.grad = torch.ones(300)
    part.step()
    step = part._inner_step

    def third(closure: Any) -> None:
        if groups[1]["params"] and masters[2] is groups[1]["params"][0]:
            raise MemoryError("the third")
        step(closure)

    part._inner_step = third
    with pytest.raises(MemoryError, match="the third"):
        part.step()
    assert [(group["step"], len(group["params"])) for group in groups] == [(1, 2), (1, 2)]
    assert not any(m.untyped_storage().nbytes() for m in masters)
    assert [part.pieces[i].part.host_view(m).tolist()[0] for i, m in enumerate(masters)] == [2.0, 3.0, 3.0, 4.0]


def test_pieces_are_copied_beside_the_main_stream_from_locked_memory(told: list[Any]) -> None:
    part, _, masters, _ = a_streamed_part(3)
    assert sum(event[0] == "lock" for event in told) == 3
    for m in masters:
        m.grad = torch.ones(300)
    told.clear()
    part.step()
    copies = [event for event in told if event[0] == "copy"]
    between = [event for event in copies if not event[1]]
    assert len(between) == 3 * 2 * 3 and not any(event[2] for event in between), "three tensors, in and out"
    assert all(event[1] for event in copies if event not in between), "masters into the model's weights"
    assert not [event for event in told if event[0] == "lock"]
