"""Parts of a rank's state on their way between a GPU and locked host memory: streams, locking, in their order.

The device is pretended: tensors lie in host memory and say that they are CUDA's. A stream counts what is put on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_mega.megatron.residency import Resident
from tests.cuda import streams
from tests.cuda.fake_cuda import CUDA, CpuAsCuda


class Events(TorchDispatchMode):
    """Writes down copies, with the stream that they are on and whether they block the host."""

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
    """Also writes down what waits for what."""

    told: list[Any]

    def wait_stream(self, other: streams.Stream) -> None:
        Stream.told.append("side waits")
        super().wait_stream(other)

    def synchronize(self) -> None:
        Stream.told.append("synchronized")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What CUDA is asked for, in order."""
    found: list[Any] = []
    Stream.told = found

    def note(*event: Any) -> int:
        found.append(event)
        return 0

    cudart = SimpleNamespace(
        cudaHostRegister=lambda at, size, flags: note("lock", at, size, flags),
        cudaHostUnregister=lambda at: note("unlock", at),
    )
    main = streams.MAIN
    monkeypatch.setattr(main, "wait_stream", lambda other: found.append("main waits"), raising=False)
    names: dict[str, Any] = dict(
        Stream=Stream,
        stream=streams.on,
        current_stream=lambda *_: streams.Stream.current,
        cudart=lambda: cudart,
        check_error=lambda code: found.append(("code", code)),
        empty_cache=lambda: found.append("given back"),
    )
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    with CpuAsCuda(), Events(found):
        yield found


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
        "side waits",  # for what computes with them
        ("copy", False, False, host, at[0]),
        ("copy", False, False, host + 512, at[1]),
        "main waits",
        "synchronized",  # before the memory is anybody else's
        "given back",
    ]
    told.clear()

    assert resident.onload(["parameters"]) == sum(sizes)
    back = [p.data_ptr() for p in params]
    assert told == [
        "side waits",  # for whoever had the memory
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
    assert not resident.away and parameter.tolist() == [1.0] * 10
