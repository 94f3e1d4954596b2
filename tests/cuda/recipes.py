"""Description of Transformer Engine's classes for each `policy.precision`, as JSON; a program for a separate process.

The program reads a JSON list of `PrecisionConfig` fields from standard input and describes a rank's model for each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

HF: dict[str, Any] = dict(layers=4, hidden=128, heads=4, kv_heads=2, head_dim=128, experts=4, expert_ffn=256)


def describe(precision: dict[str, Any]) -> dict[str, Any]:
    """Returns a description of the model of a rank at TP2 EP2."""
    import torch
    from megatron.core import fp8_utils
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    from skyrl_mega.config.schema import BuildConfig, PolicyConfig, PrecisionConfig
    from skyrl_mega.megatron import model as build
    from skyrl_mega.models.tiny import hf_config
    from skyrl_mega.parallel.dims import ParallelDims
    from tests.cuda.ranks import fake_rank

    parallel = ParallelDims(2, tensor=2, expert=2)
    policy = PolicyConfig(spec="te", precision=PrecisionConfig(**precision))
    with fake_rank(0, parallel):
        hf = hf_config(BuildConfig(**HF))
        (chunk,) = build.build_model(hf, policy, parallel, torch.bfloat16, torch.device("cpu"))
        contexts = [type(fp8_utils.get_fp8_context(chunk.config, layer)).__name__ for layer in range(HF["layers"])]
        recipe = fp8_utils.get_fp8_recipe(chunk.config)
    engine = [
        name
        for name, module in chunk.named_modules()
        if isinstance(module, TransformerEngineBaseModule) and not name.endswith("core_attention")
    ]
    return {
        "copies": all(hasattr(module, "_fp8_workspaces") for name, module in chunk.named_modules() if name in engine),
        "recipe": type(recipe).__name__,
        "format": recipe.fp8_format.name,
        "powers": [
            getattr(recipe, of).power_2_scale
            for of in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
            if hasattr(recipe, of)
        ],
        "fp8": [context != "nullcontext" for context in contexts],
        "linear": sorted({name.rpartition(".")[2] for name in engine}),
        "attention": recipe.fp8_dpa or recipe.fp8_mha,
        "padded": sorted({name.rpartition(".")[2] for name, _ in chunk.named_modules() if "quantization" in name}),
        "routed_padding": chunk.config.moe_router_padding_for_quantization,
        "types": sorted({str(p.dtype) for p in chunk.parameters()}),
    }


def main() -> None:
    """Writes the answers to standard output, on a marked line."""
    from tests.cuda import te

    te.install()
    from skyrl_mega.megatron import cpu

    cpu.stand_in()
    precisions = json.load(sys.stdin)
    answers = [describe(precision) for precision in precisions]
    print("\nanswers " + json.dumps(answers))


if __name__ == "__main__":
    main()
