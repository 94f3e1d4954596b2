"""A plan as seen by a process: the buckets handled and the steps taken, round by round.

In a round, a process receives at most one bucket and sends at most one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from skyrl_mega.parallel.box import Box, Piece, Shard
from skyrl_mega.weights.exchange.buckets import Buckets, fill
from skyrl_mega.weights.exchange.rounds import rounds
from skyrl_mega.weights.fp8.format import SUFFIX, Wire, scale_box
from skyrl_mega.weights.plan.intersect import Place
from skyrl_mega.weights.plan.plan import Plan

CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a bucket, with places in this process's parameters."""

    tensor: str
    box: Box
    dtype: torch.dtype
    """Type on the wire."""
    offset: int
    """Byte offset in the bucket."""
    packed_from: Place | None
    """Source of packing; None if this process does not pack the bucket."""
    unpacked_to: tuple[Place, ...]
    """Destinations of unpacking."""
    source_scale: Piece | None
    """Piece of the source shard with the scales of all touched blocks, for a quantised tensor."""
    target_scale: Piece | None
    """Piece of the target shard with the scales of all touched blocks, for a quantised tensor."""


@dataclass(slots=True)
class RankBucket:
    """A bucket handled by this process."""

    number: int
    """Index of the bucket among all buckets of the plan."""
    source: int
    """Number of the packing process."""
    packed: bool
    """True if this process packs the bucket."""
    items: list[Item]
    """Parts packed or unpacked here; empty for a bucket only forwarded."""
    what: str
    """Description for errors: the first tensor and the number of further parts."""
    payload: int
    """Bytes of the parts, without padding."""
    nbytes: int
    """Bytes of the parts, with padding."""
    parts: int
    """Number of parts."""
    unpacked: bool
    """True if this process wants the bucket."""
    device_peers: tuple[int, ...]
    """Peers on this process's device wanting the bucket."""
    places: list[int]
    """Index of the part written to each target place."""
    writes: Counter[str]
    """Number of target places in each target parameter."""

    def size(self, checksums: bool) -> int:
        """Returns the size of the message in bytes: the parts with padding and, with `checksums`, 8 bytes per part."""
        return self.nbytes + (CHECKSUM_BYTES * self.parts if checksums else 0)


@dataclass(slots=True)
class ProgramStep:
    """The actions of this process in one round."""

    round: int
    """Number of the round."""
    receive: RankBucket | None = None
    """Bucket received in this round; None without any."""
    sender: int = -1
    """Process that sends the received bucket; -1 without any."""
    send: RankBucket | None = None
    """Bucket packed here or forwarded. Without a receiver, the bucket is packed for this device only."""
    receiver: int = -1
    """Process that the sent bucket goes to; -1 without a receiver."""
    new: list[RankBucket] = field(default_factory=list)
    """Buckets taking a buffer in this step."""
    finished: list[RankBucket] = field(default_factory=list)
    """Buckets freeing a buffer after this step."""


@dataclass(frozen=True)
class Role:
    """A process: number, and shards in the two layouts."""

    process: int
    """Number of the process in the transport."""
    source_shard: Shard | None
    """Shard in the source layout; None without a part in that layout."""
    target_shard: Shard | None
    """Shard in the target layout; None without a part in that layout."""


def rank_program(
    plan: Plan,
    wire: Wire,
    role: Role,
    *,
    bucket_bytes: int,
    in_flight: int,
    target_base: int,
    owners: dict[int, int],
) -> tuple[list[ProgramStep], list[RankBucket]]:
    """Returns this process's steps, ordered by round, and the buckets that the process reads from the owner of its
    device. The owner communicates for all processes of the device and gets only steps; the other processes get only the
    buckets that they want, in the owner's order. `bucket_bytes` is the maximum size of a bucket, `in_flight` the number
    of buffers of a process (at least 2), `target_base` the process number of target rank 0; `owners` maps each process
    to the owner of its device (`ipc.device_owners`). All arguments but `role` must be equal in all processes. Raises
    ValueError if a shard lacks a part of the plan."""
    buckets = fill(plan, bucket_bytes, wire.scales)
    wanted_by = [[target_base + r for r in plan.routes[route].receivers] for route in buckets.route]
    packed_by = [plan.routes[route].source for route in buckets.route]
    chains = [
        list(dict.fromkeys([packer, *(owners[p] for p in wanted)]))
        for packer, wanted in zip(packed_by, wanted_by, strict=True)
    ]
    schedule = rounds(chains, max(owners, default=0) + 1, max(2, in_flight - 1), buckets.phase)
    me, owner = role.process, owners[role.process]
    touched = [number for number, chain in enumerate(chains) if owner in chain]
    items = _items(
        buckets, wire, role, [n for n in touched if packed_by[n] == me], [n for n in touched if me in wanted_by[n]]
    )
    names = list(buckets.parts.tensors)
    steps: dict[int, ProgramStep] = {}
    for number in touched:
        chain, at = chains[number], schedule[number]
        bucket = _rank_bucket(
            number, buckets, packed_by[number], wanted_by[number], owners=owners, me=me, items=items, names=names
        )
        # The device owner's hops: (round, peer, True for a send).
        hops: list[tuple[int, int, bool]] = []
        if owner == chain[0]:
            hops.append((at[0], chain[1] if len(chain) > 1 else -1, True))
        elif owner == chain[1]:
            hops.append((at[0], chain[0], False))
            hops += [(t, peer, True) for t, peer in zip(at[1:], chain[2:], strict=True)]
        else:
            hops.append((at[chain.index(owner) - 1], chain[1], False))
        for t, peer, sends in hops:
            step = steps.setdefault(t, ProgramStep(t))
            if sends:
                step.send, step.receiver = bucket, peer
            else:
                step.receive, step.sender = bucket, peer
        steps[hops[0][0]].new.append(bucket)
        steps[hops[-1][0]].finished.append(bucket)
    ordered = [steps[t] for t in sorted(steps)]
    for step in ordered:
        # The received bucket before the packed one: the owner's order of delivery.
        step.new.sort(key=lambda bucket: bucket is not step.receive)
    if owner == me:
        return ordered, []
    return [], [bucket for step in ordered for bucket in step.new if bucket.unpacked]


def _rank_bucket(
    number: int,
    buckets: Buckets,
    packer: int,
    wanted: Sequence[int],
    *,
    owners: dict[int, int],
    me: int,
    items: dict[int, list[Item]],
    names: list[str],
) -> RankBucket:
    members = buckets.members[number]
    first = names[buckets.parts.tensor[members[0]]]
    more = len(members) - 1
    return RankBucket(
        number=number,
        source=packer,
        packed=packer == me,
        items=items.get(number, []),
        what=f"{first} and {more} more" if more else first,
        payload=int(buckets.parts.nbytes[members].sum()),
        nbytes=buckets.nbytes(number),
        parts=len(members),
        unpacked=me in wanted,
        device_peers=tuple(p for p in wanted if owners[p] == me and p != me),
        places=[i for i, item in enumerate(items.get(number, [])) for _ in item.unpacked_to],
        writes=Counter(place.param for item in items.get(number, []) for place in item.unpacked_to),
    )


def _items(buckets: Buckets, wire: Wire, role: Role, packs: list[int], unpacks: list[int]) -> dict[int, list[Item]]:
    """Returns the parts of every bucket packed or unpacked by this process."""
    packed_from = _located(buckets, role.source_shard, packs)
    unpacked_to = _located(buckets, role.target_shard, unpacks)
    source_scales, target_scales = _scale_pieces(role.source_shard, wire), _scale_pieces(role.target_shard, wire)
    items_of = {}
    for number in sorted({*packs, *unpacks}):
        items = []
        boxes = buckets.parts.boxes(buckets.members[number])
        for i, ((tensor, box), offset) in enumerate(zip(boxes, buckets.offsets(number).tolist(), strict=True)):
            quantised = tensor in wire.quantised
            items.append(
                Item(
                    tensor,
                    box,
                    wire.type_of(tensor),
                    offset,
                    packed_from=packed_from[number][i][0] if number in packed_from else None,
                    unpacked_to=tuple(unpacked_to[number][i]) if number in unpacked_to else (),
                    source_scale=_covering(source_scales[tensor], box) if quantised and number in packed_from else None,
                    target_scale=_covering(target_scales[tensor], box) if quantised and number in unpacked_to else None,
                )
            )
        items_of[number] = items
    return items_of


def _located(buckets: Buckets, shard: Shard | None, numbers: list[int]) -> dict[int, list[list[Place]]]:
    """Returns, by bucket, the places of each part in a shard."""
    if not numbers:
        return {}
    assert shard is not None, "a rank that sends or receives needs its shard"
    places = buckets.parts.locate(shard, np.concatenate([buckets.members[n] for n in numbers]))
    located, at = {}, 0
    for number in numbers:
        count = len(buckets.members[number])
        located[number] = places[at : at + count]
        at += count
    return located


def _scale_pieces(shard: Shard | None, wire: Wire) -> dict[str, list[Piece]]:
    """Returns the scale pieces of a shard, by quantised tensor."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in shard.pieces if shard and wire.quantised else ():
        if piece.tensor.endswith(SUFFIX):
            pieces[piece.tensor.removesuffix(SUFFIX)].append(piece)
    return pieces


def _covering(pieces: list[Piece], box: Box) -> Piece | None:
    blocks = scale_box(box)
    return next((piece for piece in pieces if piece.box.intersect(blocks) == blocks), None)
