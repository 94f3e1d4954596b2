"""Memory of a single process on a GPU, by kind and by phase of a step.

`config.residency` says which parts are resident in a phase; the run moves parts by the same table. A sleeping engine
keeps CUDA context, NCCL, libraries and CUDA graphs. A sleeping policy keeps its reserve, allocator gaps and sync
buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from skyrl_mega.config.residency import ENGINE, NEEDS, resident
from skyrl_mega.planner.activations import Activations
from skyrl_mega.planner.buffers import ModelState

MARGIN = 0.25
"""Assumed relative error of an estimated kind, up or down."""
COUNTED = ("weights", "gradients", "optimizer", "reference", "sync", "staged", "kv_cache")
"""Kinds of memory counted from the shapes of tensors; all other kinds are estimated."""
PHASES = tuple(phase for phase in NEEDS if phase != "eval")
"""Phases of a step. An evaluation uses the same memory as `generate`."""
PARTS = {
    "policy": {"weights": "parameters", "gradients": "gradients", "optimizer": "optimizer"},
    "critic": {"weights": "critic", "gradients": "critic", "optimizer": "critic"},
    "reference": {},
}
"""For each role, the part of `residency.keep` to which a kind of memory belongs; other kinds are always resident."""
WORK = {
    "policy": {"logprobs": "forward", "train": "train"},
    "critic": {"values": "forward", "critic": "train"},
    "reference": {"logprobs": "forward"},
}
"""For each role, the phases with compute: a forward pass or training."""

SHOWN = {
    "policy": ("generate", "logprobs", "train", "sync"),
    "critic": ("generate", "values", "critic"),
    "reference": ("generate", "logprobs"),
}
"""For each role, the phases with different memory."""

Kinds = Mapping[str, int]
"""Bytes by kind."""


def lower_bound(kinds: Kinds) -> float:
    """Returns the smallest plausible sum of bytes: counted kinds (`COUNTED`) in full, and 1 - `MARGIN` of estimated
    kinds."""
    return sum(size if kind in COUNTED else (1 - MARGIN) * size for kind, size in kinds.items())


def offloaded_bytes(state: ModelState, role: str, keep: Sequence[str] | None, streamed: bool) -> int:
    """Returns the bytes of a rank copied to host memory in some phase of a step, and back: weights and optimizer state
    not kept by `residency.keep`. Gradients are dropped, not copied.

    Args:
        state: Weights and optimizer state of the rank.
        role: `policy`, `critic` or `reference`.
        keep: Value of `residency.keep`; None keeps everything, so that the result is 0.
        streamed: True if the optimizer state always stays in host memory, and does not count here.
    """
    parts = PARTS[role]
    return sum(
        getattr(state, kind)
        for kind in ("weights", "optimizer")
        if kind in parts and not (kind == "optimizer" and streamed)
        if not all(parts[kind] in resident(phase, keep) for phase in PHASES)
    )


@dataclass(frozen=True)
class PolicyMemory:
    """Memory of a rank of policy, reference or critic, in bytes."""

    state: ModelState
    """Weights, gradients and optimizer state. Counted."""
    activations: Activations
    """Activations and logits. Estimated."""
    reference: int
    """Buffer for loading reference weights from host memory for log-prob passes. Counted."""
    sync: int
    """Weight-sync buckets, allocated permanently. Counted."""
    reserve: int
    """CUDA, NCCL and libraries. Estimated."""
    gaps: int
    """Memory lost to gaps in the allocator. Estimated."""
    role: str = "policy"
    """`policy`, `critic` or `reference`."""
    keep: tuple[str, ...] | None = None
    """Value of `residency.keep`."""
    streamed: int = 0
    """Optimizer state that always stays in host memory (`policy.optimizer.streamed`); `state` then counts only the part
    that a step loads to the device. Counted."""

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases with different memory for this role, in order (`SHOWN`)."""
        return SHOWN[self.role]

    def is_resident(self, kind: str, phase: str) -> bool:
        """Returns True if `kind` (weights, gradients or optimizer) is on the device in a phase."""
        part = PARTS[self.role].get(kind)
        return part is None or part in resident(phase, self.keep)

    def phase(self, name: str) -> dict[str, int]:
        """Returns kind → bytes on the device in a phase of `PHASES`, for kinds present in the phase, in a new dict. A
        sleeping kind has no entry."""
        state_kinds = ((kind, getattr(self.state, kind)) for kind in ("weights", "gradients", "optimizer"))
        kinds = {kind: size for kind, size in state_kinds if size and self.is_resident(kind, name)}
        kinds |= {"sync": self.sync, "reserve": self.reserve, "gaps": self.gaps}
        work = WORK[self.role].get(name)
        if work == "forward":
            kinds |= {
                "reference": self.reference,
                "forward": self.activations.forward + self.activations.forward_logits,
            }
        if work == "train":
            kinds |= {"activations": self.activations.train, "logits": self.activations.train_logits}
        return kinds

    @cached_property
    def totals(self) -> dict[str, int]:
        """Phase → bytes of all kinds on the device."""
        return {name: sum(self.phase(name).values()) for name in PHASES}

    @property
    def busiest(self) -> str:
        """Name of the phase with the most bytes on the device."""
        return max(PHASES, key=lambda name: self.totals[name])

    @property
    def peak(self) -> int:
        """Bytes on the device in the busiest phase."""
        return self.totals[self.busiest]

    @property
    def lower_bound(self) -> int:
        """Smallest plausible peak in bytes: the highest lower bound of a phase, with estimates reduced by `MARGIN`."""
        return int(max(lower_bound(self.phase(name)) for name in PHASES))

    def estimate_error(self, phase: str) -> int:
        """Returns `MARGIN` of a phase's activations and logits in bytes: the possible error of their estimate."""
        kinds = self.phase(phase)
        return int(MARGIN * sum(kinds.get(kind, 0) for kind in ("forward", "activations", "logits")))

    @property
    def offloaded(self) -> int:
        """Bytes copied to host memory in some phase, and back; see `offloaded_bytes`."""
        return offloaded_bytes(self.state, self.role, self.keep, bool(self.streamed))

    @property
    def pinned(self) -> int:
        """Bytes of pinned host memory: offloaded parts, streamed optimizer state and offloaded activations."""
        return self.offloaded + self.streamed + self.activations.host


GPU_BLOCK, CPU_BLOCK = 16, 128
"""Tokens of a block of vLLM's cache. A CPU's blocks of latent attention are smaller, so a little too much is asked."""


@dataclass(frozen=True)
class EngineMemory:
    """Memory of an engine worker, in bytes."""

    weights: int
    """Weights as held by vLLM at load time. Counted."""
    working: int
    """Activations, logits and sampling of the largest step. Estimated."""
    sync: int
    """Weight-sync buckets. Counted."""
    staged: int
    """Layer written by a sync before quantisation (`engine_weights.staged_bytes`). Counted."""
    reserve: int
    """Libraries, and CUDA graphs unless the engine is eager. Estimated."""
    budget: int
    """Memory managed by vLLM (`rollout.memory_fraction`); on a CPU the requested KV cache, weights and working
    memory."""
    beside: int
    """GPU memory outside the budget. Estimated."""
    per_token: int
    """Bytes of KV cache per token."""
    longest: int
    """Tokens of the longest sequence."""
    per_sequence: int = 0
    """Bytes of a sequence in the cache that do not grow with its length (`engine_weights.sequence_bytes`)."""
    per_prompt: int = 0
    """Bytes of a longest sequence in the cache beside `per_sequence`, while its prompt is computed
    (`engine_weights.prompt_bytes`)."""
    cpu_kv_cache: int | None = None
    """Requested KV cache on a CPU; None on a GPU."""
    keep: tuple[str, ...] | None = None
    """Value of `residency.keep`."""

    @property
    def kv(self) -> int:
        """Bytes of the KV cache: budget - weights - working - reserve, possibly negative; on a CPU the requested
        cache."""
        if self.cpu_kv_cache is not None:
            return self.cpu_kv_cache
        return self.budget - self.weights - self.working - self.reserve

    @property
    def tokens(self) -> int:
        """Capacity of the cache in tokens of sequences with `longest` tokens each; 0 if the budget leaves no cache."""
        return max(0, self.kv) * self.longest // (self.longest * self.per_token + self.per_sequence)

    @property
    def smallest_kv(self) -> int:
        """Bytes of the smallest cache with which vLLM starts: for a sequence of `longest` tokens, in whole blocks, with
        its prompt, and vLLM's own block of zeros."""
        block = GPU_BLOCK if self.cpu_kv_cache is None else CPU_BLOCK
        tokens = (-(-self.longest // block) + 1) * block
        return tokens * self.per_token + self.per_sequence + self.per_prompt

    def starts(self, *, strict: bool = True) -> bool:
        """Returns True if the cache is large enough for vLLM to start.

        Args:
            strict: True for the plain estimates; False subtracts `MARGIN` of `working` and `reserve`.
        """
        spare = 0 if strict or self.cpu_kv_cache is not None else int(MARGIN * (self.working + self.reserve))
        return self.kv + spare >= self.smallest_kv

    def sequences(self, length: float) -> float:
        """Returns the number of sequences of `length` tokens each for which the cache has space, fractions included."""
        return max(0, self.kv) / (length * self.per_token + self.per_sequence)

    def awake(self, phase: str) -> bool:
        """Returns True if all engine parts are on the device in a phase."""
        return resident(phase, self.keep).issuperset(ENGINE)

    def phase(self, name: str) -> dict[str, int]:
        """Returns kind → bytes on the device in a phase, for kinds present in the phase; `kv_cache` may be negative,
        for a shortage.

        A partly sleeping engine holds no working memory: the workspace of experts is dropped with the KV cache, and
        torch's cache is emptied. On a shared GPU the sync buckets belong to the policy.
        """
        resident_parts = resident(name, self.keep)
        kinds = {"weights": self.weights} if "engine_weights" in resident_parts else {}
        kinds |= {"kv_cache": self.kv} if "kv_cache" in resident_parts else {}
        kinds |= {"working": self.working} if self.awake(name) else {}
        kinds |= {"staged": self.staged} if name == "sync" and self.staged else {}
        return kinds | {"reserve": self.reserve, "beside": self.beside}

    @cached_property
    def totals(self) -> dict[str, int]:
        """Phase → bytes of all kinds on the device."""
        return {name: sum(self.phase(name).values()) for name in PHASES}

    def lower_bound_in(self, phase: str) -> float:
        """Returns the smallest plausible number of bytes on the device in a phase.

        An awake engine needs `budget` in full, and `beside` reduced by `MARGIN`; a staged layer adds nothing, because
        the layer may lie in the working memory. An engine that is not awake needs the counted kinds (`COUNTED`) in
        full, and the estimated kinds reduced by `MARGIN`.

        Args:
            phase: A name of `PHASES`, or `eval`.
        """
        if self.awake(phase):
            return self.budget + (1 - MARGIN) * self.beside
        return lower_bound(self.phase(phase))

    @property
    def resident(self) -> int:
        """Bytes on the device during generation: `budget` + `beside`."""
        return self.budget + self.beside

    @property
    def peak(self) -> int:
        """Most bytes on a GPU without a policy rank: generation, plus the staged layer and the buckets of a sync."""
        return self.resident + self.staged + self.sync

    @property
    def lower_bound(self) -> int:
        """Smallest plausible number of bytes during generation: `budget` in full, and `beside`, an estimate, times 1 -
        `MARGIN`."""
        return self.budget + int((1 - MARGIN) * self.beside)
