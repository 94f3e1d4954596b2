"""Parallel dimensions: each rank's coordinates in Megatron's parallel grid, and the layers of each pipeline stage.

Pure arithmetic in megatron-core's default order "tp-cp-ep-dp-pp": the first name varies fastest. Dense layers use the
grid tp × cp × dp × pp; experts use the same ranks as etp × ep × edp × pp.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from math import prod
from typing import NamedTuple

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import LayoutConfig


class RankCoords(NamedTuple):
    """Coordinates of a rank, each from 0: in the grid of dense layers tensor (tp), context (cp) and data (dp); pipeline
    stage (pp); in the grid of experts expert (ep), expert tensor (etp) and expert data (edp)."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


@dataclass(frozen=True)
class ParallelDims:
    """The sizes of all parallel dimensions over `ranks` processes. `key` is the setting to name in errors.

    Raises:
        UserError: The sizes do not divide the ranks; virtual stages, or layers of the first or last stage, are given
            without pipeline stages; or these layers are no multiple of the virtual stages.
    """

    ranks: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage; None: as many as the middle stages. The same for `last_stage_layers`."""
    last_stage_layers: int | None = None
    context_exchange: str = "ring"
    """Exchange of the context ranks in an attention layer: "ring" or "all_to_all"."""
    key: InitVar[str] = "policy.layout"

    def __post_init__(self, key: str) -> None:
        ranks = f"{key.removesuffix('.layout')}.ranks"
        for names in (("tensor", "pipeline", "context"), ("expert", "expert_tensor", "pipeline")):
            sizes = {name: getattr(self, name) for name in names}
            product = prod(sizes.values())
            if self.ranks % product:
                factors = " × ".join(f"{name} {size}" for name, size in sizes.items())
                raise UserError(
                    f"{factors} = {product} does not divide the {self.ranks} ranks; give {ranks} as a multiple of "
                    f"{product}",
                    key=key,
                    settings=(ranks, *(f"{key}.{name}" for name in names)),
                )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise UserError(
                f"{self.virtual_pipeline} needs {key}.pipeline of at least 2; raise it, or give 1",
                key=f"{key}.virtual_pipeline",
                settings=(f"{key}.pipeline",),
            )
        for name in ("first_stage_layers", "last_stage_layers"):
            layers = getattr(self, name)
            if layers is not None and self.pipeline == 1:
                raise UserError(
                    f"{layers} needs {key}.pipeline of at least 2; raise it, or give null",
                    key=f"{key}.{name}",
                    settings=(f"{key}.pipeline",),
                )
            if layers is not None and layers % self.virtual_pipeline:
                raise UserError(
                    f"{layers} is not a multiple of {key}.virtual_pipeline {self.virtual_pipeline}; choose one",
                    key=f"{key}.{name}",
                    settings=(f"{key}.virtual_pipeline",),
                )

    @classmethod
    def from_config(cls, layout: LayoutConfig, ranks: int, key: str = "policy.layout") -> ParallelDims:
        """Returns the grid of a configuration over `ranks` processes. `expert_tensor` null becomes 1 with expert
        parallelism, else `tensor`.

        Args:
            layout: The settings of the layout.
            ranks: Number of processes.
            key: The layout's setting, for errors.

        Raises:
            UserError: The sizes do not fit together; see the class.
        """
        expert_tensor = layout.expert_tensor
        if expert_tensor is None:
            expert_tensor = 1 if layout.expert > 1 else layout.tensor
        return cls(
            ranks=ranks,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            virtual_pipeline=layout.virtual_pipeline,
            context=layout.context,
            expert=layout.expert,
            expert_tensor=expert_tensor,
            first_stage_layers=layout.first_stage_layers,
            last_stage_layers=layout.last_stage_layers,
            context_exchange=layout.context_exchange,
            key=key,
        )

    @property
    def by_heads(self) -> bool:
        """True if the context ranks split the heads of an attention layer, instead of its queries."""
        return self.context > 1 and self.context_exchange == "all_to_all"

    @property
    def data(self) -> int:
        """Data-parallel size of dense layers: ranks / (tensor · pipeline · context)."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Data-parallel size of experts: ranks / (expert_tensor · expert · pipeline)."""
        return self.ranks // (self.expert_tensor * self.expert * self.pipeline)

    def coordinates(self, rank: int) -> RankCoords:
        """Returns the coordinates of `rank`.

        Raises:
            ValueError: `rank` is negative, or not below `ranks`.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not within 0..{self.ranks - 1}")
        rest, tp = divmod(rank, self.tensor)
        rest, cp = divmod(rest, self.context)
        pp, dp = divmod(rest, self.data)
        rest, etp = divmod(rank, self.expert_tensor)
        rest, ep = divmod(rest, self.expert)
        edp = rest % self.expert_data
        return RankCoords(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, edp=edp)

    def stage_sizes(self, num_layers: int) -> list[int]:
        """Returns the number of layers of each pipeline stage, for a model with `num_layers` layers.

        Raises:
            ValueError: The stages without a given size cannot be equal in size, a stage would be empty, or a stage
                cannot be cut into equal chunks.
        """
        requested = {0: self.first_stage_layers, self.pipeline - 1: self.last_stage_layers}
        fixed = {stage: layers for stage, layers in requested.items() if layers is not None}
        left, stages = num_layers - sum(fixed.values()), self.pipeline - len(fixed)
        if left % stages if stages else left:
            raise ValueError(
                f"{left} of {num_layers} layers are left for {stages} pipeline stages, which must be equal in size"
            )
        sizes = [fixed.get(stage, left // stages if stages else 0) for stage in range(self.pipeline)]
        if min(sizes) < 1 or any(size % self.virtual_pipeline for size in sizes):
            raise ValueError(f"{sizes} layers a stage do not make {self.virtual_pipeline} chunks each")
        return sizes

    def stage_layers(self, num_layers: int, pp: int, chunk: int = 0) -> range:
        """Returns the global indices of the layers of virtual chunk `chunk` on stage `pp`; at least one layer. `pp` and
        `chunk` count from 0.

        Each stage's layers are cut into equal chunks. The model goes through chunk 0 of every stage, then chunk 1 of
        every stage, and so on.

        Raises:
            ValueError: The layers cannot be divided among the stages, a stage would be empty, or a stage cannot be cut
                into equal chunks (`stage_sizes`).
        """
        sizes = [size // self.virtual_pipeline for size in self.stage_sizes(num_layers)]
        first = chunk * sum(sizes) + sum(sizes[:pp])
        return range(first, first + sizes[pp])

    def holds_embedding(self, pp: int, chunk: int = 0) -> bool:
        """Returns True if chunk `chunk` of pipeline stage `pp` is the first of the model, with the embedding."""
        return pp == 0 and chunk == 0

    def holds_head(self, pp: int, chunk: int = 0) -> bool:
        """Returns True if chunk `chunk` of pipeline stage `pp` is the last of the model, with final norm and head."""
        return pp == self.pipeline - 1 and chunk == self.virtual_pipeline - 1
