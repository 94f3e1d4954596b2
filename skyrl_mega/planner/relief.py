"""What gives a GPU more room: settings that are tried one by one, so that none is named that does not help there, or
that is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from skyrl_mega.config.checks import check
from skyrl_mega.config.derived import has_critic, length_limit, micro_tokens
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.residency import CRITIC, NEEDS, PARTS, kept
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import fit, fp8_blocks
from skyrl_mega.planner.memory import GIB, engine_memory, policy_memory
from skyrl_mega.planner.shared import SharedGpu, shared_gpus, stages

CLOSE = GIB
"""Less than this is too little to be left in any phase: what CUDA and NCCL take has been measured on no GPU."""
WORTH = GIB // 10
"""What gives less is not named."""

Tried = tuple[str, Config]
"""A setting as it is written on the command line, and all settings with it."""
Relief = tuple[str, int]
"""A setting, and the bytes that it gives."""


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


def relief(config: Config, d: Decoder, parallel: ParallelDims, phase: str) -> list[Relief]:
    """What gives the fullest shared GPU room in a phase; what gives most first."""

    def left(other: Config) -> int:
        return min(gpu.left(phase) for gpu in shared_gpus(other, d, parallel))

    return _helping(config, d, (*_of_policy(config, d, parallel), *_of_sharing(config, phase)), left)


def policy_relief(config: Config, d: Decoder, parallel: ParallelDims) -> list[Relief]:
    """What takes memory off the policy's fullest rank; what takes most first."""

    def left(other: Config) -> int:
        return -max(policy_memory(other, d, parallel, rank).peak for rank in stages(parallel).values())

    return _helping(config, d, _of_policy(config, d, parallel), left)


def _helping(config: Config, d: Decoder, tried: Iterable[Tried], left: Callable[[Config], int]) -> list[Relief]:
    """Of what is tried, what gives room and is refused nowhere, on hosts neither."""
    before, found = left(config), []
    for setting, other in tried:
        if _works(other, d) and (gained := left(other) - before) >= WORTH:
            found.append((setting, gained))
    return sorted(found, key=lambda one: -one[1])


def _works(config: Config, d: Decoder) -> bool:
    """Whether every check passes, and an engine's cache holds a sequence by the estimates at their face."""
    try:
        check(config, planned=True)
        fp8_blocks.check(config, d, fit.parallel_of(config)[0])
    except UserError:
        return False
    return fit.problem(config, d) is None and engine_memory(config, d).tokens >= length_limit(config.rollout)


def _of_policy(config: Config, d: Decoder, parallel: ParallelDims) -> Iterator[Tried]:
    policy = config.policy
    for kind in ("selective", "moe", "full"):
        away = 0 if kind == "full" else policy.offload_layers
        beside = " policy.offload_layers=0" * (away != policy.offload_layers)
        yield (
            f"policy.recompute={kind}{beside}",
            replace(config, policy=replace(policy, recompute=kind, offload_layers=away)),
        )
    half = max(1, max(parallel.stage_sizes(d.layers)) // 2)  # whose copies have the time of two layers each
    yield f"policy.offload_layers={half}", replace(config, policy=replace(policy, offload_layers=half))
    fewer = max(1, micro_tokens(policy) // 2)
    yield f"policy.micro_tokens={fewer}", replace(config, policy=replace(policy, micro_tokens=fewer))
    optimizer = replace(policy.optimizer, streamed=True)
    yield "policy.optimizer.streamed=true", replace(config, policy=replace(policy, optimizer=optimizer))
    precision = replace(policy.precision, parameters="fp8")
    yield "policy.precision.parameters=fp8", replace(config, policy=replace(policy, precision=precision))


def _of_sharing(config: Config, phase: str) -> Iterator[Tried]:
    rollout, stays = config.rollout, kept(config.residency.keep)
    own = [part for part in PARTS if part in stays and (part in NEEDS[phase] or part in CRITIC)]
    keep = [part for part in own if part not in CRITIC or has_critic(config)]
    yield f"residency.keep=[{','.join(keep)}]", replace(config, residency=replace(config.residency, keep=keep))
    lower = round(rollout.memory_fraction - 0.05, 2)
    yield f"rollout.memory_fraction={lower:g}", replace(config, rollout=replace(rollout, memory_fraction=lower))
    yield "rollout.eager=true", replace(config, rollout=replace(rollout, eager=True))
