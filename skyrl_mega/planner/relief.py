"""Finds single settings that free GPU memory. Each is tried, so that only settings that help and are valid are
named."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.derived import has_critic, micro_tokens
from skyrl_mega.config.residency import CRITIC, NEEDS, PARTS, kept
from skyrl_mega.config.schema import Config
from skyrl_mega.models.decoder import Decoder
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.planner import fit, fp8_blocks
from skyrl_mega.planner.candidates import Change, as_arguments, changed, differing
from skyrl_mega.planner.memory import GIB, engine_memory, policy_memory
from skyrl_mega.planner.shared import SharedGpu, shared_gpus, stage_ranks

MIN_FREE = GIB
"""Minimum free bytes of a safe phase, as the memory of CUDA and NCCL has not been measured on any GPU."""
MIN_GAIN = GIB // 10
"""Minimum bytes that a named setting must free."""

Relief = tuple[str, int]
"""Setting as written on the command line, and the bytes freed."""


@dataclass(frozen=True)
class UnsafePhase:
    """Phase with unsafely little free memory on a shared GPU."""

    gpu: SharedGpu
    phase: str
    """Name of the phase."""

    @property
    def free(self) -> int:
        """Estimated free bytes of the GPU in the phase; negative for a shortage."""
        return self.gpu.free(self.phase)

    @property
    def possible_shortage(self) -> int:
        """Possible need in bytes beyond the estimate: the error of the phase's estimates, at least `MIN_FREE`."""
        return max(MIN_FREE, self.gpu.policy.estimate_error(self.phase))


def least_safe_phase(config: Config, decoder: Decoder, parallel: ParallelDims) -> UnsafePhase | None:
    """Returns the least safe phase of all shared GPUs: the largest shortage, else the smallest free memory beyond the
    estimates' error. None if every phase has more free memory than this error, or no GPU is shared. `parallel` is the
    policy's grid. Raises UserError if the files of a draft model or head cannot be used, and ValueError if
    `policy.micro_tokens` is not decided."""
    phases = (UnsafePhase(gpu, phase) for gpu in shared_gpus(config, decoder, parallel) for phase in gpu.policy.phases)
    unsafe = [phase for phase in phases if phase.free < phase.possible_shortage]
    return min(unsafe, key=lambda phase: (min(phase.free, 0), phase.free - phase.possible_shortage), default=None)


def relief(config: Config, decoder: Decoder, parallel: ParallelDims, phase: str | None = None) -> list[Relief]:
    """Returns single settings and the bytes freed by each, for settings freeing at least `MIN_GAIN` and passing all
    checks, including host memory; largest gain first. The settings may still not suffice. [] if nothing helps. Raises
    UserError if the files of a draft model or head cannot be used, and ValueError if `policy.micro_tokens` is not
    decided.

    Args:
        config: The settings.
        decoder: The model.
        parallel: The policy's grid.
        phase: Phase in which memory of the fullest shared GPU is needed, such as `train`, only for settings with shared
            GPUs; None for memory of the policy's fullest rank.
    """

    def free(other: Config) -> int:
        if phase:
            return min(gpu.free(phase) for gpu in shared_gpus(other, decoder, parallel))
        return -max(policy_memory(other, decoder, parallel, rank).peak for rank in stage_ranks(parallel).values())

    before = free(config)
    changes = [*_policy_changes(config, decoder, parallel), *(_sharing_changes(config, phase) if phase else ())]
    candidates = ((as_arguments(change), changed(config, change)) for change in changes)
    gains = ((setting, free(other) - before) for setting, other in candidates if _passes_checks(other, decoder))
    return sorted((gain for gain in gains if gain[1] >= MIN_GAIN), key=lambda gain: -gain[1])


def _passes_checks(config: Config, decoder: Decoder) -> bool:
    """Returns True if every check passes and an engine's KV cache holds a sequence by the plain estimates."""
    try:
        check(config, planned=True)
        fp8_blocks.check(config, decoder, fit.parallel_of(config)[0])
    except UserError:
        return False
    return fit.problem(config, decoder) is None and engine_memory(config, decoder).starts()


def _policy_changes(config: Config, decoder: Decoder, parallel: ParallelDims) -> list[Change]:
    half = max(1, max(parallel.stage_sizes(decoder.layers)) // 2)  # then each copy overlaps with two layers
    none_offloaded = differing(config, (("policy.offload_layers", 0),))
    return [
        (("policy.recompute", "selective"),),
        (("policy.recompute", "moe"),),
        (("policy.recompute", "full"), *none_offloaded),
        (("policy.offload_layers", half),),
        (("policy.micro_tokens", max(1, micro_tokens(config.policy) // 2)),),
        (("policy.optimizer.streamed", True),),
        (("policy.precision.parameters", "fp8"),),
    ]


def _sharing_changes(config: Config, phase: str) -> list[Change]:
    stays = kept(config.residency.keep)
    needed = [part for part in PARTS if part in stays and (part in NEEDS[phase] or part in CRITIC)]
    return [
        (("residency.keep", [part for part in needed if part not in CRITIC or has_critic(config)]),),
        (("rollout.memory_fraction", round(config.rollout.memory_fraction - 0.05, 2)),),
        (("rollout.eager", True),),
    ]
