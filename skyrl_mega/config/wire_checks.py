"""What is refused of weights on their way to engines: types that no sync brings."""

from __future__ import annotations

from skyrl_mega.config.derived import fp8_parameters
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.config.values import shown

BLOCKS = ("fp8_per_block", "online")
"""Of vLLM's own quantisations those that a sync can bring; `online` is looked at where the engine is made."""


def check_wire(c: Config) -> None:
    """Raises UserError for engines whose parameters no sync can bring."""
    if fp8_parameters(c.rollout):
        if c.weights.wire != "fp8":
            raise UserError(
                f"weights.wire = {c.weights.wire}: allowed is fp8 where rollout.options.hf_overrides."
                "quantization_config makes engines that take FP8 numbers and scales; or let them quantise what "
                "arrives, with rollout.options.quantization=fp8_per_block"
            )
        return
    kind = c.rollout.options.get("quantization")
    if kind is not None and kind not in BLOCKS:
        raise UserError(
            f"rollout.options.quantization = {shown(kind)}: a weight sync brings blocks with a scale each, and no "
            "other quantised weights; allowed is fp8_per_block (docs/weight-sync.md), or leave it out"
        )
