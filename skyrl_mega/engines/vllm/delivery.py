"""Comparison of a vLLM worker's load-time parameters with the shard that updates deliver.

Engines start with random weights. Without the comparison, a parameter that no update delivers would keep them, unseen:
a check of the weights in place compares delivered parameters only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from skyrl_mega.engines.vllm.params import LoadTimeParameters, unpadded
from skyrl_mega.parallel.box import Shard
from skyrl_mega.weights.fp8.format import SUFFIX

SHOWN = 8
"""Entries of a list in an error; the number of further entries follows."""


def check(parameters: LoadTimeParameters, shard: Shard) -> None:
    """Raises an error unless updates fill all parameters of a worker's model. Changes nothing.

    Not compared are block scales of delivered weights, which an update needs or makes (`LoadTimeParameters.close`),
    parameters that are zero with any weights, and parameters tied to others or derived from others.

    Args:
        parameters: The parameters of the model.
        shard: The worker's shard, without scales.

    Raises:
        RuntimeError: A parameter is in one of the two only, or has another shape; names the parameters, at most `SHOWN`
            of each kind.
    """
    shapes = _shapes(parameters)
    zeros = {name for layer in parameters.layers for name in layer.zeros()}
    scales = {name for name in shapes if name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in shard.params}
    missing = sorted(shapes.keys() - shard.params.keys() - zeros - scales)
    unlike = [
        f"{name} {shard.params[name]} (vLLM: {shapes.get(name, 'none')})"
        for name in sorted(shard.params)
        if name not in shapes or not shard.holds(name, shapes[name])
    ]
    if missing or unlike:
        raise RuntimeError(
            "the model in vLLM is not the policy's: parameters that no update brings, which would stay random: "
            f"{_listed(missing)}; parameters of updates with another shape in vLLM: {_listed(unlike)}; give a "
            "config.json and rollout.options with which vLLM builds the same model"
        )


def _shapes(parameters: LoadTimeParameters) -> dict[str, tuple[int, ...]]:
    """Returns name → shape at load time, without padding of experts."""
    shapes = {}
    for layer in parameters.layers:
        metas = get_layerwise_info(layer.module).restore_metadata[0]
        for name, local_name in layer.names.items():
            loaded = metas.get(local_name, layer.module._parameters.get(local_name))
            assert loaded is not None
            part = unpadded(layer.module, local_name, torch.empty(loaded.shape, device="meta"))
            shapes[name] = tuple((part.flatten(1, 2) if part.dim() > loaded.dim() else part).shape)
    return shapes


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else "none"
