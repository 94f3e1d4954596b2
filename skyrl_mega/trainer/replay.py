"""Router replay as the driver sees it: whether every route that is needed is there, and what a step tells of them.

Legend: S samples, T tokens of all of them, M MoE layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from skyrl_mega.megatron.sequences import Sequences, ragged_arange
from skyrl_mega.models.routes import COLUMN, WrongRoutes
from skyrl_mega.trainer.batch import drawn

PREFIX = "replay_"
"""What the names of the ranks' sums begin with: `replay_<what>_<layer>`, by `router_replay.Count`."""


def check_routes(batch: Sequences) -> None:
    """Refuses a batch with a token that counts whose context is not routed: each token before it in its sample, in
    every layer. Nothing else needs a route: a sample's last token, what stands behind the policy's last word, and
    trajectories that do not count.

    Raises:
        WrongRoutes: The first token without a route, or that the engines gave none at all.
    """
    if COLUMN not in batch:
        raise WrongRoutes("policy.moe.replay = rollout: the engines gave no routes")
    routed_TM = (batch[COLUMN] > 0).all(-1)
    missing_T = _needed(batch) & ~routed_TM.all(-1)
    if missing_T.any():
        at = int(missing_T.nonzero()[0])
        sample = int(torch.searchsorted(batch.lengths.cumsum(0), at, right=True))
        raise WrongRoutes(
            f"router replay: sample {sample} of the step has no route at position {at - int(batch.starts[sample])} in "
            f"MoE layer {int((~routed_TM[at]).nonzero()[0])} (of {routed_TM.shape[1]}), and trains on what comes after"
        )


def _needed(batch: Sequences) -> Tensor:
    """bool [T]: tokens before the last one of their sample that counts, and that an engine drew."""
    counts = batch["mask"] != 0
    if "drawn" in batch:
        counts &= drawn(batch)
    position = ragged_arange(torch.zeros_like(batch.lengths), batch.lengths)
    sample_T = torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths)
    last_S = torch.full((len(batch.lengths),), -1).scatter_reduce(
        0, sample_T, torch.where(counts, position, -1), "amax", include_self=True
    )
    return position < last_S[sample_T]


def replay_metrics(updates: Sequence[Mapping[str, float]], compared: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`replay/…` of a step, from the sums of its optimizer steps; {} where nothing was replayed.

    A token counts in every layer; `route_mismatch` is the share of replayed choices that the policy itself would have
    made in another way.

    Args:
        updates: All of them.
        compared: Those that `route_mismatch` is of. An engine's choices are compared with the weights that drew the
            tokens, from which later optimizer steps have moved; of the policy's own this movement is all that there is
            to see.
    """
    total, of = _by_layer(updates), _by_layer(compared)
    if not total:
        return {}
    differs, replayed = of["differs"], of["replayed"]
    found = {
        "replay/replayed_fraction": sum(total["replayed"].values()) / max(sum(total["tokens"].values()), 1),
        "replay/route_mismatch": sum(differs.values()) / max(sum(replayed.values()), 1),
        "replay/mismatched": sum(total["wrong"].values()),
    }
    by_layer = {layer: differs[layer] / max(replayed[layer], 1) for layer in sorted(differs)}
    return found | {f"replay/route_mismatch_layer_{layer}": share for layer, share in by_layer.items()}


def _by_layer(updates: Sequence[Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """What was counted → layer → its sum over these optimizer steps."""
    total: dict[str, dict[int, float]] = {}
    for sums in updates:
        for name, value in sums.items():
            if name.startswith(PREFIX):
                what, layer = name.removeprefix(PREFIX).rsplit("_", 1)
                of = total.setdefault(what, {})
                of[int(layer)] = of.get(int(layer), 0.0) + value
    return total
