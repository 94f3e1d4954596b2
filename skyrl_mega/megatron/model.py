"""Construction of Megatron's model chunks on this rank, from a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.fp8_utils import is_float8tensor, post_all_gather_processing
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.values import shown
from skyrl_mega.config.derived import shares_prefixes
from skyrl_mega.config.schema import PolicyConfig
from skyrl_mega.megatron import speed
from skyrl_mega.megatron.config_classes import config_class
from skyrl_mega.megatron.gated_delta import PackedDeltaNet
from skyrl_mega.megatron.layer_spec import decoder_spec
from skyrl_mega.megatron.packing import PackedRow
from skyrl_mega.megatron.precision import transformer_settings
from skyrl_mega.megatron.rotation import Rotation
from skyrl_mega.models.blocks.experts import MEGATRON_EXPERTS
from skyrl_mega.models.megatron import layer_modules, layer_spec, require_transformer_engine
from skyrl_mega.models.registry import HeadKind, architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.parallel.shared_gloo import share_gloo_threads

T = TypeVar("T")


class HiddenGPT(GPTModel):
    """A GPTModel with hidden states as output of the last stage; `megatron.heads` applies the head.

    Args:
        args: Arguments of megatron-core's GPTModel, like `kwargs`.
        rotates: True if every attention layer is a `PackedAttention` that rotates by `PackedRow.rotation`; False if
            megatron-core rotates, in rows with shared prefixes by the angles of the tokens' positions.
    """

    def __init__(self, *args: Any, rotates: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotates = rotates

    def forward(self, *args: Any, packed_seq_params: PackedRow, **kwargs: Any) -> Tensor:
        """Returns the stage's hidden states, like megatron-core's `forward`. `packed_seq_params` does not change: the
        layers get a copy with the rotation, so the rotation is freed with the graph of this pass."""
        hidden: Tensor = super().forward(*args, packed_seq_params=replace(packed_seq_params), **kwargs)
        return hidden

    def _preprocess(self, *args: Any, packed_seq_params: PackedRow, **kwargs: Any) -> tuple[Any, ...]:
        """Returns megatron-core's inputs of the layers. With `rotates`, sets the row's rotation and returns no angles,
        so that megatron-core does not rotate."""
        row = packed_seq_params
        hidden, angles, *rest = super()._preprocess(*args, packed_seq_params=row, **kwargs)
        if angles is None or row.position_L is None:
            return hidden, angles, *rest
        if self.rotates:
            scale = _yarn_get_concentration_factor_from_config(self.config)
            row.rotation = Rotation.of(angles, row.position_L, scale, self.config.params_dtype)
            angles = None
        elif row.keys is not None:
            angles = angles[row.position_L]  # megatron-core takes the row for one sequence
        return hidden, angles, *rest

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    def head(self) -> Tensor:
        """Returns this rank's rows of the output projection, [V/tp, H], not copied (last stage only)."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


class ValueGPT(HiddenGPT):
    """A HiddenGPT with a value head instead of the output projection; the projection's memory is freed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config.hidden_size)

    def head(self) -> Tensor:
        """Returns the value head's weight, float32 [1, H], not a copy. Every tensor rank has the whole weight. Raises
        AttributeError on pipeline stages before the last."""
        return self.value_head.weight


class ValueHead(torch.nn.Module):
    """A linear head with value 0 for every state until trained or loaded. All tensor ranks hold a copy, with equal
    gradients.

    The weight stays in float32 in models of another dtype, because a value is a sum over hidden states, not a choice
    among tokens.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ValueHead:
        """Applies `fn` like any module (`to`, `bfloat16`), but keeps float32."""
        return super()._apply(lambda t: fn(t).float(), recurse)


def join(rank: int, parallel: ParallelDims, store: dist.Store, device: torch.device, timeout_s: float) -> None:
    """Initialises torch's default process group for this rank, and Megatron's groups within.

    Waits for all ranks of the model.

    Args:
        rank: The rank, from 0 to `parallel.ranks` - 1.
        parallel: The layout.
        store: Rendezvous store shared by all ranks.
        device: The rank's device: NCCL on CUDA, gloo on a CPU.
        timeout_s: Time limit in seconds of joining and of collectives.

    Raises:
        RuntimeError: Not all ranks joined within `timeout_s`.
    """
    # Megatron relies on one connection per pair to order sends and receives.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if device.type == "cpu":
        share_gloo_threads()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=parallel.ranks,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    make_groups(parallel, timeout_s)


def make_groups(parallel: ParallelDims, timeout_s: float) -> None:
    """Creates Megatron's groups for a layout within torch's default process group, and seeds Megatron's random state.

    A collective of all ranks. `timeout_s` is the time limit of the groups' collectives, cut to whole minutes and at
    least one. Call once per process, or after Megatron's groups were destroyed.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=max(1, int(timeout_s / 60)),
    )
    model_parallel_cuda_manual_seed(0)  # nothing random runs in the model: dropout is off, weights are loaded


def transformer_config(
    hf: dict[str, Any], policy: PolicyConfig, parallel: ParallelDims, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """Returns megatron-core's configuration of the architecture in this layout. `policy.options` take precedence.
    Raises UserError if megatron-core refuses `policy.options`, an option contradicts the model, or the architecture is
    not supported. `dtype` is the type of the parameters; `device` decides the kind of layers for `policy.spec=auto`."""
    settings = architecture(hf).megatron_settings(hf)
    te = layer_spec(policy.spec, device.type) == "te"
    moe: dict[str, Any] = {}
    experts = bool(settings.transformer.get("num_moe_experts"))
    if experts:
        moe = dict(
            moe_grouped_gemm=te,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="none",  # `expert_balance` takes the loss over the whole mini-batch
        )
    ours = dict(
        **settings.transformer,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.tensor > 1,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        # With two stages the first one's layers fix the last one's; given both, megatron-core divides by no stages.
        num_layers_in_last_pipeline_stage=(
            None if parallel.pipeline == 2 and parallel.first_stage_layers else parallel.last_stage_layers
        ),
        context_parallel_size=parallel.context,
        cp_comm_type="a2a" if parallel.by_heads else None,  # None is the ring
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Weights are loaded, but megatron-core marks tensor-parallel parameters only where it initialises them, and
        # without the mark the gradient norm counts one rank's shard alone.
        perform_initialization=True,
        # Packed micro-batches differ in length, so stages send each other the shape.
        variable_seq_lengths=True,
        # With PP = 2 and virtual stages, batched point-to-point pairs messages wrongly and trains wrong without an
        # error: both neighbours are the same peer. Overlapped, unbatched messages are exact.
        overlap_p2p_comm=parallel.virtual_pipeline > 1,
        batch_p2p_comm=parallel.virtual_pipeline == 1,
        calculate_per_token_loss=True,  # the loss contains final weights: neither schedule nor DDP may rescale
        finalize_model_grads_func=_finalize,
        # megatron-core's own output layer needs apex for this fusion and cannot be built without.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        **moe,
        **speed.fields(policy, "te" if te else "local", experts),
        **(transformer_settings(policy.precision) if te else {}),
    )
    kind, needed = config_class(settings.transformer)
    _check_needed(needed, policy.options)
    return with_options(kind, ours | needed, policy.options, "policy.options")


def _check_needed(needed: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises UserError if an option of the user has another value than the model needs."""
    for name, value in needed.items():
        if options.get(name, value) != value:
            why = "megatron-core computes wrong positions of this model with another value"
            raise UserError(why, key=f"policy.options.{name}", value=options[name], fix=f"give {value}")


def with_options(make: Callable[..., T], ours: dict[str, Any], options: dict[str, Any], key: str) -> T:
    """Returns `make(**(ours | options))`, a configuration of megatron-core: the user's options replace `ours`.

    Args:
        make: Class of megatron-core.
        ours: The project's arguments.
        options: The user's arguments.
        key: Setting with the user's arguments, for errors.

    Raises:
        UserError: megatron-core refuses the options under `key`; the message includes the reason.
        AssertionError, ValueError, TypeError: megatron-core refuses `ours`, and `options` is empty.
    """
    try:
        return make(**(ours | options))
    except (AssertionError, ValueError, TypeError) as error:
        if not options:
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"megatron-core refuses it: {why}",
            key=key,
            value=shown(options),
            fix="change or remove the option named there",
        ) from error


def _finalize(model: Any, num_tokens: Tensor | None, **kwargs: Any) -> None:
    """Sums gradients over the ranks without dividing: the loss's weights already include the division by tokens."""
    finalize_model_grads(model, None, **kwargs)


def build_model(
    hf: dict[str, Any],
    policy: PolicyConfig,
    parallel: ParallelDims,
    dtype: torch.dtype,
    device: torch.device,
    *,
    head: HeadKind = "vocab",
) -> list[HiddenGPT]:
    """Returns this rank's model chunks on the device: one, or one per virtual stage. Weights are not loaded. Call after
    `join`.

    Args:
        hf: The model's config.json.
        policy: Settings of layers and precision.
        parallel: The layout.
        dtype: Dtype of the parameters.
        device: The rank's device.
        head: The output projection ("vocab"), or a critic's value head ("value").

    Raises:
        UserError: Transformer Engine or deep_ep is required by the settings but cannot be imported, the model cannot
            share prefixes as asked, or as in `transformer_config`.
    """
    arch = architecture(hf, head)
    spec = layer_spec(policy.spec, device.type)
    if spec == "te":
        require_transformer_engine()
    speed.prepare(policy)
    config = transformer_config(hf, policy, parallel, dtype, device)
    gpt = dict(arch.megatron_settings(hf).gpt)
    gpt["vocab_size"] = arch.padded_vocab(hf, parallel.tensor)
    decoder, pp = arch.describe(hf), parallel_state.get_pipeline_model_parallel_rank()
    if shared := shares_prefixes(policy, parallel.context):
        for block in decoder.parts:
            block.check_shared_prefixes("policy.share_prefixes")
    chunks = []
    for stage in range(parallel.virtual_pipeline):
        modules = layer_modules(decoder, parallel.stage_layers(decoder.layers, pp, stage))
        vp = stage if parallel.virtual_pipeline > 1 else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp)
        chunk = MODELS[head](
            config=config,
            transformer_layer_spec=decoder_spec(config, modules, spec, vp, shared_prefixes=shared),
            pre_process=first,
            post_process=last,
            parallel_output=True,
            vp_stage=vp,
            rotates=spec == "local" and not config.multi_latent_attention,
            **gpt,
        ).to(device)
        mark_experts(chunk)
        mark_down_projections(chunk)
        freeze_correction_biases(chunk)
        chunks.append(chunk)
    return chunks


MODELS: dict[HeadKind, type[HiddenGPT]] = {"vocab": HiddenGPT, "value": ValueGPT}
DOWN_PROJECTIONS = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
"""Suffixes of Megatron's names for the down-projections of latent attention."""


def mark_experts(chunk: torch.nn.Module) -> None:
    """Marks every expert weight and bias as held by no other rank of the tensor group, for the gradient norm and for
    sums of gradients. Changes the chunk in place; does nothing without experts.

    megatron-core 0.16 counts the gradient of an unmarked parameter only on the first rank of the *dense* tensor group.
    Transformer Engine's grouped linear layer sets no mark if megatron-core does the expert communication. So with
    tensor parallelism the norm would leave out most experts, and clipping would start too late (Megatron-LM #5916). No
    two ranks of an expert (tensor) group hold the same part of an expert; replicas in the expert data-parallel group
    split the gradient in the distributed optimizer.

    Under sequence parallelism megatron-core marks the bias of an expert's second projection like the bias of a dense
    layer, and sums the gradient over the tensor group, whose ranks hold other experts.
    """
    for name, parameter in chunk.named_parameters():
        if MEGATRON_EXPERTS in name:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.sequence_parallel = False  # type: ignore[attr-defined]


def mark_down_projections(chunk: torch.nn.Module) -> None:
    """Marks the down-projections of latent attention as held whole by every tensor rank, for the gradient norm. Changes
    the chunk in place; does nothing without latent attention.

    Transformer Engine marks every linear weight as cut over the tensor group, also a weight that all ranks hold whole.
    The norm would count the gradient of such a weight once per tensor rank, and clipping would start too early.
    """
    for name, parameter in chunk.named_parameters():
        if name.endswith(DOWN_PROJECTIONS):
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]


def freeze_correction_biases(chunk: torch.nn.Module) -> None:
    """Replaces the buffer of every router's correction bias by a frozen parameter, so that it is loaded, synchronised
    and saved like any other; `moe_router_bias_update_rate` 0 keeps megatron-core from changing it. Changes the chunk in
    place, before `wrap_ddp`."""
    for module in chunk.modules():
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            bias = module._buffers.pop("expert_bias")
            # It counts tokens for updates of the bias, and mistakes the shape of a padding mask.
            module._apply_expert_bias = _keep_expert_bias
            module.expert_bias = torch.nn.Parameter(bias.float(), requires_grad=False)


def _keep_expert_bias(*_: Any, **__: Any) -> None:
    """Replaces megatron-core's count of tokens, which nothing needs while the bias stays."""


def keep_in_float32(model: torch.nn.Module) -> None:
    """Converts the routers' correction biases, and the decay rates of gated delta nets, to float32 in place, which
    undoes the conversion by `Float16Module`. Lost digits do not return, so call this before weights are loaded."""
    for module in model.modules():
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            module.expert_bias.data = module.expert_bias.data.float()
        elif isinstance(module, PackedDeltaNet):
            module.A_log.data = module.A_log.data.float()


def wrap_ddp(
    chunks: list[HiddenGPT], overlap: bool, options: dict[str, Any] | None = None
) -> list[DistributedDataParallel]:
    """Returns the chunks wrapped for data parallelism, with the distributed optimizer's buffers; gradients accumulate
    in float32.

    Args:
        chunks: The rank's model chunks; bfloat16 models are also wrapped in `Float16Module`.
        overlap: Reduces gradients, bucket by bucket, during the last micro-batch's backward pass, and gathers the
            parameters of an optimizer step during the next forward pass. Code that reads parameters outside of a
            module's forward pass must call `finish_gather` first.
        options: `policy.ddp_options`; None: none.

    Raises:
        UserError: megatron-core refuses `options`.
    """
    config = chunks[0].config
    ours = dict(
        fp8_param_gather=config.fp8_param,
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    ddp = with_options(DistributedDataParallelConfig, ours, options or {}, "policy.ddp_options")
    modules: list[Any] = [Float16Module(config, c) if config.bf16 else c for c in chunks]
    for module in modules:
        keep_in_float32(module)
    wrapped = [DistributedDataParallel(config, ddp, m, disable_bucketing=i > 0) for i, m in enumerate(modules)]
    if overlap:
        # Without no_sync every micro-batch would reduce. Stages are not aligned with each other (`grad_sync_func`,
        # `param_sync_func`): each sends as soon as its data is ready.
        no_syncs = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
    return wrapped


def finish_gather(chunks: list[Any]) -> None:
    """Waits for the gather of parameters left to the next forward pass by an overlapping optimizer step. `chunks` are
    the rank's model chunks; chunks that are not data-parallel are skipped.

    A collective of the data-parallel ranks if a gather is pending, otherwise a no-op.
    """
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)


def gather_parameters(chunks: Iterable[Any]) -> None:
    """Gathers the parameters of data-parallel chunks (`wrap_ddp`) from the ranks that train them, and waits for the
    end. A collective of the data-parallel ranks; no other gather may be under way.

    Also creates the backward pass's copies of FP8 parameters. With overlapping gathers, megatron-core creates the
    copies only while waiting for a gather that was started without force.
    """
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
        if fp8 := [p for p in chunk.parameters() if is_float8tensor(p)]:
            post_all_gather_processing(fp8)


def head_weight(chunk: Any) -> Tensor:
    """Returns the head's weight on this rank of the last stage, not copied: [V/tp, H], or [1, H] for a value head.
    `chunk` is the model chunk with the head, wrapped or not.

    Waits for a pending gather of this parameter over the data-parallel ranks, because the head runs after the model's
    forward pass, outside of DDP's hooks.
    """
    weight = unwrap_gpt(chunk).head()
    if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
        chunk.param_to_bucket_group[weight].finish_param_sync(skip_next_bucket_dispatch=True)
    return weight


def unwrap_gpt(module: Any) -> HiddenGPT:
    """Returns the GPT model inside DDP and Float16Module; a GPT model itself is returned unchanged."""
    while not isinstance(module, HiddenGPT):
        module = module.module
    return module
