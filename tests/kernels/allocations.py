"""Recorder of torch's allocations: every new storage, and the peak of bytes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Mode that records the storages created by operations, in bytes; earlier storages do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        """Bytes of each storage, in order."""
        self.peak = 0
        """Peak of bytes at the same time."""
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and (key := _key(t)) not in inputs | self._known:
                storage = t.untyped_storage()
                self._known.add(key)
                self.sizes.append(storage.nbytes())
                self._now += storage.nbytes()
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def _key(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata
