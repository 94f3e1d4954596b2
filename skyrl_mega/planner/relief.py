"""What gives a shared GPU more room in a phase: settings that are tried one by one, so that none is named that does not
help there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from skyrl_mega.config.checks import check
from skyrl_mega.config.derived import length_limit
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.residency import CRITIC, NEEDS, PARTS, kept
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner.memory import GIB, on_cpu
from skyrl_mega.planner.shared import SharedGpu, shared_gpus

CLOSE = GIB
"""Less than this is too little to be left in any phase: what CUDA and NCCL take has been measured on no GPU."""
WORTH = GIB // 10
"""What gives less is not named."""


@dataclass(frozen=True)
class Short:
    """A phase in which a shared GPU has less than is safe."""

    gpu: SharedGpu
    phase: str

    @property
    def left(self) -> int:
        """Bytes; below 0 so many are lacking by the estimates."""
        return self.gpu.left(self.phase)

    @property
    def doubt(self) -> int:
        """Bytes that may be lacking beside: what the phase's estimates may be too low, or `CLOSE`."""
        return max(CLOSE, self.gpu.policy.doubt(self.phase))


def shortest(config: Config, d: Decoder, parallel: ParallelDims) -> Short | None:
    """The phase with least, of those that have less than is safe; one that lacks memory comes first."""
    every = (Short(gpu, phase) for gpu in shared_gpus(config, d, parallel) for phase in gpu.policy.phases)
    found = [short for short in every if short.left < short.doubt]
    return min(found, key=lambda short: (min(short.left, 0), short.left - short.doubt), default=None)


def relief(config: Config, d: Decoder, parallel: ParallelDims, phase: str) -> list[tuple[str, int]]:
    """Settings, one by one, with the bytes that each gives the fullest shared GPU in a phase; what gives most first."""
    before, found = _left(config, d, parallel, phase), []
    for text, other in _tried(config, phase):
        try:
            check(other, planned=True)
        except UserError:
            continue
        gained = _left(other, d, parallel, phase) - before
        if gained >= WORTH:
            found.append((text, gained))
    return sorted(found, key=lambda one: -one[1])


def _tried(config: Config, phase: str) -> Iterator[tuple[str, Config]]:
    policy, rollout, stays = config.policy, config.rollout, kept(config.residency.keep)
    yield "policy.recompute=full", replace(config, policy=replace(policy, recompute="full"))
    fewer = policy.micro_tokens // 2
    yield f"policy.micro_tokens={fewer}", replace(config, policy=replace(policy, micro_tokens=max(1, fewer)))
    own = [part for part in PARTS if part in stays and (part in NEEDS[phase] or part in CRITIC)]
    keep = [part for part in own if part not in CRITIC or config.algorithm.advantage == "gae"]
    yield f"residency.keep=[{','.join(keep)}]", replace(config, residency=replace(config.residency, keep=keep))
    lower = round(rollout.memory_fraction - 0.05, 2)
    yield f"rollout.memory_fraction={lower:g}", replace(config, rollout=replace(rollout, memory_fraction=lower))
    yield "rollout.eager=true", replace(config, rollout=replace(rollout, eager=True))


def _left(config: Config, d: Decoder, parallel: ParallelDims, phase: str) -> int:
    """Of the fullest GPU; as good as nothing where an engine's cache would not hold a sequence."""
    gpus = [] if on_cpu(config) else [*shared_gpus(config, d, parallel)]
    if any(gpu.engine.tokens < length_limit(config.rollout) for gpu in gpus):
        return -(2**62)
    return min(gpu.left(phase) for gpu in gpus)
