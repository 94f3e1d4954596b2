"""Router replay: a policy's routers repeat the expert choices made earlier for the same tokens, by the engine or
policy.

A MoE engine and a MoE policy with equal weights choose different experts for some tokens because of different rounding.
The log-probs of those tokens then differ by more than rounding. Rollout routing replay (R3, arXiv:2510.11370, section
3) gives the engine's choices to every forward pass of the policy. Routing replay (R2, arXiv:2507.18071, section 5.3)
gives the choices of the pass for old log-probs to the update. Only the choice is replayed: probabilities are the
softmax of the policy's own logits over the chosen experts, so the router still learns. Tokens without a route are
routed by the policy itself.

Routes travel with the packed row given to every layer. So a layer recomputed in the backward pass replays the routes of
the right micro-batch, no matter how far the schedule is. A router recomputed without its layer gets no row, and all of
its tokens count as wrong.

The routers' outputs are compared with the routes before packing: for each token by position in the micro-batch, for
each layer by the layer's own number. Every pass ends with a sum over all ranks, and a single difference ends the run.

Legend: L tokens seen by a rank's routers, T tokens of a micro-batch, M MoE layers of the model, K experts of a token, E
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from skyrl_mega.megatron.packing import MicroBatch, PackedRow, RowRoutes
from skyrl_mega.models.routes import COLUMN, REPLAY_OFF, RouteShape, WrongRoutes
from skyrl_mega.trajectories.sequences import Column, Sequences

TopK = Callable[..., tuple[Tensor, Tensor]]
"""megatron-core's own choice: (scores [L, E], K, groups, …) → scores and indices of the chosen experts, [L, K] each."""


class Count(NamedTuple):
    """Counters of a MoE layer in a pass, in tokens."""

    tokens: int
    """Tokens seen by the router, without padding."""
    replayed: int
    """Tokens with replayed experts."""
    differs: int
    """Replayed tokens with another set of experts in the policy's own choice."""
    wrong: int
    """Tokens sent to experts other than required."""


class RouterReplay:
    """Replay, recording and checking of the choices of a rank's routers, by hooks on the chunks' layers.

    Args:
        chunks: The rank's model chunks, before wrapping.
        shape: The shape of the model's routes.
        tensor: Tensor-parallel size; each rank's routers see a part of the row.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], shape: RouteShape, tensor: int) -> None:
        self.shape, self.tensor = shape, tensor
        self.dtype = torch.from_numpy(shape.none(0)).dtype
        self.off = self.recording = self.active = False
        self.rows: list[RowRoutes | None] = [None] * len(shape.layers)
        """For each layer, the routes of the row under computation."""
        layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TransformerLayer)]
        for layer in layers:
            router = getattr(layer.mlp, "router", None)
            if isinstance(router, TopKRouter):
                router.router_replay = _ReplayHook(self, self._moe_index(router))
                layer.register_forward_pre_hook(partial(self._enter, self._moe_index(layer)), with_kwargs=True)
                layer.register_forward_hook(partial(self._leave, self._moe_index(layer)))
                router.register_forward_hook(partial(self._check_output, self._moe_index(layer)))

    def _moe_index(self, module: Any) -> int:
        """Returns the index of a layer or router among the MoE layers; megatron-core numbers all layers from 1."""
        return self.shape.layers.index(module.layer_number - 1)

    @contextmanager
    def mode(self, *, off: bool = False, recording: bool = False) -> Iterator[None]:
        """Sets the mode of forward passes inside the context. Outside of the context, passes replay.

        Args:
            off: True to ignore routes: the routers choose.
            recording: True to let the routers choose, and to keep the choices as routes (see `end`). Ignored with
                `off`.
        """
        self.off, self.recording = off, recording
        try:
            yield
        finally:
            self.off = self.recording = False

    # ---- before and after a pass -----------------------------------------------------------------------------------

    def begin(self, micros: Sequence[Sequences], device: torch.device) -> None:
        """Starts a pass over micro-batches and resets the counters. A collective of all ranks, unless off or recording.

        The pass replays if a micro-batch of any rank has routes, except in mode `off`. A rank's own micro-batches may
        be empty, or hold only trajectories that failed before the first answer.
        """
        self.active = not self.off and self.recording
        if not self.off and not self.recording:
            with_routes = torch.tensor(sum(COLUMN in micro for micro in micros), device=device)
            dist.all_reduce(with_routes)
            self.active = bool(with_routes)
        self.counts = torch.zeros(len(self.shape.layers), len(Count._fields), dtype=torch.int64, device=device)
        self.first = torch.full((len(self.shape.layers), 1 + self.shape.per_token + self.shape.experts), -1).to(device)
        """[M, 1 + K + E]: the first wrong token of each layer: position, expected route, and experts used."""

    def prepare(self, batch: Sequences, micro: MicroBatch) -> None:
        """Moves the routes for this rank's routers from a packed micro-batch's columns into its row; without the column
        the row gets empty routes. If the pass neither replays nor records, only removes the column.

        Args:
            batch: The micro-batch before packing.
            micro: The packed micro-batch, changed in place.
        """
        packed = micro.columns.pop(COLUMN, None)
        if not self.active:
            return
        none = torch.zeros(len(micro.read), *self.shape.none(0).shape[1:], dtype=self.dtype)
        routes = none if packed is None or self.recording else packed
        expected = routes.clone()
        if packed is not None and not self.recording:
            predicts = micro.source >= 0  # looks up the same tokens independently of the packed column
            expected[predicts] = batch[COLUMN][micro.source[predicts] - 1]
        assert micro.row.position_L is not None
        micro.row.routes = RowRoutes(
            routes=self._local_share(routes),
            expected=self._local_share(expected),
            read=self._local_share(micro.read),
            position=self._local_share(micro.row.position_L),
            recorded=self._local_share(none).clone() if self.recording else None,
        )

    def _local_share(self, values: Tensor) -> Tensor:
        """Returns the part of a row seen by this rank's routers: an equal share under sequence parallelism."""
        return values.chunk(self.tensor)[mpu.get_tensor_model_parallel_rank()] if self.tensor > 1 else values

    def end(self, micros: Sequence[Sequences], packed: Sequence[MicroBatch]) -> None:
        """Ends a pass and adds recorded routes to the micro-batches as a column, in place. A collective of all ranks;
        does nothing if the pass neither replays nor records.

        Args:
            micros: The micro-batches of the pass, before packing.
            packed: The same after packing and `prepare`.

        Raises:
            WrongRoutes: A token was sent to experts other than required.
        """
        if not self.active:
            return
        for micro, row in zip(micros, (p.row.routes for p in packed), strict=True):
            if row is not None and row.recorded is not None:
                is_token = row.read >= 0
                routes = torch.zeros(len(micro.tokens), *row.recorded.shape[1:], dtype=self.dtype)
                routes[row.read[is_token].cpu()] = row.recorded[is_token].cpu()
                micro.add(COLUMN, Column(routes, "input"))
        dist.all_reduce(self.counts)
        if int(self.counts[:, Count._fields.index("wrong")].sum()):
            raise WrongRoutes(self._error_message())

    def metrics(self) -> dict[str, float]:
        """Returns the counters of the latest pass in tokens, summed over all ranks: for each MoE layer
        `replay_tokens_<layer>`, `replay_replayed_<layer>`, `replay_differs_<layer>` and `replay_wrong_<layer>`
        (`Count`). {} if the pass neither replayed nor recorded. Call after `end`."""
        if not self.active:
            return {}
        counts = self.counts.tolist()
        return {
            f"replay_{name}_{layer}": float(count)
            for layer, row in zip(self.shape.layers, counts, strict=True)
            for name, count in zip(Count._fields, row, strict=True)
        }

    def _error_message(self) -> str:
        """Returns an error message about the first wrong token, gathered from all ranks. Called only after an error."""
        per_rank: list[Any] = [None] * dist.get_world_size()
        local = [(place, row) for place, row in enumerate(self.first.tolist()) if row[0] >= 0]
        dist.all_gather_object(per_rank, local)
        wrong = self.counts[:, Count._fields.index("wrong")].tolist()
        if not any(per_rank):
            layers = [layer for layer, count in zip(self.shape.layers, wrong, strict=True) if count]
            return (
                f"router replay: the routers of layers {layers} ran without the routes of their tokens, as happens if "
                "a router is recomputed without its layer; policy.recompute=full recomputes whole layers, and "
                f"{REPLAY_OFF}"
            )
        place, (position, *row) = min(entry for rank in per_rank for entry in rank)
        expected, chosen = row[: self.shape.per_token], row[self.shape.per_token :]
        return (
            f"router replay: {sum(wrong)} tokens went to other experts than their routes say; first in layer "
            f"{self.shape.layers[place]}, position {position} of a sequence: expected "
            f"{sorted(e - 1 for e in expected)} (-1: the policy's own choice), found "
            f"{[expert for expert, is_used in enumerate(chosen) if is_used]}; {REPLAY_OFF}"
        )

    # ---- inside of a pass ------------------------------------------------------------------------------------------

    def _enter(self, place: int, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
        row: PackedRow | None = kwargs.get("packed_seq_params")
        self.rows[place] = row.routes if row is not None and self.active else None

    def _leave(self, place: int, *_: Any) -> None:
        self.rows[place] = None

    def choose(self, place: int, scores: Tensor, own_choice: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns scores and indices of the experts to use, [L, K] each: the route's experts, or the router's own
        choice for tokens without a route. Counts tokens, and records the own choice in mode `recording`.

        Args:
            place: Index of the layer among the model's MoE layers.
            scores: [L, E], the router's scores for choosing.
            own_choice: Scores and indices chosen by the router, [L, K] each.
        """
        row = self.rows[place]
        if row is None:
            return own_choice
        chosen = own_choice[1]
        if row.recorded is not None:
            row.recorded[:, place] = (chosen + 1).to(self.dtype)
        routed = row.routes[:, place].long() - 1
        has_route = routed[:, :1] >= 0
        differs = has_route[:, 0] & (routed.sort(-1).values != chosen.sort(-1).values).any(-1)
        flags = torch.stack([row.read >= 0, has_route[:, 0], differs, torch.zeros_like(differs)])
        self.counts[place] += flags.sum(1)
        chosen_experts = torch.where(has_route, routed, chosen)
        return scores.gather(1, chosen_experts), chosen_experts

    def _check_output(self, place: int, _: Any, __: Any, output: tuple[Tensor, Tensor]) -> None:
        """Compares a router's output, a map [L, E], with the expected routes; without a row all tokens are wrong."""
        row = self.rows[place]
        if row is None:
            if self.active:
                self.counts[place, Count._fields.index("wrong")] += len(output[1])
            return
        chosen, expected = output[1], row.expected[:, place].long()
        has_route = expected[:, 0] > 0
        right = chosen.gather(1, (expected - 1).clamp(min=0)).all(1) & (chosen.sum(1) == self.shape.per_token)
        wrong = torch.where(has_route, ~right, row.routes[:, place, 0] > 0)
        self.counts[place, Count._fields.index("wrong")] += wrong.sum()
        first_index = wrong.int().argmax(0, keepdim=True)  # a tensor of one element, so that the host does not wait
        first_wrong = torch.cat(
            [part.index_select(0, first_index).view(-1).long() for part in (row.position, expected, chosen)]
        )
        self.first[place] = torch.where(wrong.any() & (self.first[place, 0] < 0), first_wrong, self.first[place])


class _ReplayHook:
    """The object that megatron-core's router calls instead of the built-in top-k.

    Replaces megatron-core's `RouterReplay`, which replays all tokens or none, and relies on the order of micro-batches
    in the backward pass.
    """

    def __init__(self, replay: RouterReplay, place: int) -> None:
        self.replay, self.place = replay, place

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default_compute_topk: TopK
    ) -> tuple[Tensor, Tensor]:
        """Chooses experts; the method name is megatron-core's."""
        own_choice = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return self.replay.choose(self.place, scores, own_choice)
