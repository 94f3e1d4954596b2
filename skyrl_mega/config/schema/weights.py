"""The weight sync from policy to engines."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.config.schema.fields import at_least, between, one_of


@dataclass
class WeightsConfig:
    """Weight sync from policy to engines."""

    wire: str = one_of("auto", "fp8")
    """auto: as `model.dtype`. fp8: linear weights travel as E4M3 with a scale for every 128×128 block, half the bytes;
    an engine that stores another type gets them back in it, with FP8's precision."""
    bucket_mib: float = between(0.001, 65536, 64.0)
    """Size of one message; a process has three of them at most."""
    checksum_every: int = at_least(0, 10)
    """Syncs from one to the next of which every part is proved where it has arrived; 0 proves none."""
    timeout_s: float = at_least(1, 300.0)
    """Seconds for one sync; past it the error names rank and tensor."""
