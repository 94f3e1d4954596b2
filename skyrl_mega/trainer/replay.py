"""Router replay from the driver's side: checks the completeness of routes and computes replay metrics.

Legend: S samples, T tokens in total, M MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from skyrl_mega.batch.samples import sampled_by_engine
from skyrl_mega.models.routes import COLUMN, REPLAY_POLICY, WrongRoutes
from skyrl_mega.trajectories.sequences import Sequences, ragged_arange

PREFIX = "replay_"
"""Prefix of the ranks' replay sums: `replay_<what>_<layer>`, by `router_replay.Count`."""


def check_routes(batch: Sequences) -> None:
    """Refuses a batch if the context of a counted token (with a weight in the loss) lacks routes: all earlier tokens of
    the sample need a route in every layer. No route is needed for a sample's last token, for tokens after the policy's
    last counted token, and in trajectories without counted tokens.

    Raises:
        WrongRoutes: Names the first token without a route, or says that the engines returned no routes at all.
    """
    if COLUMN not in batch:
        raise WrongRoutes("policy.moe.replay = rollout: the engines returned no expert routes; give policy or off")
    routed_TM = (batch[COLUMN] > 0).all(-1)
    missing_T = _needed(batch) & ~routed_TM.all(-1)
    if missing_T.any():
        at = int(missing_T.nonzero()[0])
        sample = int(torch.searchsorted(batch.lengths.cumsum(0), at, right=True))
        raise WrongRoutes(
            f"router replay: sample {sample} of the step has no route at position {at - int(batch.starts[sample])} in "
            f"MoE layer {int((~routed_TM[at]).nonzero()[0])} (of {routed_TM.shape[1]}), though later tokens are "
            f"trained on; {REPLAY_POLICY}"
        )


def _needed(batch: Sequences) -> Tensor:
    """Returns bool [T]: tokens before the last counted, engine-sampled token of the same sample."""
    counts = batch["mask"] != 0
    if "drawn" in batch:
        counts &= sampled_by_engine(batch)
    position = ragged_arange(torch.zeros_like(batch.lengths), batch.lengths)
    sample_T = torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths)
    last_S = torch.full((len(batch.lengths),), -1).scatter_reduce(
        0, sample_T, torch.where(counts, position, -1), "amax", include_self=True
    )
    return position < last_S[sample_T]


def replay_metrics(updates: Sequence[Mapping[str, float]], compared: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics `replay/…` of a step from the sums of the optimizer steps; {} without replay.

    Each token counts once per layer. `replayed_fraction` is the share of replayed choices among all, `route_mismatch`
    the share of replayed choices that the policy itself would make differently, and `mismatched` the number of choices
    of other experts than required. `route_mismatch_layer_<n>` is the share of a layer.

    Args:
        updates: Sums of all optimizer steps.
        compared: Sums for `route_mismatch`. An engine's choices are compared only under the sampling weights, before
            optimizer steps change the router. For the policy's own choices exactly this change is measured.
    """
    total, of_compared = _by_layer(updates), _by_layer(compared)
    if not total:
        return {}
    differs, replayed = of_compared["differs"], of_compared["replayed"]
    metrics = {
        "replay/replayed_fraction": sum(total["replayed"].values()) / max(sum(total["tokens"].values()), 1),
        "replay/route_mismatch": sum(differs.values()) / max(sum(replayed.values()), 1),
        "replay/mismatched": sum(total["wrong"].values()),
    }
    by_layer = {layer: differs[layer] / max(replayed[layer], 1) for layer in sorted(differs)}
    return metrics | {f"replay/route_mismatch_layer_{layer}": share for layer, share in by_layer.items()}


def _by_layer(updates: Sequence[Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """Returns count name → layer → sum over these optimizer steps."""
    total: dict[str, dict[int, float]] = {}
    for sums in updates:
        for name, value in sums.items():
            if name.startswith(PREFIX):
                what, layer = name.removeprefix(PREFIX).rsplit("_", 1)
                by_layer = total.setdefault(what, {})
                by_layer[int(layer)] = by_layer.get(int(layer), 0.0) + value
    return total
