"""Finds single settings that free GPU memory. Each is tried, so that only settings that help and are valid are
named."""

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
"""Minimum free bytes of a safe phase, as the memory of CUDA and NCCL has not been measured on any GPU."""
WORTH = GIB // 10
"""Minimum bytes that a named setting must free."""

Tried = tuple[str, Config]
"""Setting as written on the command line, and the complete settings with it."""
Relief = tuple[str, int]
"""Setting, and the bytes freed."""


@dataclass(frozen=True)
class Short:
    """Phase with unsafely little free memory on a shared GPU."""

    gpu: SharedGpu
    phase: str

    @property
    def left(self) -> int:
        """Returns the free bytes; a negative number is the estimated shortage."""
        return self.gpu.left(self.phase)

    @property
    def doubt(self) -> int:
        """Returns how many more bytes may be missing: the error of the phase's estimates, at least `CLOSE`."""
        return max(CLOSE, self.gpu.policy.doubt(self.phase))


def shortest(config: Config, d: Decoder, parallel: ParallelDims) -> Short | None:
    """Returns the phase with the least free memory, of all unsafe phases; None if all are safe. Phases short of memory
    come first."""
    every = (Short(gpu, phase) for gpu in shared_gpus(config, d, parallel) for phase in gpu.policy.phases)
    found = [short for short in every if short.left < short.doubt]
    return min(found, key=lambda short: (min(short.left, 0), short.left - short.doubt), default=None)


def relief(config: Config, d: Decoder, parallel: ParallelDims, phase: str) -> list[Relief]:
    """Returns settings freeing memory of the fullest shared GPU in a phase, largest gain first."""

    def left(other: Config) -> int:
        return min(gpu.left(phase) for gpu in shared_gpus(other, d, parallel))

    return _helping(config, d, (*_of_policy(config, d, parallel), *_of_sharing(config, phase)), left)


def policy_relief(config: Config, d: Decoder, parallel: ParallelDims) -> list[Relief]:
    """Returns settings reducing the memory of the policy's fullest rank, largest gain first."""

    def left(other: Config) -> int:
        return -max(policy_memory(other, d, parallel, rank).peak for rank in stages(parallel).values())

    return _helping(config, d, _of_policy(config, d, parallel), left)


def _helping(config: Config, d: Decoder, tried: Iterable[Tried], left: Callable[[Config], int]) -> list[Relief]:
    """Returns the candidates that free at least `WORTH` and pass all checks, including host memory."""
    before, found = left(config), []
    for setting, other in tried:
        if _works(other, d) and (gained := left(other) - before) >= WORTH:
            found.append((setting, gained))
    return sorted(found, key=lambda one: -one[1])


def _works(config: Config, d: Decoder) -> bool:
    """Returns True if every check passes and an engine's KV cache holds a sequence by the plain estimates."""
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
    half = max(1, max(parallel.stage_sizes(d.layers)) // 2)  # then each copy overlaps with two layers
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
