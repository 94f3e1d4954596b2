"""The expert routes of an engine's completions: recorded by a worker on a CPU, returned by vLLM itself on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_mega.common.errors import UserError
from skyrl_mega.engines.base import Completion, Request
from skyrl_mega.engines.vllm import routes
from skyrl_mega.engines.vllm.spec import EngineSpec
from skyrl_mega.hf_checkpoint.index import read_config
from skyrl_mega.models.registry import architecture
from skyrl_mega.models.routes import RouteShape


class AnswerRoutes:
    """The routes of an engine that returns them (`EngineSpec.routes`); adds nothing for another engine.

    Args:
        spec: The engine. Raises UserError if routes are wanted of a model without experts.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.shape = _shape(spec) if spec.routes else None
        """Shape of the routes; None without routes."""

    @property
    def recorded(self) -> bool:
        """True if the worker records routes (`WorkerExtension.record_routes`)."""
        return self.shape is not None and self.spec.device == "cpu"

    def parameters(self, request: Request) -> dict[str, Any]:
        """Returns the sampling parameters by which vLLM itself returns routes, from token `request.routes_from` on; {}
        for an engine without routes, and if the worker records the routes."""
        if self.shape is None or self.recorded:
            return {}
        return {"routed_experts_prompt_start": request.routes_from}

    def of_output(self, request: Request, result: Any) -> np.ndarray | None:
        """Returns the routes in vLLM's output of a request, as `routes.output_routes`, for every token from
        `request.routes_from` on except the last. None for an engine without routes, if the worker records the routes,
        and for an output without tokens.

        Args:
            request: The request.
            result: vLLM's `CompletionOutput`.

        Raises:
            WrongRoutes: The routes are missing or do not fit the request.
        """
        if self.shape is None or self.recorded or not result.token_ids:
            return None
        count = len(request.tokens) + len(result.token_ids) - 1 - request.routes_from
        return routes.output_routes(result.routed_experts, count, shape=self.shape, name=request.id)

    def of_worker(
        self, ended: Sequence[Completion], requests: Sequence[Request], taken: Sequence[list[bytes] | None]
    ) -> list[Completion]:
        """Returns completions, in order, with the routes that the worker recorded; a completion without tokens is
        returned unchanged. Call only if `recorded` is true.

        Args:
            ended: The completions.
            requests: The completions' requests, in any order and possibly with others.
            taken: Result of `WorkerExtension.take_routes` for the completions, in order; None: nothing is recorded.

        Raises:
            WrongRoutes: Recorded routes are missing or do not fit the request.
        """
        return [
            self._routed(completion, next(r for r in requests if r.id == completion.id), packed)
            for completion, packed in zip(ended, taken, strict=True)
        ]

    def _routed(self, completion: Completion, request: Request, packed: list[bytes] | None) -> Completion:
        assert self.shape is not None
        if not completion.tokens:
            return completion
        expert_routes = routes.verified_routes(
            None if packed is None else routes.TokenRoutes.unpacked(packed, self.shape),
            np.array([*request.tokens, *completion.tokens[:-1]], np.int32),
            request.routes_from,
            None if self.spec.updated_under_way else {version for version, _ in completion.versions},
            shape=self.shape,
            name=request.id,
        )
        return replace(completion, routes=expert_routes)


def _shape(spec: EngineSpec) -> RouteShape:
    """Returns the shape of the routes of an engine's model.

    Raises:
        UserError: The model has no experts.
    """
    hf = read_config(Path(spec.path))
    shape = RouteShape.of(architecture(hf).describe(hf))
    if shape is None:
        raise UserError(f"the model of model.path={spec.path} has no experts; give off", key="policy.moe.replay")
    return shape
