"""The experts that an engine's tokens were routed to (`models.routes`), for the policy to route them alike.

Two ways lead to the same routes. On CUDA vLLM's second model runner gives them with every finished request; `of_output`
reads them, and nothing proves whose they are. That runner needs Triton, so on a CPU a `RouteRecorder` takes them where
vLLM's routers choose, and `VllmEngine` asks its worker for them when a request has ended; `checked` has the proof.

Legend: n tokens, M MoE layers, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from skyrl_mega.models.routes import RouteShape, WrongRoutes

ID_SUFFIX = 9
"""vLLM adds a hyphen and 8 characters to a request's name."""


@dataclass
class Read:
    """Tokens that a model has read, one after another: the routes, and what proves whose they are."""

    routes: np.ndarray
    """[n, M, K]."""
    tokens: np.ndarray
    """int32 [n]: what was read."""
    versions: np.ndarray
    """int32 [n]: the weight version of the model that read it."""

    def part(self, at: slice | np.ndarray) -> Read:
        """Some of them."""
        return Read(self.routes[at], self.tokens[at], self.versions[at])

    def packed(self) -> list[bytes]:
        """As vLLM's calls of workers carry it."""
        return [value.tobytes() for value in vars(self).values()]

    @classmethod
    def unpacked(cls, packed: list[bytes], shape: RouteShape) -> Read:
        """From `packed`."""
        routes = np.frombuffer(packed[0], shape.dtype).reshape(-1, len(shape.layers), shape.per_token)
        return cls(routes, *(np.frombuffer(values, np.int32) for values in packed[1:]))

    @classmethod
    def joined(cls, parts: list[Read]) -> Read:
        """Several, one after another."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])))


@dataclass
class _Request:
    """What a request's tokens were routed to so far, from its first one on."""

    parts: list[Read] = field(default_factory=list)
    known: int = 0
    """Tokens in `parts`."""


class RouteRecorder:
    """Records what vLLM's routers choose in one worker on a CPU, where routers run as Python.

    A prefix that the KV cache has is not read again. So routes are also kept by the cache's places: they are as old as
    the keys and values that lie there, and known for as long.

    Args:
        runner: vLLM's model runner, whose steps are recorded from now on.
        shape: What the model's routes look like.

    Raises:
        WrongRoutes: The model's routers cannot be listened to.
    """

    def __init__(self, runner: Any, shape: RouteShape) -> None:
        self.runner, self.shape = runner, shape
        self.version = 0
        """The weights' (`VllmEngine.version`)."""
        self.requests: dict[str, _Request] = {}
        """By vLLM's own name."""
        if len(runner.kv_cache_config.kv_cache_groups) != 1:
            raise WrongRoutes("routes are recorded for models whose layers share one kind of KV cache")
        spec = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        places = runner.kv_cache_config.num_blocks * spec.block_size
        self.cached = Read(shape.none(places), *np.full((2, places), -1, np.int32))
        """By place of the KV cache."""
        self.step = torch.zeros(runner.max_num_tokens, len(shape.layers), shape.per_token, dtype=torch.int16)
        self._listen()
        self.execute = runner.execute_model
        runner.execute_model = self._execute

    def _listen(self) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        found = {m.layer_id: m.router for m in self.runner.model.modules() if isinstance(m, MoERunner)}
        if sorted(found) != list(self.shape.layers) or not all(isinstance(r, BaseRouter) for r in found.values()):
            raise WrongRoutes(f"vLLM has routers in layers {sorted(found)}; the model has {list(self.shape.layers)}")
        for place, layer in enumerate(self.shape.layers):
            found[layer].set_capture_fn(partial(self._capture, place))

    def _capture(self, place: int, experts: torch.Tensor) -> None:
        """The experts [tokens of the step, K] that the router of the MoE layer `place` has chosen."""
        self.step[: len(experts), place] = experts

    def _execute(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        answer = self.execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._record(scheduled)
        return answer

    def _record(self, scheduled: Any) -> None:
        """Shares the step's tokens out among the requests that they are of."""
        batch, total = self.runner.input_batch, scheduled.total_num_scheduled_tokens
        read = Read(
            (self.step[:total] + 1).numpy().astype(self.shape.dtype),
            self.runner.input_ids.cpu[:total].numpy().copy(),
            np.full(total, self.version, np.int32),
        )
        self.step[:total] = -1  # a layer that the next step skips has none
        row = 0
        found: list[tuple[str, int, np.ndarray, Read]] = []
        # All rows first: a request may read a prefix from the cache that a later one of the batch has just written.
        for index, name in enumerate(batch.req_ids):
            first, count = int(batch.num_computed_tokens_cpu[index]), scheduled.num_scheduled_tokens[name]
            places = self._places(batch.block_table[0], index, first + count)
            new = read.part(slice(row, row + count))
            row += count
            for kept, value in zip(vars(self.cached).values(), vars(new).values(), strict=True):
                kept[places[first:]] = value
            found.append((name, first, places, new))
        for name, first, places, new in found:
            # What is computed again after it gave way to others keeps the routes that its tokens were drawn with.
            request = self.requests.setdefault(name, _Request())
            if first > request.known:
                request.parts.append(self.cached.part(places[request.known : first]))
            request.parts.append(new.part(slice(max(0, request.known - first), None)))
            request.known = max(request.known, len(places))

    def _places(self, table: Any, index: int, count: int) -> np.ndarray:
        """Where in the cache a request's first `count` tokens lie."""
        at = np.arange(count)
        return table.block_table.np[index, at // table.block_size] * table.block_size + at % table.block_size

    def forget(self) -> None:
        """Drops what is known of requests, none of which is under way."""
        self.requests.clear()

    def take(self, name: str) -> Read | None:
        """All that a request's model has read, and forgets it; None where that is nothing.

        A token behind its last may be among it, which was computed before it was known to be no more wanted.
        """
        found = [key for key in self.requests if key[:-ID_SUFFIX] == name]
        parts = [self.requests.pop(key).parts for key in found]
        return Read.joined(parts[-1]) if parts else None


def checked(
    read: Read | None, tokens: np.ndarray, first: int, versions: set[int] | None, *, shape: RouteShape, name: str
) -> np.ndarray:
    """The routes that belong to a completion.

    Args:
        read: What was recorded of the request, from its first token on.
        tokens: Those that it has read: its prompt, and the new ones but the last.
        first: Where the routes begin that are wanted.
        versions: Weights that it was drawn with; None where they may change between a token and the next.
        shape: What the model's routes look like.
        name: The request's.

    Returns:
        [len(tokens) - first, M, K].

    Raises:
        WrongRoutes: Some are missing, another token's, of other weights, or not ones that the model can have.
    """
    if read is None or len(read.tokens) < len(tokens):
        known = 0 if read is None else len(read.tokens)
        raise WrongRoutes(f"request {name}: routes of {known} tokens for {len(tokens)} that the engine has read")
    found = read.part(slice(first, len(tokens)))
    if (other := found.tokens != tokens[first:]).any():
        at = int(other.argmax())
        raise WrongRoutes(
            f"request {name}: the routes at position {first + at} are token {found.tokens[at]}'s; "
            f"token {tokens[first + at]} is there"
        )
    if versions is not None and (stale := ~np.isin(found.versions, list(versions))).any():
        at = int(stale.argmax())
        raise WrongRoutes(
            f"request {name}: the routes at position {first + at} are of weight version {found.versions[at]}; the "
            f"request was drawn with {sorted(versions)}"
        )
    shape.check(found.routes, len(tokens) - first, f"request {name}, from position {first}")
    return found.routes


def of_output(experts: np.ndarray | None, tokens: int, *, shape: RouteShape, name: str) -> np.ndarray:
    """The routes of a completion by vLLM's second model runner, which tells neither their tokens nor their weights.

    Args:
        experts: `CompletionOutput.routed_experts`: [n, decoder layers, K], those without experts included.
        tokens: How many are needed.
        shape: What the model's routes look like.
        name: The request's.

    Returns:
        [tokens, M, K].

    Raises:
        WrongRoutes: Some are missing, or not ones that the model can have.
    """
    if experts is None:
        raise WrongRoutes(f"request {name}: vLLM gave no routes")
    if experts.ndim != 3 or experts.shape[1] <= shape.layers[-1]:
        raise WrongRoutes(f"request {name}: vLLM's routes are {list(experts.shape)}, and lack layer {shape.layers[-1]}")
    routes = (experts[:, list(shape.layers)].astype(np.int32) + 1).astype(shape.dtype)
    shape.check(routes, tokens, f"request {name}")
    return routes
