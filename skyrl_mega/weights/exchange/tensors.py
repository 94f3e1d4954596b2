"""The places of bucket parts in this process's parameters, for packing and for unpacking.

Consecutive syncs use parameters of the same types, shapes and strides, mostly at the same addresses. A bucket's views
are therefore cached until any of these properties changes; addresses may change. The cache keeps no parameter alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from skyrl_mega.parallel.box import Piece
from skyrl_mega.weights.exchange.pack import BucketView, BucketViews, region
from skyrl_mega.weights.exchange.rank_program import Item, RankBucket
from skyrl_mega.weights.fp8.format import FP8, scale_box
from skyrl_mega.weights.plan.intersect import Place

Param = Callable[[str], Tensor]
"""Function from a local name to the parameter."""
Form = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]


class BucketViewCache:
    """The views of all buckets of a process: the sending or the receiving side.

    Args:
        sends: True for the sending side.
        device: Device of the buckets.
    """

    def __init__(self, sends: bool, device: torch.device) -> None:
        self._sends, self._device = sends, device
        self._cache: dict[int, tuple[BucketViews, list[Form]]] = {}

    def of(self, bucket: RankBucket, param: Param) -> tuple[BucketViews, list[Tensor]]:
        """Returns a bucket's views and the parameters that the views refer to, each once, in the order of
        `BucketViews.names`. The views are cached as long as the parameters' types, shapes, strides and devices stay the
        same.

        Args:
            bucket: The bucket.
            param: Returns the present parameter of a local name; called in every call, and its errors are passed on.

        Raises:
            ValueError: A tensor is FP8 at one end only, and the layout lacks scales, or the wire is not FP8.
        """
        cached = self._cache.get(bucket.number)
        if cached is not None:
            params = [param(name) for name in cached[0].names]
            if [_form(p) for p in params] == cached[1]:
                return cached[0], params
        requested = _RequestedParams(param)
        part_views = [_view(item, place, requested, scale) for item, place, scale in self._parts(bucket)]
        views = BucketViews(part_views, list(requested.numbers), requested.params, self._device)
        self._cache[bucket.number] = views, [_form(p) for p in requested.params]
        return views, requested.params

    @property
    def table_bytes(self) -> int:
        """Bytes of device memory taken by the copy kernels' tables of box positions, over all cached buckets."""
        return sum(views.table_bytes for views, _ in self._cache.values())

    def _parts(self, bucket: RankBucket) -> Iterator[tuple[Item, Place, Piece | None]]:
        for item in bucket.items:
            if not self._sends:
                for place in item.unpacked_to:
                    yield item, place, item.target_scale
            elif item.packed_from is not None:
                yield item, item.packed_from, item.source_scale


class _RequestedParams:
    """The requested parameters, each once, in order of the first request."""

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


def _view(item: Item, place: Place, requested: _RequestedParams, scale: Piece | None) -> BucketView:
    """Returns the view of a part. Requests scales only if this end converts.

    Raises:
        ValueError: The tensor is FP8 in the policy but not on the wire, or the layout lacks the scales.
    """
    owner, param = requested(place.param)
    zero = (0,) * len(item.box.shape)
    local = region(owner, param, place.offset, zero, item.box.shape, item.offset)
    blocks = None
    if param.dtype == FP8 != item.dtype and item.packed_from is place:
        raise ValueError(f"{item.tensor} is FP8 in the policy, so the wire must be FP8, too; give weights.wire=fp8")
    if item.dtype == FP8 and param.dtype != FP8:
        if scale is None:
            raise ValueError(
                f"{item.tensor} is FP8 on the wire; the layout lacks its scales, see weights.fp8.format.with_scales"
            )
        wanted = scale_box(item.box)
        inside = tuple(a - b for a, b in zip(wanted.start, scale.box.start, strict=True))
        blocks = region(*requested(scale.param), scale.offset, inside, wanted.shape, 0)
    return BucketView(local, item.dtype, blocks, item.box.start)
