"""Experts whose files have a tensor for all experts: gate rows, then up rows, of each; and the second projections.

The order is that of vLLM's parameters, so a weight sync copies whole experts or runs of rows.

Legend: E experts, F width of an expert, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_mega.models.blocks.base import Tensors
from skyrl_mega.models.blocks.experts import Experts
from skyrl_mega.models.shard_builder import ShardBuilder


@dataclass(frozen=True)
class StackedExperts(Experts):
    """Gated MLPs of equal width in the tensors gate_up_proj [E, 2·F, H] and down_proj [E, H, F]."""

    def _expert_tensors(self, source: str) -> Tensors:
        gate_up, down = self._stacks(source)
        return {
            gate_up: (self.count, 2 * self.width, self.hidden),
            down: (self.count, self.hidden, self.width),
        }

    def _stacks(self, source: str) -> tuple[str, str]:
        """Returns the names of both tensors of a layer."""
        experts = f"{source}.{self.names.part}.experts"
        return f"{experts}.gate_up_proj", f"{experts}.down_proj"

    def _expert_pieces(
        self, b: ShardBuilder, params: tuple[str, str], source: str, expert: int, columns: range
    ) -> None:
        b.param(params[0], 1, 2 * len(columns), self.hidden)
        b.param(params[1], 1, self.hidden, len(columns))
        self._engine_experts(b, params, source, range(expert, expert + 1), columns)

    def _engine_experts(
        self, b: ShardBuilder, params: tuple[str, str], source: str, held: range, columns: range
    ) -> None:
        gate_up, down = self._stacks(source)
        count, first, width = len(held), columns.start, len(columns)
        for up in (0, 1):
            start = (held.start, up * self.width + first, 0)
            b.place(params[0], (0, up * width, 0), gate_up, start, (count, width, self.hidden))
        b.place(params[1], (0, 0, 0), down, (held.start, 0, first), (count, self.hidden, width))
