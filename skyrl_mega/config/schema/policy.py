"""The Megatron policy and the reference: layout, optimizer, router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from skyrl_mega.config.schema.fields import MOST, at_least, between, one_of
from skyrl_mega.config.schema.precision import PrecisionConfig

FUSE = {"[rope,swiglu]": "fuses these two", "[]": "none", "null": "all that are right"}


@dataclass
class LayoutConfig:
    """How Megatron cuts the model. Data parallelism is what remains: ranks / (tensor · pipeline · context)."""

    tensor: int = at_least(1, 1)
    """Tensor parallel size; sequence parallel is on whenever it is above 1."""
    pipeline: int = at_least(1, 1)
    """Pipeline stages."""
    virtual_pipeline: int = at_least(1, 1)
    """Model chunks per pipeline stage (interleaved schedule)."""
    first_stage_layers: Optional[int] = at_least(1, None)
    """Layers of the first pipeline stage; None gives it as many as the stages between."""
    last_stage_layers: Optional[int] = at_least(1, None)
    """Layers of the last pipeline stage; None gives it as many as the stages between."""
    context: int = at_least(1, 1)
    """Context parallel size."""
    expert: int = at_least(1, 1)
    """Expert parallel size."""
    expert_tensor: Optional[int] = at_least(1, None)
    """Tensor parallel size inside an expert; None takes 1 with expert > 1, else `tensor`."""


@dataclass
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = at_least(0, 1e-6)
    """Peak learning rate."""
    min_lr: float = at_least(0, 0.0)
    """Where a decaying schedule ends."""
    schedule: str = one_of("constant", "linear", "cosine")
    """After the warm-up."""
    warmup_steps: int = at_least(0, 0)
    """Optimizer steps of linear warm-up from zero."""
    warmup_from_zero: bool = False
    """The first optimizer step of a warm-up has learning rate 0, and step i has (i − 1) / warmup_steps of `lr`, as with
    the schedulers of torch and in SkyRL; false gives it i / warmup_steps."""
    decay_steps: Optional[int] = at_least(1, None)
    """Optimizer step at which `min_lr` is reached; needed by linear and cosine."""
    beta1: float = between(0, 1, 0.9)
    """Adam's first moment decay."""
    beta2: float = between(0, 1, 0.999)
    """Adam's second moment decay."""
    eps: float = at_least(0, 1e-8)
    """Adam's epsilon."""
    weight_decay: float = at_least(0, 0.01)
    """Decoupled weight decay; norms and biases are exempt."""
    clip_grad: float = at_least(0, 1.0)
    """Largest global gradient norm; 0 does not clip."""
    moments: str = one_of("float32", "bfloat16")
    """What Adam's two moments are kept in. bfloat16: rounded after every step, which computes in float32; 4 bytes a
    parameter less. `beta1` and `beta2` must then be at most 0.99: above, a moment that falls is rounded back up."""
    streamed: bool = False
    """Master weights and moments lie in host memory all the time; a step brings them to the device piece by piece, and
    takes them back. No bit differs; a step takes as long as all of them need over the link."""
    options: dict[str, Any] = field(default_factory=dict)
    """More fields of megatron-core's OptimizerConfig, by their own names. Memory that they save or take is not
    planned."""


@dataclass
class MoeConfig:
    """Router settings of a MoE policy."""

    aux_loss: float = at_least(0, 0.0)
    """Coefficient of the load-balancing loss (arXiv:2101.03961, equation 4), taken over the whole mini-batch: it does
    not depend on `micro_tokens` or the layout. Above 0 it costs one more forward pass for each mini-batch."""
    freeze_router: bool = False
    """Keeps the router's weights as loaded."""
    replay: str = one_of("off", "rollout", "policy")
    """Whose choice of experts the policy's routers repeat. rollout: the engine's, in all of the policy's forward passes
    (R3, arXiv:2510.11370). policy: those of the pass that computed the old log-probs, in the update (R2,
    arXiv:2507.18071). Probabilities stay the policy's own over the experts chosen, and routers learn from them. Every
    pass checks that all tokens went where they had to."""
    dispatcher: str = one_of("alltoall", "deepep")
    """How tokens get to their experts' ranks and back. alltoall: NCCL. deepep: the kernels of the package deep_ep,
    which send a token once to a rank or node that has several of its experts; CUDA in bfloat16 alone, and
    `policy.layout` must spread experts."""


@dataclass
class PolicyConfig:
    """The Megatron policy."""

    ranks: Optional[int] = between(1, MOST, None)
    """Processes (GPUs) of the policy; None takes nodes · gpus_per_node."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """How the model is cut."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    """Router settings."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """What linear layers compute in."""
    spec: str = one_of("auto", "te", "local")
    """Modules of a layer. te: Transformer Engine's, which compute on CUDA alone. local: megatron-core's own, with this
    project's attention and norm. auto: te on CUDA, local on a CPU."""
    overlap: Optional[bool] = None
    """Sums gradients over the data-parallel ranks while the backward pass computes, and gathers the parameters that an
    optimizer step changed while the next forward pass does; None does so on CUDA."""
    micro_tokens: Optional[int] = at_least(1, 8192)
    """Token budget of one packed micro-batch on one rank (a longer sequence has one of its own). None: the largest of
    4096, 8192, 16384 and 32768, on a CPU of the first two, with which the run fits by the dry run; a run that goes on
    has what it had."""
    head: str = one_of("auto", "fused", "chunked")
    """How log-probs and entropy come from the last hidden states. fused: the output projection and the soft-max are one
    kernel, and no logits are in memory; needs Triton on CUDA, and is computed by torch on a CPU. chunked: the logits of
    `logit_chunk` tokens at a time. auto: fused on CUDA, chunked on a CPU."""
    logit_chunk: int = at_least(1, 1024)
    """Tokens whose logits exist at once while log-probs are computed, with the chunked head."""
    recompute: str = one_of("none", "selective", "moe", "full", former={True: "full", False: "none"})
    """What the backward pass computes once more instead of keeping it, the least memory last. none: nothing. selective:
    what takes next to no time, in `te` layers alone: norms and the experts' activation function. moe: the MoE part of
    every layer, of a dense layer its MLP. full: whole layers (true and false mean full and none). docs/speed.md has the
    bytes and the time of each."""
    offload_layers: int = at_least(0, 0)
    """So many layers of a rank, evenly among the others, have what they keep for the backward pass in pinned host
    memory in between, copied there and back while the others compute; all of them where a rank has no more. With any
    `recompute` but full. docs/speed.md says when that is faster than recomputing."""
    fusions: Optional[list[str]] = field(
        default=None, metadata={"allowed": ("rope", "permute", "router", "swiglu"), "examples": FUSE}
    )
    """Operations of `te` layers that one kernel does: the rotation of queries and keys, the sorting of tokens by
    expert, the router's choice, the activation function of MLPs. null: all of them, but no fused router where
    `moe.replay` or `moe.aux_loss` needs megatron-core's own. []: none. `local` layers have none, and dense models
    neither permute nor router."""
    threads: int = between(1, 4096, 1)
    """CPU threads of one rank (CPU only)."""
    options: dict[str, Any] = field(default_factory=dict)
    """More fields of megatron-core's TransformerConfig, by their own names (`moe_router_dtype: fp32`); a reference
    with a layout of its own has them too. Fields that another setting or the run decides are refused; memory
    that the others save or take is not planned."""
    ddp_options: dict[str, Any] = field(default_factory=dict)
    """More fields of megatron-core's DistributedDataParallelConfig, by their own names (`bucket_size: 40000000`)."""


@dataclass
class ReferenceConfig:
    """The frozen policy that KL is measured against. It exists only while `algorithm.kl.coefficient` is above 0."""

    path: Optional[str] = None
    """Its weights; None takes `model.path`."""
    layout: Optional[LayoutConfig] = None
    """None shares the policy's ranks and layout; otherwise actors of its own in this layout."""
    ranks: Optional[int] = between(1, MOST, None)
    """Processes of a reference with a layout of its own."""
