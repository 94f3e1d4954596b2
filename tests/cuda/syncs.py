"""Counter of the host's waits for the device. All tensors lie on the CPU and simulate host or device tensors.

A mark on a tensor says which. Host tensors are tensors made on the host, copied to the host, or computed from host
tensors alone; all other tensors belong to the device. A wait is a device value read by Python, an operation with a
result size that depends on values, a copy to the host, or an explicit wait.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cuda.as_cpu import CudaAsCpu

_T: Any = Tensor
CUDA = torch.device("cuda", 0)
VALUES = {
    _T.item: "item", _T.tolist: "tolist", _T.numpy: "numpy", _T.__bool__: "bool", _T.__int__: "int",
    _T.__float__: "float", _T.__index__: "index", _T.__format__: "format", _T.__repr__: "repr", _T.__array__: "array",
    _T.__contains__: "contains", torch.equal: "equal", _T.equal: "equal", torch.allclose: "allclose",
    _T.allclose: "allclose", _T.is_nonzero: "is_nonzero", torch.is_nonzero: "is_nonzero",
}  # fmt: skip
SIZES = {
    torch.nonzero: "nonzero", _T.nonzero: "nonzero", torch.argwhere: "argwhere", _T.argwhere: "argwhere",
    torch.masked_select: "masked_select", _T.masked_select: "masked_select", torch.unique: "unique",
    _T.unique: "unique", torch.unique_consecutive: "unique_consecutive",
    _T.unique_consecutive: "unique_consecutive", torch.bincount: "bincount", _T.bincount: "bincount",
}  # fmt: skip
REPEATS = (torch.repeat_interleave, _T.repeat_interleave)
ATEN = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique_", "bincount", "equal", "is_nonzero")
"""Operators with a hidden wait, by name, for calls from C++."""
HOST = "_skyrl_mega_on_the_host"


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists and dictionaries; `tree_leaves` takes ten times as long."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def is_host(tensor: Tensor) -> bool:
    """Returns True if the tensor simulates a tensor in host memory."""
    return hasattr(tensor, HOST)


def mark_host(value: Any) -> Any:
    """Marks every tensor in `value` as a host tensor and returns `value`."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            setattr(leaf, HOST, True)
    return value


def mark_device(tensors: Iterable[Tensor]) -> None:
    """Marks the tensors as device tensors."""
    for tensor in tensors:
        if is_host(tensor):
            delattr(tensor, HOST)


class AsCuda(CudaAsCpu):
    """Makes device tensors report CUDA as their device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _T.is_cuda.__get__:
            return not is_host(args[0])
        if func == _T.device.__get__:
            return torch.device("cpu") if is_host(args[0]) else CUDA
        return super().__torch_function__(func, types, args, kwargs)


class Waits:
    """Counts of waits by kind and place."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self.paused = 0
        self.counting = False

    def note(self, kind: str) -> None:
        """Counts a wait at the innermost line outside torch and these tests."""
        if self.counting and not self.paused:
            self.found[kind, _place()] += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stops counting within the context: a simulated kernel may read values."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1


def _place() -> str:
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename).as_posix()
        if "/torch/" in path or "/tests/cuda/" in path or "/contextlib" in path:
            continue
        shortened = path.split("/site-packages/")[-1].split("/rehearsal/")[-1].split("/skyrl_mega/skyrl_mega/")[-1]
        return f"{shortened}:{frame.name}"
    return "?"


class Counted(TorchFunctionMode):
    """Counts waits in calls from Python. Must be entered within `CudaAsCpu`, to see a call before the mapping of the
    device."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [*_tensors(args), *_tensors(kwargs)]
        kind = self._kind(func, args, kwargs, tensors)
        if kind:
            self.waits.note(kind)
        with self.waits.pause() if kind else _nothing():
            result = func(*args, **kwargs)
        if _lands_on_the_host(func, args, kwargs, tensors):
            result = _own(result, tensors)
            mark_host(result)
        elif func in (_T.to, _T.cuda) and tensors and is_host(tensors[0]) and isinstance(result, Tensor):
            return result.detach().clone() if not result.requires_grad else result.clone()  # drops the host mark
        return result

    def _kind(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> str:
        on_device = [t for t in tensors if not is_host(t)]
        if not on_device:
            return ""
        if func in VALUES:
            return VALUES[func] if not is_host(args[0]) else ""
        if func in SIZES:
            return SIZES[func]
        if func in REPEATS and len(tensors) > 1 and kwargs.get("output_size") is None:
            return "repeat_interleave" if not is_host(tensors[-1]) else ""
        if func in (_T.__getitem__, _T.__setitem__) and _masks(args[1]):
            scalar = func is _T.__setitem__ and (not isinstance(args[2], Tensor) or args[2].numel() == 1)
            return "" if scalar else "mask index"
        if func is torch.where and len(args) + len(kwargs) == 1:
            return "where"
        if func is _T.cpu or (func is _T.to and _says_cpu(args[1:], kwargs)):
            return "copy to host" if not kwargs.get("non_blocking") else ""
        if func is _T.copy_ and is_host(args[0]) and not is_host(args[1]):
            return "copy to host" if not (kwargs.get("non_blocking") or args[2:3] == (True,)) else ""
        return ""


def _masks(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(p, Tensor) and p.dtype in (torch.bool, torch.uint8) and p.dim() for p in parts)


def _says_cpu(args: Any, kwargs: Any) -> bool:
    return any(
        (isinstance(a, torch.device) and a.type == "cpu")
        or (isinstance(a, str) and a == "cpu")
        or (isinstance(a, Tensor) and is_host(a))
        for a in (*args, kwargs.get("device"), kwargs.get("other"))
    )


def _is_cpu(device: Any) -> bool:
    """Returns True for the CPU; `torch.device` itself would be mapped by the outer mode."""
    return device.type == "cpu" if isinstance(device, torch.device) else str(device) == "cpu"


FACTORIES = (
    torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.rand, torch.randn,
    torch.linspace, torch.eye, torch.as_tensor, torch.from_numpy, torch.empty_strided,
)  # fmt: skip


def _lands_on_the_host(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
    if func is _T.cpu or (func is _T.to and _says_cpu(args[1:], kwargs)):
        return True
    if func in (_T.to, _T.cuda):
        says = [a for a in (*args[1:], kwargs.get("device")) if isinstance(a, torch.device | str | int)]
        return bool(tensors) and is_host(tensors[0]) and func is _T.to and not says
    device = kwargs.get("device")
    if func in FACTORIES:
        return not tensors and (device is None or _is_cpu(device))
    if device is not None:
        return _is_cpu(device)
    return bool(tensors) and all(map(is_host, tensors))


def _own(result: Any, tensors: list[Tensor]) -> Any:
    """Returns a new tensor if the result is a device tensor of the input: a copy to the host is another tensor."""
    if isinstance(result, Tensor) and any(result is t for t in tensors if not is_host(t)):
        return result.detach().clone()
    return result


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class CountedBelow(TorchDispatchMode):
    """Counts waits in calls from C++: autograd's formulas, and operators built from other operators."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, may_wait, indexed = _known(func)
        if may_wait:
            tensors = [*_tensors(args), *_tensors(kwargs)]
            if tensors and not any(map(is_host, tensors)):
                self.waits.note(f"aten::{name}")
        if indexed and any(map(_masks, args[1])) and (name == "index" or args[2].numel() != 1):
            self.waits.note(f"aten::{name} of a mask")
        return func(*args, **(kwargs or {}))


@cache
def _known(func: Any) -> tuple[str, bool, bool]:
    """Returns an operator's name, and True if the operator may wait by itself, or takes indices."""
    name = func._schema.name.split("::")[-1]
    indexed = name in ("index", "index_put", "index_put_", "_index_put_impl_")
    return name, any(name.startswith(each) for each in ATEN), indexed


class _Stream:
    """Stream or event with counted host waits. Waits of the device cost the host nothing and are not counted."""

    def __init__(self, waits: Waits, *_: Any, **__: Any) -> None:
        self.waits = waits

    def synchronize(self) -> None:
        """Counts a wait of the host."""
        self.waits.note("synchronize")

    def record_event(self, *_: Any) -> _Stream:
        """Returns an event with the same counter."""
        return _Stream(self.waits)

    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def query(self) -> bool:
        """Returns True: the work is complete."""
        return True


def stand_in(waits: Waits) -> None:
    """Replaces streams and events of this process by counting ones. Runs after `cpu.stand_in` and before a model is
    built."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = partial(_Stream, waits)
    cuda.current_device = lambda: CUDA
    stream = _Stream(waits)
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.synchronize = lambda *_: waits.note("synchronize")
    host: Any = torch
    state = torch.get_rng_state
    host.get_rng_state = lambda: mark_host(state())


@contextmanager
def counting(waits: Waits) -> Iterator[None]:
    """Counts the waits within the context, in `AsCuda`."""
    with CountedBelow(waits), Counted(waits):
        waits.counting = True
        try:
            yield
        finally:
            waits.counting = False
