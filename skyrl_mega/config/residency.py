"""Which part of a run's state has to be on the device in which phase of a step: the one table of it.

The run moves parts by it (`megatron/`, `engines/`, `trainer/`), and the planner counts memory by it, so that the dry
run's phases are the run's phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

ENGINE = ("engine_weights", "kv_cache")
POLICY = ("parameters", "gradients", "optimizer")
CRITIC = ("critic",)
PARTS = (*ENGINE, *POLICY, *CRITIC)

NEEDS = MappingProxyType(
    {
        "generate": frozenset(ENGINE),
        "eval": frozenset(ENGINE),
        "logprobs": frozenset({"parameters"}),
        # A critic has devices of its own: where it works, nothing has to leave those of the policy.
        "values": frozenset({*CRITIC, "parameters"}),
        "critic": frozenset({*CRITIC, "parameters"}),
        "train": frozenset(POLICY),
        "sync": frozenset({"parameters", "engine_weights"}),
    }
)
"""Phase → parts. A reference that shares the policy's ranks comes into the parameters' storage, piece by piece, and so
has no part of its own. A phase that is not named needs nothing new: what is there stays there."""


def kept(keep: Sequence[str] | None) -> frozenset[str]:
    """The parts that stay in every phase (`residency.keep`)."""
    return frozenset(PARTS if keep is None else keep)


def resident(phase: str, keep: Sequence[str] | None) -> frozenset[str]:
    """The parts on the device in a phase."""
    return NEEDS[phase] | kept(keep)
