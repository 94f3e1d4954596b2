"""The choice of experts: the router's scores, and the layers that have experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.models.config_json import Hf, flag, integer, number, require, unsupported


@dataclass(frozen=True)
class ExpertRouter:
    """The settings of a router, which turns a token's logits, one per expert, into chosen experts and their weights."""

    score: Literal["softmax", "sigmoid"]
    """Function from logits to scores."""
    renormalize: bool
    """True if the chosen experts' scores are divided by their sum."""
    bias: bool = False
    """True for a correction bias (arXiv:2408.15664): added to the scores for the choice, and not to the weights."""
    groups: int = 1
    """Groups of experts of equal size; 1: no limit by group."""
    top_groups: int = 1
    """Groups that a token's experts may come from: those with the largest sum of their two best scores."""
    scale: float = 1.0
    """Factor of the weights."""

    @classmethod
    def softmax(cls, hf: Hf) -> ExpertRouter:
        """Returns the softmax router of Qwen and OLMoE; `norm_topk_prob` of config.json decides on renormalisation. No
        other key is read.

        Raises:
            UserError: `norm_topk_prob` is missing or no boolean.
        """
        return cls("softmax", flag(hf, "norm_topk_prob"))

    @classmethod
    def sigmoid(cls, hf: Hf, per_token: int) -> ExpertRouter:
        """Returns the sigmoid router with a correction bias of DeepSeek-V3 (arXiv:2412.19437), as set in config.json.

        Args:
            hf: Content of config.json.
            per_token: Number of experts of a token.

        Raises:
            UserError: A key is missing, `norm_topk_prob` is not true, `topk_group` is above `n_group`, or with several
                groups `topk_group` is not half of `per_token`.
        """
        if not flag(hf, "norm_topk_prob"):
            raise unsupported(hf, "norm_topk_prob", "true, as megatron-core always divides sigmoid scores by their sum")
        groups, top_groups = integer(hf, "n_group"), integer(hf, "topk_group")
        if groups > 1 and per_token != 2 * top_groups:
            # megatron-core ranks a group by its best `per_token / top_groups` scores, DeepSeek by its best two.
            raise unsupported(
                hf,
                "topk_group",
                f"half of num_experts_per_tok {per_token} (or n_group 1); others are routed differently",
            )
        if top_groups > groups:
            raise unsupported(hf, "topk_group", f"at most n_group {groups}")
        return cls("sigmoid", True, True, groups, top_groups, number(hf, "routed_scaling_factor"))

    def megatron_args(self) -> Mapping[str, Any]:
        """Returns the keyword arguments of megatron-core's `TransformerConfig` for this router."""
        if self.score == "softmax":
            # A softmax over all experts, renormalised over the chosen ones, is the softmax of the chosen logits.
            return {"moe_router_pre_softmax": not self.renormalize}
        args: dict[str, Any] = {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": self.bias,
            "moe_router_bias_update_rate": 0.0,  # the default changes the bias after every step
        }
        if self.groups > 1:
            args |= {"moe_router_num_groups": self.groups, "moe_router_group_topk": self.top_groups}
        if self.scale != 1.0:
            args["moe_router_topk_scaling_factor"] = self.scale
        return args


def sparse_step_layers(hf: Hf) -> list[bool]:
    """Returns a flag per layer, True for layers with experts: every `decoder_sparse_step`-th layer, starting with layer
    `decoder_sparse_step` - 1 (from 0), except the indices in `mlp_only_layers` (absent or null: none).

    Raises:
        UserError: A key is missing, a value is not supported, or no layer contains experts.
    """
    layers, step = integer(hf, "num_hidden_layers"), integer(hf, "decoder_sparse_step")
    listed = hf.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise UserError(
            f"mlp_only_layers is {shown(listed)}; allowed is a list of layer numbers, such as [0, 1]", key="config.json"
        )
    return with_experts(hf, [layer not in listed and (layer + 1) % step == 0 for layer in range(layers)])


def dense_first_layers(hf: Hf) -> list[bool]:
    """Returns a flag per layer, True for layers with experts: all but the first `first_k_dense_replace`.

    Raises:
        UserError: A key is missing, a value is not supported, or no layer contains experts.
    """
    layers, dense = integer(hf, "num_hidden_layers"), hf.get("first_k_dense_replace")
    require(hf, "moe_layer_freq", 1)
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        raise unsupported(hf, "first_k_dense_replace", "a number of layers")
    return with_experts(hf, [layer >= dense for layer in range(layers)])


def with_experts(hf: Hf, moe: list[bool]) -> list[bool]:
    """Returns `moe`, a flag per layer, unchanged: True for layers with experts.

    Raises:
        UserError: No layer has experts.
    """
    if not any(moe):
        raise UserError(
            f"none of the {len(moe)} layers has experts; give model_type qwen3 for a dense model", key="config.json"
        )
    return moe
