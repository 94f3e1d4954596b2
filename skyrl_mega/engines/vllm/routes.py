"""The experts chosen for an engine's tokens (`models.routes`), so that the policy can route them alike.

There are two sources. On CUDA vLLM's second model runner returns routes with every finished request; `output_routes`
reads these, without proof of the tokens. This runner needs Triton, so on a CPU a `RouteRecorder` captures routes
inside vLLM's routers, and `VllmEngine` fetches them from the worker at the end of a request; `verified_routes`
verifies the tokens.

Legend: n tokens, M MoE layers, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from skyrl_mega.engines.vllm.cache_groups import full_attention
from skyrl_mega.models.routes import REPLAY_POLICY, RouteShape, WrongRoutes

ID_SUFFIX = 9
"""Number of characters added by vLLM to a request's name: a hyphen and 8 more."""


@dataclass
class TokenRoutes:
    """Routes of consecutive tokens read by a model; tokens and versions prove to which tokens and weights the routes
    belong."""

    routes: np.ndarray
    """Routes, [n, M, K]."""
    tokens: np.ndarray
    """Tokens read, int32 [n]."""
    versions: np.ndarray
    """Weight version of the model when reading each token, int32 [n]."""

    def select(self, at: slice | np.ndarray) -> TokenRoutes:
        """Returns a new object with the entries of all three arrays at `at`, a slice or array of token positions."""
        return TokenRoutes(self.routes[at], self.tokens[at], self.versions[at])

    def packed(self) -> list[bytes]:
        """Returns the bytes of `routes`, `tokens` and `versions`, in this order, for vLLM's calls of workers.
        `unpacked` is the inverse."""
        return [value.tobytes() for value in vars(self).values()]

    @classmethod
    def unpacked(cls, packed: list[bytes], shape: RouteShape) -> TokenRoutes:
        """Returns the object whose `packed` gave these bytes, with read-only arrays. `shape` is the shape of the
        model's routes."""
        routes = np.frombuffer(packed[0], shape.dtype).reshape(-1, len(shape.layers), shape.per_token)
        return cls(routes, *(np.frombuffer(values, np.int32) for values in packed[1:]))

    @classmethod
    def concatenated(cls, parts: list[TokenRoutes]) -> TokenRoutes:
        """Returns the parts, at least one, concatenated along the tokens in the given order."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in vars(parts[0])))


@dataclass
class _Request:
    """The routes of a request so far, from the first token on."""

    parts: list[TokenRoutes] = field(default_factory=list)
    known: int = 0
    """Number of tokens in `parts`."""

    def cut_rejected(self, first: int, new: TokenRoutes) -> None:
        """Removes the tokens that the engine replaced, which are rejected draft tokens: all tokens from the first on
        that differs from `new`, the tokens read again from position `first`. Equal tokens are read again after a
        preemption, and keep the routes used when they were sampled.
        """
        known = TokenRoutes.concatenated(self.parts)
        again = new.tokens[: self.known - first]
        differing = np.flatnonzero(known.tokens[first : first + len(again)] != again)
        if len(differing):
            self.known = first + int(differing[0])
            self.parts = [known.select(slice(0, self.known))]


class RouteRecorder:
    """A recorder of the choices of vLLM's routers in a worker on a CPU, where routers run as Python.

    A prefix found in the KV cache is not read again. Routes are therefore also stored by cache position, for as long
    as the keys and values there. Of several groups of layers with caches of their own (sliding windows, recurrent
    states), the group with full attention gives the positions: only this group keeps a position for every token, and
    vLLM finds a prefix only where all groups have one.

    Args:
        runner: vLLM's model runner; steps are recorded from now on.
        shape: Shape of the model's routes.

    Raises:
        WrongRoutes: The model's routers cannot be captured.
    """

    def __init__(self, runner: Any, shape: RouteShape) -> None:
        self.runner, self.shape = runner, shape
        self.version = 0
        """Version of the weights (`VllmEngine.version`)."""
        self.requests: dict[str, _Request] = {}
        """Requests under way, by vLLM's own names."""
        cache = runner.kv_cache_config
        group = full_attention(cache)
        if group is None:
            raise WrongRoutes(
                "on a CPU no expert routes can be recorded for a model without a layer of full attention; give "
                "policy.moe.replay=off"
            )
        self.group = group
        """Number of the group of layers whose cache positions stand for tokens."""
        places = cache.num_blocks * cache.kv_cache_groups[group].kv_cache_spec.block_size
        self.cached = TokenRoutes(shape.none(places), *np.full((2, places), -1, np.int32))
        """Routes by position in the KV cache."""
        self.step = torch.zeros(runner.max_num_tokens, len(shape.layers), shape.per_token, dtype=torch.int16)
        self._install_capture()
        self.execute = runner.execute_model
        runner.execute_model = self._execute

    def _install_capture(self) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        routers = {m.layer_id: m.router for m in self.runner.model.modules() if isinstance(m, MoERunner)}
        layers, why = list(self.shape.layers), ""
        if sorted(routers) != layers:
            why = f"vLLM has experts in layers {sorted(routers)}, but config.json in {layers}"
        elif other := [layer for layer in layers if not isinstance(routers[layer], BaseRouter)]:
            why = f"vLLM's expert routers in layers {other} cannot be captured"
        if why:
            raise WrongRoutes(f"no expert routes can be recorded: {why}; give policy.moe.replay=off")
        for place, layer in enumerate(self.shape.layers):
            routers[layer].set_capture_fn(partial(self._capture, place))

    def _capture(self, place: int, experts: torch.Tensor) -> None:
        """Stores the experts [tokens of the step, K] chosen by the router of MoE layer number `place`."""
        self.step[: len(experts), place] = experts

    def _execute(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        answer = self.execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._record(scheduled)
        return answer

    def _record(self, scheduled: Any) -> None:
        """Distributes the step's tokens over requests."""
        batch, total = self.runner.input_batch, scheduled.total_num_scheduled_tokens
        read = TokenRoutes(
            (self.step[:total] + 1).numpy().astype(self.shape.dtype),
            self.runner.input_ids.cpu[:total].numpy().copy(),
            np.full(total, self.version, np.int32),
        )
        self.step[:total] = -1  # a layer skipped by the next step has no routes
        row = 0
        rows_by_request: list[tuple[str, int, np.ndarray, TokenRoutes]] = []
        # All rows first: a request may read a cached prefix just written by a later request of the batch.
        for index, name in enumerate(batch.req_ids):
            first, count = int(batch.num_computed_tokens_cpu[index]), scheduled.num_scheduled_tokens[name]
            places = self._places(batch.block_table[self.group], index, first + count)
            new = read.select(slice(row, row + count))
            row += count
            for kept, value in zip(vars(self.cached).values(), vars(new).values(), strict=True):
                kept[places[first:]] = value
            rows_by_request.append((name, first, places, new))
        for name, first, places, new in rows_by_request:
            request = self.requests.setdefault(name, _Request())
            if first < request.known:
                request.cut_rejected(first, new)
            if first > request.known:
                request.parts.append(self.cached.select(places[request.known : first]))
            request.parts.append(new.select(slice(max(0, request.known - first), None)))
            request.known = max(request.known, len(places))

    def _places(self, table: Any, index: int, count: int) -> np.ndarray:
        """Returns the cache positions of a request's first `count` tokens."""
        at = np.arange(count)
        return table.block_table.np[index, at // table.block_size] * table.block_size + at % table.block_size

    def forget(self) -> None:
        """Drops the routes of all requests; no request may be under way. Routes by cache position stay."""
        self.requests.clear()

    def take(self, name: str) -> TokenRoutes | None:
        """Returns the routes of all tokens read for the request with this name (`Request.id`), from the first token on,
        and forgets the request; None for an unknown request.

        The result may include a token after the last, computed before the end of the request was known.
        """
        keys = [key for key in self.requests if key[:-ID_SUFFIX] == name]
        parts = [self.requests.pop(key).parts for key in keys]
        return TokenRoutes.concatenated(parts[-1]) if parts else None


def verified_routes(
    read: TokenRoutes | None, tokens: np.ndarray, first: int, versions: set[int] | None, *, shape: RouteShape, name: str
) -> np.ndarray:
    """Returns the recorded routes of a completion, after a check that they belong to its tokens and weights.

    Args:
        read: Data recorded for the request, from the first token on; None if nothing is recorded, an error.
        tokens: Tokens read by the engine: the prompt, and all new tokens but the last.
        first: Position in `tokens` of the first wanted route.
        versions: Weight versions used for sampling; None if weights may change between tokens, and versions are not
            checked.
        shape: Shape of the model's routes.
        name: Name of the request, for errors.

    Returns:
        Routes, [len(tokens) - first, M, K]: K experts of each of M layers with experts.

    Raises:
        WrongRoutes: Routes are missing, belong to another token or other weights, or are impossible for the model.
    """
    if read is None or len(read.tokens) < len(tokens):
        known = 0 if read is None else len(read.tokens)
        raise WrongRoutes(
            f"request {name}: routes of {known} tokens are recorded, but the engine has read {len(tokens)}; "
            f"{REPLAY_POLICY}"
        )
    selected = read.select(slice(first, len(tokens)))
    if (other := selected.tokens != tokens[first:]).any():
        at = int(other.argmax())
        raise WrongRoutes(
            f"request {name}: the routes at position {first + at} were recorded for token {selected.tokens[at]}, but "
            f"the request has token {tokens[first + at]} there; {REPLAY_POLICY}"
        )
    if versions is not None and (stale := ~np.isin(selected.versions, list(versions))).any():
        at = int(stale.argmax())
        raise WrongRoutes(
            f"request {name}: the routes at position {first + at} are of weight version {selected.versions[at]}, but "
            f"the request was sampled with {sorted(versions)}; {REPLAY_POLICY}"
        )
    shape.check(selected.routes, len(tokens) - first, f"request {name}, from position {first}")
    return selected.routes


def output_routes(experts: np.ndarray | None, tokens: int, *, shape: RouteShape, name: str) -> np.ndarray:
    """Returns the routes that vLLM's second model runner gave with a completion. Checks the number of tokens, the range
    of the experts, and that no layer has an expert twice. Cannot check which tokens or weights the routes belong to.

    Args:
        experts: `CompletionOutput.routed_experts`: [n, decoder layers, K], layers without experts included; None, and n
            other than `tokens`, are an error.
        tokens: Number of tokens with wanted routes.
        shape: Shape of the model's routes.
        name: Name of the request.

    Returns:
        Routes, [tokens, M, K] of `shape.dtype`: index + 1 of K experts in each of M layers with experts.

    Raises:
        WrongRoutes: Routes are missing or impossible for the model.
    """
    if experts is None:
        raise WrongRoutes(f"request {name}: vLLM returned no expert routes")
    if experts.ndim != 3 or experts.shape[1] <= shape.layers[-1]:
        raise WrongRoutes(f"request {name}: vLLM's routes are {list(experts.shape)}, and lack layer {shape.layers[-1]}")
    routes = (experts[:, list(shape.layers)].astype(np.int32) + 1).astype(shape.dtype)
    shape.check(routes, tokens, f"request {name}")
    return routes
