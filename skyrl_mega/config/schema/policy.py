"""Settings of the Megatron policy and the reference: layout, optimizer, router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from skyrl_mega.config.schema.fields import MOST, Refusals, at_least, between, one_of
from skyrl_mega.config.schema.precision import PrecisionConfig

MOST_BETA = 0.99
"""Largest beta with bfloat16 moments. A moment without a gradient shrinks by the fraction 1 - beta, and adjacent
bfloat16 numbers differ by 0.4 to 0.8 %: a change below 0.2 to 0.4 % may be rounded away, a change of 1 % never is."""
FUSE = {"[rope,swiglu]": "fuses these two", "[]": "none", "null": "all that are right"}


@dataclass
class LayoutConfig:
    """Parallel layout of the model in Megatron. The data parallel size follows: ranks / (tensor · pipeline ·
    context)."""

    tensor: int = at_least(1, 1)
    """Tensor parallel size; above 1, sequence parallelism is on as well."""
    pipeline: int = at_least(1, 1)
    """Number of pipeline stages."""
    virtual_pipeline: int = at_least(1, 1)
    """Model chunks per pipeline stage (interleaved schedule)."""
    first_stage_layers: Optional[int] = at_least(1, None)
    """Number of layers of the first pipeline stage; null uses the same number as for the middle stages."""
    last_stage_layers: Optional[int] = at_least(1, None)
    """Number of layers of the last pipeline stage; null uses the same number as for the middle stages."""
    context: int = at_least(1, 1)
    """Context parallel size: the number of ranks that share every sequence."""
    context_exchange: str = one_of("ring", "all_to_all")
    """Exchange of the context ranks in an attention layer. ring: every rank attends with all heads for its own tokens,
    and keys and values pass around the ranks (`local` layers gather keys and values). all_to_all (Ulysses,
    arXiv:2309.14509): every rank attends with its part of the heads for whole sequences. all_to_all needs heads and
    key/value heads that `tensor` · `context` divides. docs/speed.md compares the bytes."""
    expert: int = at_least(1, 1)
    """Expert parallel size."""
    expert_tensor: Optional[int] = at_least(1, None)
    """Tensor parallel size inside an expert; null uses 1 with expert > 1, else `tensor`."""


@dataclass
class OptimizerConfig:
    """AdamW with a learning rate schedule."""

    lr: float = at_least(0, 1e-6)
    """Peak learning rate."""
    min_lr: float = at_least(0, 0.0)
    """Final learning rate of a decaying schedule."""
    schedule: str = one_of("constant", "linear", "cosine")
    """Learning rate schedule after the warm-up."""
    warmup_steps: int = at_least(0, 0)
    """Optimizer steps of linear warm-up from zero."""
    warmup_from_zero: bool = False
    """Starts the warm-up at learning rate 0: step i uses (i − 1) / warmup_steps of `lr`, like the schedulers of torch
    and SkyRL; false uses i / warmup_steps."""
    decay_steps: Optional[int] = at_least(1, None)
    """Optimizer step at which the decay reaches `min_lr`; required by linear and cosine."""
    beta1: float = between(0, 1, 0.9)
    """Adam's first moment decay."""
    beta2: float = between(0, 1, 0.999)
    """Adam's second moment decay."""
    eps: float = at_least(0, 1e-8)
    """Adam's epsilon."""
    weight_decay: float = at_least(0, 0.01)
    """Decoupled weight decay; norms and biases are exempt."""
    clip_grad: float = at_least(0, 1.0)
    """Maximum global gradient norm; 0 does not clip."""
    moments: str = one_of("float32", "bfloat16")
    """Storage type of Adam's two moments. bfloat16: saves 4 bytes per parameter; a step computes in float32 and rounds
    the moments afterwards. `beta1` and `beta2` must then be at most 0.99, because with a larger value a decaying moment
    is rounded back up."""
    streamed: bool = False
    """Offloads master weights and moments to host memory permanently; an optimizer step streams all pieces through the
    device. The result is bit-identical; the step takes as long as the transfer."""
    options: dict[str, Any] = field(default_factory=dict)
    """Additional fields of megatron-core's OptimizerConfig, under megatron-core's names. The memory plan ignores these
    fields."""

    def refusals(self, key: str) -> Refusals:
        """Yields refusals of incomplete schedules, `min_lr` above `lr`, and betas of 1 or too large for `moments`.

        Args:
            key: The group of these settings, such as `policy.optimizer`.
        """
        if self.schedule != "constant":
            if self.decay_steps is None:
                yield f"{key}.schedule", f"it needs {key}.decay_steps; give it, or schedule=constant"
            elif self.decay_steps <= self.warmup_steps:
                yield f"{key}.decay_steps", f"allowed is more than {key}.warmup_steps = {self.warmup_steps}"
        if self.min_lr > self.lr:
            yield f"{key}.min_lr", f"allowed is at most {key}.lr = {self.lr:g}"
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if beta >= 1:
                yield f"{key}.{name}", "allowed is a number below 1"
            if self.moments == "bfloat16" and beta > MOST_BETA:
                yield (
                    f"{key}.moments",
                    f"it keeps 8 significant bits, and {key}.{name} = {beta:g} lets a moment without a gradient fall "
                    "by less than half of the last of them, which is rounded away; allowed is "
                    f"{key}.{name} of at most {MOST_BETA}, as published runs with such moments have (0.9 and 0.95), or "
                    "moments=float32",
                )


@dataclass
class MoeConfig:
    """Router settings of a MoE policy."""

    aux_loss: float = at_least(0, 0.0)
    """Coefficient of the load-balancing loss (arXiv:2101.03961, equation 4), computed over the whole mini-batch, so the
    loss does not depend on `micro_tokens` or the layout. Above 0, each mini-batch needs an additional forward pass."""
    freeze_router: bool = False
    """Keeps the router's weights as loaded."""
    replay: str = one_of("off", "rollout", "policy")
    """Source of the expert choices replayed by the policy's routers. rollout: the engine's choices, in all forward
    passes of the policy (R3, arXiv:2510.11370). policy: the choices during the computation of the old log-probs, in the
    update (R2, arXiv:2507.18071). The policy computes its own probabilities over the chosen experts, so routers still
    learn. Every pass checks that all tokens reached the replayed experts."""
    dispatcher: str = one_of("alltoall", "deepep")
    """Transport of tokens to the ranks of the experts and back. alltoall: NCCL. deepep: kernels of the package deep_ep;
    a token is sent only once to a rank or node with several experts of the token. deepep needs CUDA, bfloat16 and
    experts spread over ranks (`policy.layout`)."""


@dataclass
class PolicyConfig:
    """Settings of the Megatron policy: ranks, layout, optimizer, and the speed and memory of training."""

    ranks: Optional[int] = between(1, MOST, None)
    """Number of processes (GPUs) of the policy; null uses nodes · gpus_per_node."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """Parallel layout of the model."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW with a schedule."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    """Router settings."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number format of the linear layers."""
    spec: str = one_of("auto", "te", "local")
    """Layer implementation. te: Transformer Engine modules, CUDA only. local: megatron-core's own modules, with this
    project's attention and norm. auto: te on CUDA, local on a CPU."""
    overlap: Optional[bool] = None
    """Overlaps data-parallel communication with computation: reduces gradients during the backward pass, and gathers
    updated parameters during the next forward pass; null does so on CUDA."""
    micro_tokens: Optional[int] = at_least(1, 8192)
    """Token budget per packed micro-batch and rank (a longer sequence gets a separate micro-batch). null: the largest
    of 4096, 8192, 16384 and 32768 (on a CPU: 4096 and 8192) to fit by the dry run; a resumed run keeps the previous
    value."""
    share_prefixes: bool = False
    """Computes first tokens that several sequences of a micro-batch have in common only once: the prompt of a group's
    samples, and the earlier turns of samples with `rollout.step_wise=turns`. Log-probs and gradients change by rounding
    only. Attention of `te` layers then uses torch's kernel for sequences of different lengths. Not possible with
    context parallelism, latent attention or gated delta nets, `moe.aux_loss`, or `moe.replay=policy`."""
    head: str = one_of("auto", "fused", "chunked")
    """Computation of log-probs and entropy from the last hidden states. fused: a single kernel for output projection
    and softmax, without logits in memory; needs Triton on CUDA, and is computed by torch on a CPU. chunked: computes
    the logits of `logit_chunk` tokens at a time. auto: fused on CUDA, chunked on a CPU."""
    logit_chunk: int = at_least(1, 1024)
    """Number of tokens whose logits are in memory at the same time, in the chunked head. A micro-batch with no more
    tokens in the loss keeps its logits for the backward pass; others compute theirs again."""
    recompute: str = one_of("none", "selective", "moe", "full", former={True: "full", False: "none"})
    """Activations recomputed in the backward pass instead of stored, in order of decreasing memory. none: nothing.
    selective: cheap operations of `te` layers only, norms and the experts' activation function. moe: the MoE part of
    every layer, or the MLP of a dense layer. full: whole layers (true and false mean full and none). docs/speed.md
    lists bytes and time of each."""
    offload_layers: int = at_least(0, 0)
    """Number of layers per rank, evenly spaced, whose activations are offloaded to pinned host memory until the
    backward pass; the copies overlap with the computation of the remaining layers. A number above the layers of a rank
    offloads all layers. Allowed with any `recompute` except full. docs/speed.md explains when offloading is faster than
    recomputing."""
    fusions: Optional[list[str]] = field(
        default=None, metadata={"allowed": ("rope", "permute", "router", "swiglu"), "examples": FUSE}
    )
    """Fused kernels of `te` layers: rope (rotation of queries and keys), permute (sorting tokens by expert), router
    (expert choice), swiglu (activation function of MLPs). null: all four, except router if `moe.replay` or
    `moe.aux_loss` needs megatron-core's own router. []: none. `local` layers use none; dense models use neither permute
    nor router."""
    threads: int = between(1, 4096, 1)
    """CPU threads of one rank (CPU only)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Additional fields of megatron-core's TransformerConfig, under megatron-core's names (`moe_router_dtype: fp32`);
    also applied to a reference with a separate layout. Fields controlled by another setting or by the run are errors;
    the memory plan ignores the rest."""
    ddp_options: dict[str, Any] = field(default_factory=dict)
    """Additional fields of megatron-core's DistributedDataParallelConfig, under megatron-core's names (`bucket_size:
    40000000`)."""


@dataclass
class ReferenceConfig:
    """The frozen policy of the KL term. Exists only if `algorithm.kl.coefficient` is above 0."""

    path: Optional[str] = None
    """Hugging Face directory of the reference's weights; null uses `model.path`."""
    layout: Optional[LayoutConfig] = None
    """Parallel layout of a reference with separate actors; null shares the policy's ranks and layout."""
    ranks: Optional[int] = between(1, MOST, None)
    """Number of processes of a reference with a separate layout."""
