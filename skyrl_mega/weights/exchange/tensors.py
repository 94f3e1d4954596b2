"""Where every bucket is packed from, or unpacked to, in this process's parameters.

A sync repeats: the parameters of the next one have the same types, shapes and strides, and most lie where they lay.
So what is worked out for a bucket is kept while its parameters keep their form, wherever they lie; no memory is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from skyrl_mega.parallel.box import Piece
from skyrl_mega.weights.exchange.pack import BucketViews, View, region
from skyrl_mega.weights.exchange.rank_program import Item, RankBucket
from skyrl_mega.weights.fp8.format import FP8, scale_box
from skyrl_mega.weights.plan.intersect import Place

Param = Callable[[str], Tensor]
"""A local parameter by its name."""
Form = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]


class Ends:
    """One side, the sending or the receiving one, of all buckets of a process.

    Args:
        sends: which.
        device: where buckets lie.
    """

    def __init__(self, sends: bool, device: torch.device) -> None:
        self._sends, self._device = sends, device
        self._known: dict[int, tuple[BucketViews, list[Form]]] = {}

    def of(self, cargo: RankBucket, param: Param) -> tuple[BucketViews, list[Tensor]]:
        """A bucket's views, and the parameters that they are views of."""
        known = self._known.get(cargo.number)
        if known is not None:
            params = [param(name) for name in known[0].names]
            if [_form(p) for p in params] == known[1]:
                return known[0], params
        asked = _Asked(param)
        made = [_view(item, place, asked, scale) for item, place, scale in self._parts(cargo)]
        views = BucketViews(made, list(asked.numbers), asked.params, self._device)
        self._known[cargo.number] = views, [_form(p) for p in asked.params]
        return views, asked.params

    @property
    def table_bytes(self) -> int:
        """Memory of the tables on the device."""
        return sum(views.table_bytes for views, _ in self._known.values())

    def _parts(self, cargo: RankBucket) -> Iterator[tuple[Item, Place, Piece | None]]:
        for item in cargo.items:
            if not self._sends:
                for place in item.put:
                    yield item, place, item.put_scale
            elif item.taken is not None:
                yield item, item.taken, item.taken_scale


class _Asked:
    """The parameters that were asked for, in order, each once."""

    def __init__(self, param: Param) -> None:
        self._param = param
        self.numbers: dict[str, int] = {}
        self.params: list[Tensor] = []

    def __call__(self, name: str) -> tuple[int, Tensor]:
        number = self.numbers.setdefault(name, len(self.params))
        if number == len(self.params):
            self.params.append(self._param(name))
        return number, self.params[number]


def _form(param: Tensor) -> Form:
    return param.dtype, param.shape, param.stride(), param.device


def _view(item: Item, place: Place, asked: _Asked, scale: Piece | None) -> View:
    """One part in this process's parameters; scales are asked for only where this end converts."""
    owner, param = asked(place.param)
    zero = (0,) * len(item.box.shape)
    local = region(owner, param, place.offset, zero, item.box.shape, item.offset)
    blocks = None
    if param.dtype == FP8 != item.dtype and item.taken is place:
        raise ValueError(f"{item.tensor} is FP8 in the policy, and has to be on the wire: weights.wire=fp8")
    if item.dtype == FP8 and param.dtype != FP8:
        if scale is None:
            raise ValueError(
                f"{item.tensor} is FP8 on the wire; the layout lacks its scales, see weights.fp8.format.with_scales"
            )
        wanted = scale_box(item.box)
        inside = tuple(a - b for a, b in zip(wanted.start, scale.box.start, strict=True))
        blocks = region(*asked(scale.param), scale.offset, inside, wanted.shape, 0)
    return View(local, item.dtype, blocks, item.box.start)
