"""One process on a GPU, phase by phase of a step: what lies there by kind.

What is there in which phase follows from `config.residency`, the table by which the run moves things. A sleeping engine
keeps CUDA's context, NCCL, its libraries and its CUDA graphs; a sleeping policy its reserve, what its allocator cannot
use, and the buckets of the sync.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from skyrl_mega.config.residency import ENGINE, NEEDS, resident
from skyrl_mega.planner.activations import Activations
from skyrl_mega.planner.buffers import Held

MARGIN = 0.25
"""An estimated kind may be larger or smaller by this share."""
COUNTED = ("weights", "gradients", "optimizer", "reference", "sync", "staged", "kv_cache")
"""Kinds of memory that are counted from tensors' shapes; the others are estimated."""
PHASES = tuple(phase for phase in NEEDS if phase != "eval")
"""Of a step. An evaluation has what generating has."""
PARTS = {
    "policy": {"weights": "parameters", "gradients": "gradients", "optimizer": "optimizer"},
    "critic": {"weights": "critic", "gradients": "critic", "optimizer": "critic"},
    "reference": {},
}
"""Role → what it holds, by the part of `residency.keep` that it belongs to; what is not named stays."""
WORK = {
    "policy": {"logprobs": "forward", "train": "train"},
    "critic": {"values": "forward", "critic": "train"},
    "reference": {"logprobs": "forward"},
}
"""Role → phases in which it computes, and how."""

SHOWN = {
    "policy": ("generate", "logprobs", "train", "sync"),
    "critic": ("generate", "values", "critic"),
    "reference": ("generate", "logprobs"),
}
"""Role → phases that differ for it."""

Kinds = Mapping[str, int]
"""Bytes by kind."""


def least(kinds: Kinds) -> float:
    """Bytes when every estimate is too high by the margin."""
    return sum(size if kind in COUNTED else (1 - MARGIN) * size for kind, size in kinds.items())


@dataclass(frozen=True)
class PolicyMemory:
    """One rank of a policy, a reference or a critic. Bytes."""

    held: Held
    """Counted."""
    at: Activations
    """Estimated."""
    reference: int
    """The buffer through which a reference's weights come from host memory for its log-probs. Counted."""
    sync: int
    """Buckets, which stay from one sync to the next. Counted."""
    reserve: int
    """CUDA, NCCL and libraries. Estimated."""
    gaps: int
    """What the allocator cannot use. Estimated."""
    role: str = "policy"
    """policy, critic or reference."""
    keep: tuple[str, ...] | None = None
    """`residency.keep`."""
    streamed: int = 0
    """The optimizer's state where it lies in host memory all the time (`policy.optimizer.streamed`); `held` then has
    what a step brings to the device at once. Counted."""

    @property
    def phases(self) -> tuple[str, ...]:
        """Those that differ for this role."""
        return SHOWN[self.role]

    def there(self, kind: str, phase: str) -> bool:
        """Whether weights, gradients or the optimizer's state are on the device in a phase."""
        part = PARTS[self.role].get(kind)
        return part is None or part in resident(phase, self.keep)

    def phase(self, name: str) -> dict[str, int]:
        """What lies on the device in a phase, by kind."""
        own = ((kind, getattr(self.held, kind)) for kind in ("weights", "gradients", "optimizer"))
        kinds = {kind: size for kind, size in own if size and self.there(kind, name)}
        kinds |= {"sync": self.sync, "reserve": self.reserve, "gaps": self.gaps}
        work = WORK[self.role].get(name)
        if work == "forward":
            kinds |= {"reference": self.reference, "forward": self.at.forward + self.at.forward_logits}
        if work == "train":
            kinds |= {"activations": self.at.train, "logits": self.at.train_logits}
        return kinds

    @cached_property
    def totals(self) -> dict[str, int]:
        """Phase → bytes."""
        return {name: sum(self.phase(name).values()) for name in PHASES}

    @property
    def busiest(self) -> str:
        """The phase that takes most."""
        return max(PHASES, key=lambda name: self.totals[name])

    @property
    def peak(self) -> int:
        """Bytes in the phase that takes most."""
        return self.totals[self.busiest]

    @property
    def least(self) -> int:
        """The peak when every estimate is too high by the margin."""
        return int(max(least(self.phase(name)) for name in PHASES))

    def doubt(self, phase: str) -> int:
        """What the estimate of a phase's work may lack."""
        found = self.phase(phase)
        return int(MARGIN * sum(found.get(kind, 0) for kind in ("forward", "activations", "logits")))

    @property
    def moving(self) -> int:
        """Bytes that leave the device between phases and come back; gradients are dropped."""
        return sum(
            getattr(self.held, kind)
            for kind in ("weights", "optimizer")
            if not (kind == "optimizer" and self.streamed)
            if not all(self.there(kind, phase) for phase in PHASES)
        )

    @property
    def parked(self) -> int:
        """Bytes of pinned host memory: for these, for what is always there, and for what layers keep there."""
        return self.moving + self.streamed + self.at.host


@dataclass(frozen=True)
class EngineMemory:
    """One engine worker. Bytes."""

    weights: int
    """Counted, as vLLM holds them at load time."""
    working: int
    """Activations, logits and sampling of the largest step. Estimated."""
    sync: int
    """Buckets. Counted."""
    staged: int
    """The layer that a sync writes before it is quantised (`engine_weights.staged_bytes`). Counted."""
    reserve: int
    """Libraries, and CUDA graphs where there are any. Estimated."""
    budget: int
    """What vLLM gives out (`rollout.memory_fraction`), or on a CPU the KV cache that was asked for and the rest."""
    beside: int
    """What it takes of a GPU beside the budget. Estimated."""
    per_token: int
    """KV cache of one token."""
    given: int | None = None
    """KV cache on a CPU."""
    keep: tuple[str, ...] | None = None
    """`residency.keep`."""

    @property
    def kv(self) -> int:
        """KV cache: what is left of the budget."""
        if self.given is not None:
            return self.given
        return self.budget - self.weights - self.working - self.reserve

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds."""
        return max(0, self.kv) // self.per_token

    @property
    def most_tokens(self) -> int:
        """Tokens when every estimate is too high by the margin."""
        return max(0, self.kv + int(MARGIN * (self.working + self.reserve))) // self.per_token

    def awake(self, phase: str) -> bool:
        """Whether all of it is on the device in a phase."""
        return resident(phase, self.keep).issuperset(ENGINE)

    def phase(self, name: str) -> dict[str, int]:
        """Returns what lies on the device in a phase, by kind.

        An engine of which any part sleeps has given back its working memory: the experts' workspace is dropped with
        the KV cache, and torch's own cache is emptied. On a shared GPU the sync's buckets are the policy's.
        """
        here = resident(name, self.keep)
        kinds = {"weights": self.weights} if "engine_weights" in here else {}
        kinds |= {"kv_cache": self.kv} if "kv_cache" in here else {}
        kinds |= {"working": self.working} if self.awake(name) else {}
        kinds |= {"staged": self.staged} if name == "sync" and self.staged else {}
        return kinds | {"reserve": self.reserve, "beside": self.beside}

    @cached_property
    def totals(self) -> dict[str, int]:
        """Phase → bytes."""
        return {name: sum(self.phase(name).values()) for name in PHASES}

    def least_in(self, phase: str) -> float:
        """Bytes in a phase when every estimate is too high by the margin; the budget is given out in any case, and what
        is staged may lie in its working memory."""
        if self.awake(phase):
            return self.budget + (1 - MARGIN) * self.beside
        return least(self.phase(phase))

    @property
    def resident(self) -> int:
        """Bytes while it generates: the whole budget, and what lies beside it."""
        return self.budget + self.beside

    @property
    def peak(self) -> int:
        """That, what is staged, and the buckets, where no policy rank of the same GPU has them."""
        return self.resident + self.staged + self.sync

    @property
    def least(self) -> int:
        """What it takes while it generates when every estimate is too high by the margin."""
        return self.budget + int((1 - MARGIN) * self.beside)
