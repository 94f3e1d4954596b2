"""Table of the parts of a run's state needed on the device in each phase of a step.

The run moves parts by this table (`megatron/`, `engines/`, `trainer/`), and the planner counts memory by the same
table, so the phases of a dry run equal the phases of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

ENGINE = ("engine_weights", "kv_cache")
POLICY = ("parameters", "gradients", "optimizer")
CRITIC = ("critic",)
PARTS = (*ENGINE, *POLICY, *CRITIC)
"""Parts of the state that can leave the device; valid values in `residency.keep`."""

NEEDS = MappingProxyType(
    {
        "generate": frozenset(ENGINE),
        "eval": frozenset(ENGINE),
        "logprobs": frozenset({"parameters"}),
        # A critic has separate devices: while it works, nothing has to leave the policy's devices.
        "values": frozenset({*CRITIC, "parameters"}),
        "critic": frozenset({*CRITIC, "parameters"}),
        "train": frozenset(POLICY),
        "sync": frozenset({"parameters", "engine_weights"}),
    }
)
"""Phase → parts. A reference on the policy's ranks is loaded into the parameters' storage piece by piece, and therefore
is not a separate part. A phase missing here needs no change: resident parts stay."""


def kept(keep: Sequence[str] | None) -> frozenset[str]:
    """Returns the parts to keep on the device in every phase: `residency.keep`, or all parts if None."""
    return frozenset(PARTS if keep is None else keep)


def resident(phase: str, keep: Sequence[str] | None) -> frozenset[str]:
    """Returns the parts on the device in a phase: the parts needed there, and the kept parts.

    Args:
        phase: A key of `NEEDS`; other phases raise KeyError.
        keep: `residency.keep`; None keeps all parts.
    """
    return NEEDS[phase] | kept(keep)
