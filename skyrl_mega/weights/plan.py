"""The transfer plan: which box of which tensor goes from which rank to which rank. Pure, and it needs no process.

`plan(source, target)` intersects the boxes of two layouts. It serves loading, export, weight sync and re-layout
alike, and it knows bytes, so a dry run, a sync and a report read the same object.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from skyrl_mega.layout.box import Box, Layout, Piece


@dataclass(frozen=True, slots=True)
class Transfer:
    """Box `box` of `tensor`, from a rank of the source layout to a rank of the target layout.

    `source_offset` and `target_offset` say where it lies in the two local parameters; as in `Piece`, they have one
    entry per dimension of the local parameter, and the box fills the last ones.
    """

    source: int
    target: int
    tensor: str
    box: Box
    source_param: str
    source_offset: tuple[int, ...]
    target_param: str
    target_offset: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """All transfers between two layouts, in one order that every rank shares."""

    transfers: tuple[Transfer, ...]
    sources: int
    """Ranks of the source layout."""
    targets: int
    """Ranks of the target layout."""

    @cached_property
    def pairs(self) -> dict[tuple[int, int], list[Transfer]]:
        """Transfers by (source rank, target rank), in the plan's order."""
        found: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for transfer in self.transfers:
            found[transfer.source, transfer.target].append(transfer)
        return dict(found)

    def for_source(self, rank: int) -> list[Transfer]:
        """What source rank `rank` sends."""
        return [t for (source, _), transfers in self.pairs.items() if source == rank for t in transfers]

    def for_target(self, rank: int) -> list[Transfer]:
        """What target rank `rank` receives."""
        return [t for (_, target), transfers in self.pairs.items() if target == rank for t in transfers]

    def bytes_out(self, itemsize: int) -> list[int]:
        """Bytes that each source rank sends, `itemsize` bytes an element."""
        total = [0] * self.sources
        for transfer in self.transfers:
            total[transfer.source] += transfer.box.numel * itemsize
        return total

    def bytes_in(self, itemsize: int) -> list[int]:
        """Bytes that each target rank receives, `itemsize` bytes an element."""
        total = [0] * self.targets
        for transfer in self.transfers:
            total[transfer.target] += transfer.box.numel * itemsize
        return total


Distance = Callable[[int, int], float]
"""(source rank, target rank) → how far apart they are; the nearest replica sends."""


def plan(source: Layout, target: Layout, distance: Distance | None = None) -> Plan:
    """Every element of every target piece once, each from one source rank that holds it.

    Where several source ranks hold the same box, the nearest by `distance` sends it, and among equals the one that has
    least to send so far.

    Raises:
        ValueError: a target box is not covered by the source, or the layouts disagree about a shape; it names the
        tensor.
    """
    held = _by_tensor(source)
    # What is sent, who could send it, who wants it.
    parts: list[tuple[Box, list[_Held], _Held]] = []
    for tensor, wanted in _by_tensor(target).items():
        if source.tensors.get(tensor) != target.tensors[tensor]:
            raise ValueError(
                f"{tensor}: shape {source.tensors.get(tensor)} in the source, {target.tensors[tensor]} in the target"
            )
        for box, takers in wanted.items():
            try:
                cover = _cover(box, held[tensor])
            except KeyError:
                raise ValueError(
                    f"{tensor}: the source holds no copy of {box}, which target rank {takers[0][0]} wants"
                ) from None
            parts += [(part, held[tensor][of], taker) for taker in takers for part, of in cover]
    senders = _choose(parts, len(source.shards), distance)
    transfers = tuple(
        Transfer(
            source=sender[0],
            target=taker[0],
            tensor=taker[1].tensor,
            box=part,
            source_param=sender[1].param,
            source_offset=_offset(part, sender[1]),
            target_param=taker[1].param,
            target_offset=_offset(part, taker[1]),
        )
        for (part, _, taker), sender in zip(parts, senders, strict=True)
    )
    return Plan(transfers, len(source.shards), len(target.shards))


_Held = tuple[int, Piece]
"""A rank and a piece that it holds."""


def _by_tensor(layout: Layout) -> dict[str, dict[Box, list[_Held]]]:
    """Tensor → box → who holds it."""
    found: dict[str, dict[Box, list[_Held]]] = defaultdict(lambda: defaultdict(list))
    for rank, shard in enumerate(layout.shards):
        for piece in shard.pieces:
            found[piece.tensor][piece.box].append((rank, piece))
    return found


def _cover(box: Box, held: Collection[Box]) -> list[tuple[Box, Box]]:
    """Cuts `box` into disjoint parts, each inside one of the `held` boxes: (part, held box). KeyError where none is."""
    if box in held:
        return [(box, box)]
    cover: list[tuple[Box, Box]] = []
    left = [box]
    for candidate in held:
        rest: list[Box] = []
        for piece in left:
            part = piece.intersect(candidate)
            if part is None:
                rest.append(piece)
            else:
                cover.append((part, candidate))
                rest += _without(piece, part)
        left = rest
        if not left:
            return cover
    raise KeyError(box)


def _without(box: Box, part: Box) -> Iterator[Box]:
    """The rest of `box` when `part`, which is inside it, is taken out: at most two slabs a dimension."""
    start, shape = list(box.start), list(box.shape)
    for axis, (a, n) in enumerate(zip(part.start, part.shape, strict=True)):
        below, above = a - start[axis], start[axis] + shape[axis] - a - n
        if below:
            yield Box(tuple(start), (*shape[:axis], below, *shape[axis + 1 :]))
        if above:
            yield Box((*start[:axis], a + n, *start[axis + 1 :]), (*shape[:axis], above, *shape[axis + 1 :]))
        start[axis], shape[axis] = a, n


def _choose(parts: Sequence[tuple[Box, list[_Held], _Held]], sources: int, distance: Distance | None) -> list[_Held]:
    """A sender for every part: those without a choice first, then the largest, each by the nearest and least busy."""
    load = [0] * sources
    chosen: list[_Held] = [holders[0] for _, holders, _ in parts]
    open_parts = []
    for i, (part, holders, _) in enumerate(parts):
        if len(holders) == 1:
            load[chosen[i][0]] += part.numel
        else:
            open_parts.append(i)
    open_parts.sort(key=lambda i: -parts[i][0].numel)
    for i in open_parts:
        part, holders, (target, _) = parts[i]
        if distance is not None:
            nearest = min(distance(rank, target) for rank, _ in holders)
            holders = [h for h in holders if distance(h[0], target) == nearest]
        chosen[i] = min(holders, key=lambda h: load[h[0]])
        load[chosen[i][0]] += part.numel
    return chosen


def _offset(part: Box, piece: Piece) -> tuple[int, ...]:
    """Where `part`, which is inside the piece's box, lies in the piece's parameter."""
    stack = len(piece.offset) - len(part.start)
    inner = (o + a - b for o, a, b in zip(piece.offset[stack:], part.start, piece.box.start, strict=True))
    return (*piece.offset[:stack], *inner)
