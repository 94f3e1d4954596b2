"""The dense feed-forward part: down(silu(gate(x)) · up(x)), with the norm before (arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl_mega.models.blocks.base import (
    Block,
    Cut,
    EngineCut,
    MegatronPlace,
    MegatronSettings,
    Messages,
    Tensors,
    TokenFlops,
    Work,
)
from skyrl_mega.models.config_json import Hf, integer, require
from skyrl_mega.models.shard_builder import ShardBuilder
from skyrl_mega.parallel.dims import ParallelDims

GATED = ("gate_proj", "up_proj", "down_proj")
"""The three matrices of a gated MLP, in most families."""
NORM = "post_attention_layernorm.weight"
"""Name of the norm before a feed-forward part, in Hugging Face and in vLLM."""


def check_keys(hf: Hf) -> None:
    """Raises UserError if config.json asks for an activation other than silu, or for a bias in feed-forward parts.
    Absent keys and nulls pass."""
    require(hf, "hidden_act", "silu")
    require(hf, "mlp_bias", False)


@dataclass(frozen=True)
class GatedMlp(Block):
    """A gated MLP with the same width for gate, up and down."""

    hidden: int
    width: int
    """Intermediate size."""

    @classmethod
    def read(cls, hf: Hf) -> GatedMlp:
        """Returns the feed-forward part described by config.json.

        Raises:
            UserError: A key is missing, or a value is not supported.
        """
        check_keys(hf)
        return cls(integer(hf, "hidden_size"), integer(hf, "intermediate_size"))

    def hf_tensors(self, source: str) -> Tensors:
        return {f"{source}.{NORM}": (self.hidden,)} | gated_tensors(f"{source}.mlp", self.width, self.hidden)

    def megatron_args(self, layers: Sequence[bool]) -> MegatronSettings:
        return MegatronSettings({"ffn_hidden_size": self.width} | gated_args())

    def megatron_cuts(self) -> Sequence[Cut]:
        return (Cut("tensor", "columns of a dense layer (intermediate_size)", self.width),)

    def megatron_widths(self) -> Sequence[Cut]:
        return self.megatron_cuts()

    def megatron_pieces(self, b: ShardBuilder, place: MegatronPlace, target: str, source: str) -> None:
        norm = "mlp.linear_fc1.layer_norm_weight" if place.spec == "te" else "pre_mlp_layernorm.weight"
        b.whole(f"{target}.{norm}", f"{source}.{NORM}")
        width = self.width // place.parallel.tensor
        fc1 = b.param(f"{target}.mlp.linear_fc1.weight", 2 * width, self.hidden)
        fc2 = b.param(f"{target}.mlp.linear_fc2.weight", self.hidden, width)
        gated_pieces(b, (fc1, fc2), f"{source}.mlp", place.coords.tp * width, width)

    def engine_cuts(self, cut: EngineCut) -> Sequence[tuple[str, int]]:
        return (("columns of a dense layer (intermediate_size)", self.width),)

    def engine_columns(self, cut: EngineCut) -> Mapping[str, int]:
        return {"columns of a dense layer": self.width // cut.tensor}

    def engine_pieces(self, b: ShardBuilder, cut: EngineCut, worker: int, source: str) -> None:
        b.whole(f"{source}.{NORM}", f"{source}.{NORM}")
        width = self.width // cut.tensor
        gate_up = b.param(f"{source}.mlp.gate_up_proj.weight", 2 * width, self.hidden)
        down = b.param(f"{source}.mlp.down_proj.weight", self.hidden, width)
        gated_pieces(b, (gate_up, down), f"{source}.mlp", worker % cut.tensor * width, width)

    def flops(self) -> TokenFlops:
        return TokenFlops(2 * 3 * self.hidden * self.width)

    def saved_bytes(self, work: Work) -> float:
        tensor = work.parallel.tensor
        norm = 2 * work.tokens / tensor * self.hidden * work.itemsize  # input and output
        # Gate, up, and the input of down; unfused also silu and a second copy of up.
        kept = 3 if "swiglu" in work.fused else 5
        return norm + work.tokens * work.itemsize * kept * self.width / tensor

    def kept_bytes(self, work: Work, recompute: str) -> float:
        """Returns the bytes kept on a rank for the backward pass, for one micro-batch and one layer: with "moe" only
        the block's input; with "none" and "selective" all of `saved_bytes`, because the norm is fused into the product,
        which keeps the norm's output."""
        if recompute == "moe":
            return work.tokens / work.parallel.tensor * self.hidden * work.itemsize
        return self.saved_bytes(work)

    def gradient_bytes(self, work: Work) -> float:
        width, hidden = self.width / work.parallel.tensor, self.hidden
        return work.itemsize * (work.tokens * (3 * width + 2 * hidden / work.parallel.tensor) + 3 * hidden * width)

    def messages(self, parallel: ParallelDims) -> Messages:
        return Messages(tensor=self.hidden)

    def engine_width(self, cut: EngineCut) -> float:
        return 3 * self.width / cut.tensor


def gated_tensors(source: str, width: int, hidden: int, matrices: tuple[str, str, str] = GATED) -> Tensors:
    """Returns name → shape of the three matrices of a gated MLP, or of an expert, below the name `source`."""
    gate, up, down = matrices
    return {
        f"{source}.{gate}.weight": (width, hidden),
        f"{source}.{up}.weight": (width, hidden),
        f"{source}.{down}.weight": (hidden, width),
    }


def gated_args() -> dict[str, object]:
    """Returns the keyword arguments of megatron-core's `TransformerConfig` for gated feed-forward parts with silu. A
    new dict; imports torch."""
    from torch.nn.functional import silu

    return {"gated_linear_unit": True, "activation_func": silu}


def gated_pieces(
    b: ShardBuilder,
    params: tuple[str, str],
    source: str,
    start: int,
    width: int,
    *,
    stack: tuple[int, ...] = (),
    matrices: tuple[str, str, str] = GATED,
) -> None:
    """Declares the pieces of a gated MLP: gate rows, then up rows in the first of `params`; down columns in the second.
    Both are already declared (`ShardBuilder.param`).

    `width` rows (gate, up) or columns (down) from `start` are taken of each matrix; the names are
    `<source>.<matrix>.weight`. `stack` is the index of the expert if a parameter holds several, else empty. Raises
    KeyError for a tensor unknown to `b`.
    """
    gate, up, down = matrices
    b.rows(params[0], 0, f"{source}.{gate}.weight", start, width, stack=stack)
    b.rows(params[0], width, f"{source}.{up}.weight", start, width, stack=stack)
    b.columns(params[1], f"{source}.{down}.weight", start, width, stack=stack)
