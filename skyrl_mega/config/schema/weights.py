"""Settings of the weight sync from policy to engines."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.schema.fields import at_least, between, one_of


@dataclass
class WeightsConfig:
    """Weight sync from policy to engines: number format, message size, verification and time limit."""

    wire: str = one_of("auto", "fp8")
    """Number format of transferred weights. auto: `model.dtype`. fp8: linear weights are sent as E4M3 with a scale per
    128×128 block, half the bytes; an engine with another storage type converts the received weights, with FP8
    precision."""
    bucket_mib: float = between(0.001, 65536, 64.0)
    """Bucket (message) size in MiB; a process holds at most three buckets."""
    checksum_every: int = at_least(0, 10)
    """Interval, in weight syncs, between syncs that verify every part on arrival; 0 never verifies."""
    timeout_s: float = at_least(1, 300.0)
    """Time limit per sync in seconds; the error then names rank and tensor."""
