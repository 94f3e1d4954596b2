"""Tiny random models of every family, made by transformers, with the reference log-probs and gradients.

A family joins every sweep with one entry in `MODELS`. Norms, biases and correction biases are uneven and distributions
are sharp, so that a wrong, missing or misplaced tensor shows. Weights are float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_mega.models.config_json import Hf
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.routes import COLUMN, RouteShape
from skyrl_mega.trajectories.sequences import Column, Sequences

VOCABULARY = 105
"""Size of the vocabulary: fits the tokenizer `characters`, and is odd, so that tensor parallelism pads it."""
SEEDS = (0, 1)
"""Seeds of the two models of each family; a sync replaces the weights of one by the other's."""
CORRECTION_BIAS = "e_score_correction_bias"
"""Name of a router's correction bias in transformers and on disk: a buffer without a gradient."""
DECAY = "A_log"
"""Name of the decay rates of a gated delta net, which stay in float32 like correction biases."""

UNROUNDED = 1 + 2**-9
"""Value added to all correction biases, which changes no choice: bfloat16 would round the first one to 1."""


@dataclass(frozen=True)
class TinyModel:
    """A tiny model of a family."""

    config: str
    """Name of the configuration class in transformers."""
    sizes: dict[str, Any]
    """Arguments of the configuration class, beyond `COMMON`."""
    hub: dict[str, Any] = field(default_factory=dict)
    """Keys in the config.json of hub files that transformers does not write."""
    float32_engine: bool = True
    """False if vLLM's kernels on a CPU compute this family in bfloat16 only."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.sizes["num_hidden_layers"])


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}

DENSE_FIRST: dict[str, Any] = {
    "num_hidden_layers": 2,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
"""A dense layer before a layer with routed and shared experts."""
GLM: dict[str, Any] = DENSE_FIRST | {
    "num_attention_heads": 8,
    "head_dim": 32,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
LATENT: dict[str, Any] = DENSE_FIRST | {
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,  # the kernel of vLLM's CPU engine has no other widths of the latent vector and rotary part
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 48,
    "rms_norm_eps": 1e-6,  # transformers has no other for the norms of latent vectors
}
"""Multi-head latent attention, with queries and keys wider than values."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
SIGMOID_KEYS = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

DELTA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,  # the kernel of vLLM's CPU engine has no other width
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "num_experts": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
"""Gated delta nets with heads that engines can compute."""

MODELS: dict[str, TinyModel] = {
    "qwen3_moe": TinyModel(
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 32,
            "intermediate_size": 192,
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "qwen2_moe": TinyModel(
        "Qwen2MoeConfig",
        {
            "num_hidden_layers": 2,
            "intermediate_size": 192,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
            "num_experts": 8,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
        },
    ),
    "mixtral": TinyModel(
        "MixtralConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 32,
            "intermediate_size": 64,
            "num_local_experts": 8,
            "sliding_window": None,
        },
    ),
    "olmoe": TinyModel(
        "OlmoeConfig",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "intermediate_size": 64,
            "num_experts": 8,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
        },
    ),
    "glm4_moe": TinyModel("Glm4MoeConfig", GLM),
    "glm4_moe, Air": TinyModel("Glm4MoeConfig", GLM | {"use_qk_norm": False, "routed_scaling_factor": 1.0}),
    "qwen3_next": TinyModel(
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 24,
            "intermediate_size": 192,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
            "num_experts": 8,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        },
        float32_engine=False,
    ),
    "qwen3_5_moe_text": TinyModel("Qwen3_5MoeTextConfig", DELTA, float32_engine=False),
    "minimax_m2": TinyModel(
        "MiniMaxM2Config",
        {
            "num_hidden_layers": 2,
            "head_dim": 64,
            "intermediate_size": 64,
            "num_local_experts": 8,
            "rotary_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
        hub={"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 32},
    ),
    "gpt_oss": TinyModel(
        "GptOssConfig",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "head_dim": 32,
            "intermediate_size": 64,
            "num_local_experts": 8,
            "sliding_window": 6,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "deepseek_v3": TinyModel(
        "DeepseekV3Config",
        LATENT | {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
        hub=SIGMOID_KEYS,
    ),
    "deepseek_v3, Moonlight": TinyModel("DeepseekV3Config", LATENT | {"q_lora_rank": None}, hub=SIGMOID_KEYS),
    "deepseek_v2": TinyModel(
        "DeepseekV2Config",
        LATENT
        | {"q_lora_rank": None, "n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.0}
        | {"rope_parameters": YARN},
    ),
    "glm4_moe_lite": TinyModel(
        "Glm4MoeLiteConfig",
        {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
        hub={"first_k_dense_replace": 1},
    ),
}
"""The models of all sweeps; several of a family if its variants differ in their blocks."""
IN_FLOAT32_ENGINES = [name for name, tiny in MODELS.items() if tiny.float32_engine]
"""The models of the sweeps over engines in float32."""
DELTA_ENGINES: dict[str, TinyModel] = {
    "qwen3_next, engine": TinyModel("Qwen3NextConfig", DELTA | {"intermediate_size": 192, "norm_topk_prob": True}),
    "qwen3_5_moe_text": MODELS["qwen3_5_moe_text"],
}
"""The models with gated delta nets in engines, which compute them in bfloat16 only on a CPU."""


def make(name: str, path: Path, seed: int) -> Path:
    """Writes a model as a Hugging Face directory and returns the directory."""
    import transformers

    tiny = (MODELS | DELTA_ENGINES)[name]
    config = getattr(transformers, tiny.config)(**COMMON | tiny.sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill(model, seed)
    model.save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | tiny.hub, indent=1))
    return path


@torch.no_grad()
def _fill(model: Any, seed: int) -> None:
    """Fills every parameter and every saved buffer with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in saved:
            continue  # rotary frequencies
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(CORRECTION_BIAS):
            tensor.copy_(0.1 * noise + UNROUNDED)
            tensor[0] = UNROUNDED
        elif name.endswith(DECAY):
            tensor.copy_(0.5 * noise - 2)  # the state keeps most of itself from token to token
        elif name.endswith("gate_up_proj_bias"):
            tensor.copy_(3 * noise)  # beyond the limits of the activation
        elif name.endswith((".bias", "proj_bias")):
            tensor.copy_(0.2 * noise)
        elif tensor.dim() == 1:
            tensor.copy_(1 + 0.2 * noise)
        elif name.endswith("embed_tokens.weight"):
            tensor.copy_(0.5 * noise)
        elif name.endswith("gate.weight"):
            tensor.copy_(0.3 * noise)
        else:
            tensor.copy_(1.2 / math.sqrt(tensor.shape[-1]) * noise)


def read_hf(path: Path) -> dict[str, Any]:
    """Returns the config.json of a directory."""
    hf: dict[str, Any] = json.loads((path / "config.json").read_text())
    return hf


def transformers_model(path: Path) -> Any:
    """Returns a directory's model as transformers computes it, in float32 and without fused kernels."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    model.get_input_embeddings().padding_idx = None  # the padding row would get no gradient
    return model.eval()


def some_batch(seed: int = 0) -> Sequences:
    """Returns random sequences of random lengths, with random weights that sum to 1."""
    rng = np.random.default_rng(seed)
    batch = Sequences.of([rng.integers(3, VOCABULARY, n) for n in (17, 5, 24, 11, 2)])
    weights = 0.1 + rng.random(len(batch.tokens)).astype(np.float32)
    weights[batch.starts.numpy()] = 0
    batch["weights"] = torch.from_numpy(weights / weights.sum())
    return batch


def routed_batch(hf: Hf) -> Sequences:
    """Returns `some_batch` with random routes; the last token of each sequence and one whole sequence have none."""
    batch, shape = some_batch(), RouteShape.of(architecture(hf).describe(hf))
    assert shape is not None
    scores = np.random.default_rng(1).random((len(batch.tokens), len(shape.layers), shape.experts))
    routes = (scores.argsort(-1)[..., : shape.per_token] + 1).astype(shape.dtype)
    ends = batch.lengths.cumsum(0).numpy()
    routes[ends - 1] = 0
    routes[ends[0] : ends[1]] = 0
    batch.add(COLUMN, Column(torch.from_numpy(routes), "input"))
    return batch


@dataclass(frozen=True)
class Reference:
    """Results of transformers for `some_batch`."""

    logprobs: np.ndarray
    """[T]: log-prob of every token given the previous tokens; 0 for first tokens."""
    gradients: dict[str, np.ndarray]
    """Gradient of the supervised loss by Hugging Face tensor name, with the axes of `Architecture.tensors`, without
    correction biases."""
    replayed: np.ndarray
    """[T]: log-probs with the routes of `routed_batch`."""


def reference(path: Path) -> Reference:
    """Returns the results of transformers for the model of a directory.

    Gradients get their names on disk from transformers: `save_pretrained` splits fused experts in gradients as in
    weights.
    """
    model, batch = transformers_model(path), some_batch()
    logprobs = [row.detach() for row in _logprobs(model, batch, backward=True)]
    replayed = _joined(_replayed_rows(model, routed_batch(read_hf(path))))
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.data = gradient
        parameter.grad = None
    model.save_pretrained(path / "gradients")
    saved = load_file(path / "gradients" / "model.safetensors")
    arch, hf = architecture(read_hf(path)), read_hf(path)
    shapes, forms = arch.tensors(hf), arch.describe(hf).disk_forms
    gradients = {
        name: (forms[name].from_disk(tensor, shapes[name]) if name in forms else tensor).contiguous().numpy()
        for name, tensor in saved.items()
        if not name.endswith(CORRECTION_BIAS)
    }
    return Reference(_joined(logprobs), gradients, replayed)


def _logprobs(model: Any, batch: Sequences, backward: bool = False) -> Iterator[Tensor]:
    """Yields the log-probs of each sequence's tokens; `backward` adds the gradient of the supervised loss."""
    for start, length in zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True):
        tokens = batch.tokens[start : start + length].long()
        logits = model(tokens[None], use_cache=False).logits[0].float()
        row = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        if backward:
            (-(batch["weights"][start + 1 : start + length] * row).sum()).backward()
        yield torch.cat([row.new_zeros(1), row])


def _joined(rows: list[Tensor]) -> np.ndarray:
    return torch.cat(rows).numpy()


@torch.no_grad()
def _replayed_rows(model: Any, batch: Sequences) -> list[Tensor]:
    """Returns the log-probs of each sequence if the routers follow the batch's routes."""
    rows: list[Tensor] = []
    for index in range(len(batch)):
        sequence = batch.take([index])
        with _forced(model, sequence[COLUMN].long()):
            rows += _logprobs(model, sequence)
    return rows


@contextmanager
def _forced(model: Any, routes: Tensor) -> Iterator[None]:
    """Makes the routers choose the routes [T, M, K] inside the context; a token without a route chooses itself.

    Only the choice is replaced, the last `torch.topk` of each router in transformers; the weights stay the router's.
    """
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    assert len(routers) == routes.shape[1]
    with ExitStack() as stack:
        for layer, router in enumerate(routers):
            stack.enter_context(mock.patch.object(router, "forward", _following(router, routes[:, layer])))
        yield


def _following(router: Any, routes: Tensor) -> Callable[..., Any]:
    """Returns the forward function of a router that chooses the routes [T, K]."""
    forward, topk, experts = router.forward, torch.topk, router.weight.shape[0]

    def choose(scores: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor]:
        values, chosen = topk(scores, k, **options)
        if scores.shape[-1] != experts:  # the choice of groups
            return values, chosen
        chosen = torch.where(routes > 0, routes - 1, chosen)
        return scores.gather(-1, chosen), chosen

    def route(*arguments: Any) -> Any:
        with mock.patch.object(torch, "topk", choose):
            return forward(*arguments)

    return route


def write_reference(result: Reference, path: Path) -> None:
    """Writes a reference to a file."""
    tensors = {f"gradient.{name}": torch.from_numpy(values) for name, values in result.gradients.items()}
    tensors |= {name: torch.from_numpy(getattr(result, name)) for name in ("logprobs", "replayed")}
    save_file(tensors, path)


def read_reference(path: Path) -> Reference:
    """Reads a reference from a file."""
    tensors = {name: tensor.numpy() for name, tensor in load_file(path).items()}
    gradients = {name.removeprefix("gradient."): t for name, t in tensors.items() if name.startswith("gradient.")}
    return Reference(tensors["logprobs"], gradients, tensors["replayed"])


def in_bfloat16(source: Path, path: Path) -> None:
    """Writes a model in bfloat16 as on the hub: correction biases and decay rates stay in float32."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(read_hf(source) | {"dtype": "bfloat16"}))
    tensors = {
        name: tensor if name.endswith((CORRECTION_BIAS, DECAY)) else tensor.bfloat16()
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def make_all(rank: int, address: str, folder: Path) -> None:
    """Writes both models of every entry to `folder`/NAME-SEED, also in bfloat16, with a reference of the first model.

    Runs in a rank, where transformers is imported already.
    """
    torch.set_num_threads(1)
    for name in MODELS:
        for seed in SEEDS:
            path = make(name, folder / f"{name}-{seed}", seed)
            in_bfloat16(path, folder / f"{name}-{seed}-bfloat16")
        write_reference(reference(folder / f"{name}-0"), folder / f"{name}.reference")
