"""SmolLM2, a trained model, expressed exactly as a mixture of experts: SmolLM2's own log-probs, and an RL step."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_mega.cli.weights_check import opened
from skyrl_mega.models.registry import architecture
from skyrl_mega.telemetry.metrics import read
from skyrl_mega.trainer import loop
from skyrl_mega.trajectories.sequences import Sequences
from tests.families import engines
from tests.families.models import CORRECTION_BIAS, read_hf
from tests.megatron.layouts import policy_logprobs
from tests.megatron.test_against_transformers import expected_logprobs
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

EXPERTS = 3
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralConfig",
        {"intermediate_size": 1536, "num_local_experts": EXPERTS, "sliding_window": None, "head_dim": 64},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "intermediate_size": 1536,
            "moe_intermediate_size": 1536,
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "attention_bias": False,
            "use_qk_norm": False,
            "head_dim": 64,
            "routed_scaling_factor": 1.0,
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "intermediate_size": 1536,
            "moe_intermediate_size": 1536,
            "shared_expert_intermediate_size": 64,
            "num_experts": EXPERTS,
            "norm_topk_prob": True,
        },
    ),
}
MATRICES = {"gate_proj": "gate_proj", "w1": "gate_proj", "up_proj": "up_proj", "w3": "up_proj"} | {
    "down_proj": "down_proj",
    "w2": "down_proj",
}
"""Matrix of an expert → matrix of SmolLM2's feed-forward part."""
ROOT = Path(__file__).parents[2]
GSM8K = [
    "run.steps=1",
    "policy.layout.pipeline=2",  # 3 key/value heads and 3 experts cannot be halved
    "algorithm.kl.coefficient=0",  # a reference would need memory for another model
    f"environment.classes.gsm8k={ROOT / 'tests' / 'recipes' / 'partial.py'}:Partial",  # rewards differ within a group
    "data.prompts_per_step=2",
    "rollout.sampling.max_tokens=24",
    "rollout.kv_cache_gib=0.1",
    "evaluation.every=0",
    "evaluation.before=false",
]
"""Settings beyond configs/gsm8k_cpu.yaml: a step with 2 prompts of 4 samples."""
TRAINED = ("self_attn", "routed_experts", "norm", "embed_tokens")
"""Parts of the names of parameters with a gradient. Equal experts give routers none, a zero `down_proj` the rest of a
shared expert."""


def express(kind: str, smollm2: Path, path: Path) -> Path:
    """Writes SmolLM2 as a model of another family: equal experts, a shared expert without effect, a random router.

    Weights of the chosen experts sum to 1, so that equal experts compute the dense feed-forward part.
    """
    import transformers

    source = json.loads((smollm2 / "config.json").read_text())
    name, sizes = KINDS[kind]
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    same += ("tie_word_embeddings", "rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_id")
    rope = {"rope_type": "default", "rope_theta": source["rope_parameters"]["rope_theta"]}
    rope |= {"partial_rotary_factor": 1.0} if "partial_rotary_factor" in sizes else {}
    shared = {key: source[key] for key in same} | {"num_experts_per_tok": 2, "rope_parameters": rope}
    config = getattr(transformers, name)(**shared | sizes)
    hf = config.to_dict() | {"architectures": [name.replace("Config", "ForCausalLM")]}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf))
    weights, generator = load_file(smollm2 / "model.safetensors"), torch.Generator().manual_seed(0)
    tensors = {
        tensor: expressed(tensor, shape, weights, generator) for tensor, shape in architecture(hf).tensors(hf).items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def expressed(name: str, shape: tuple[int, ...], weights: dict[str, Tensor], generator: torch.Generator) -> Tensor:
    """Returns a tensor of the mixture of experts."""
    if name in weights:
        return weights[name]
    if name == "lm_head.weight":
        return weights["model.embed_tokens.weight"].clone()
    layer, matrix = ".".join(name.split(".")[:3]), name.split(".")[-2]
    if ".experts." in name:
        return weights[f"{layer}.mlp.{MATRICES[matrix]}.weight"].clone()
    if name.endswith("bias") or ("shared" in name and matrix == "down_proj"):
        return torch.zeros(shape)
    return 0.05 * torch.randn(shape, generator=generator)


def loaded(rank: int, address: str, path: Path, smollm2: Path) -> float:
    """Returns the difference of an engine with the model from SmolLM2 in transformers."""
    return engines.difference(smollm2, engines.loaded_answers(path))


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_smollm2s(kind: str, smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = ["The capital of France is Paris, and the capital of Italy is", "def f(x):\n    return x + 1\n"]
    batch = Sequences.of([tokenizer.encode(text) for text in texts])
    path = express(kind, smollm2, tmp_path / kind)
    expected = expected_logprobs(smollm2, batch)
    assert expected[1:].mean() > -4  # the model is trained
    np.testing.assert_allclose(policy_logprobs(path, batch), expected, atol=1e-4)
    sharded = policy_logprobs(path, batch, ranks=2, expert=1, pipeline=2)
    np.testing.assert_allclose(sharded, expected, atol=1e-4)
    [difference] = run_ranks(1, loaded, path, smollm2)
    assert difference < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_it_takes_a_gsm8k_step(kind: str, real_data: Path, smollm2: Path, tmp_path: Path) -> None:
    """Takes an RL step; the engine then has the changed weights, bit by bit."""
    path = express(kind, smollm2, tmp_path / kind)
    for file in smollm2.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, path)
    data = tmp_path / "data"
    settings = [
        *GSM8K,
        f"model.path={path}",
        f"data.folder={data}",
        f"data.prepare=gsm8k --output {data} --source {real_data}/data/gsm8k --limit 40 --shots 1",
    ]
    with opened(str(ROOT / "configs" / "gsm8k_cpu.yaml"), settings, as_json=True) as run:
        loop.train(run)
        [step] = read(run.folder / "metrics.jsonl")
        [after] = run.sync.check()
        run.policy.load(path)
        [source] = run.sync.check()
    assert step["reward/std"] > 0 and step["policy/advantage_fraction"] > 0
    assert math.isfinite(step["policy/loss"]) and step["policy/grad_norm"] > 0
    assert 0 < step["mismatch/logprob_abs_max"] < 1e-3
    names = architecture(read_hf(path)).engine_shard(read_hf(path), 1, 0).params.keys()
    assert after.parameters == len(names) and after.different == []
    trained = {name for name in names if any(part in name for part in TRAINED)}
    assert trained <= {*source.different}
    assert not [name for name in source.different if name.endswith(CORRECTION_BIAS)]
