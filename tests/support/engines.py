"""Small models, engines that serve them, and what transformers says of their answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.config.schema import BuildConfig, RolloutConfig
from skyrl_mega.engines.base import Completion, Facts, Request, Sampling
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.spec import EngineSpec, environment
from skyrl_mega.models import tiny
from skyrl_mega.models.registry import architecture

LOADING = threading.Lock()
"""transformers patches torch while it loads: two threads at once leave tied heads at random values."""


def build_model(path: Path, architecture: str, seed: int, **sizes: Any) -> Path:
    """A tiny model whose weights are large enough for sharp distributions: a wrong or misplaced tensor shows."""
    tiny.build(BuildConfig(architecture=architecture, **sizes), path, seed)
    file = path / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(file)
    for name, tensor in weights.items():
        if tensor.dim() == 1:
            weights[name] = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
        else:
            weights[name] = 8 * tensor
    save_file(weights, file, metadata={"format": "pt"})
    return path


def build_model_of(path: Path, hf: dict[str, Any], seed: int) -> Path:
    """Such a model for a config.json of another's, in a folder that may hold a tokenizer already."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: 1 + 0.3 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else 0.16 * torch.randn(shape, generator=generator)
        for name, shape in architecture(hf).tensors(hf).items()
    }
    (path / "config.json").write_text(json.dumps(hf))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


class Recorder(VllmEngine):
    """An engine that keeps what vLLM was given and what it produced, as vLLM itself has it."""

    async def start(self, former: Facts | None = None) -> Facts:
        """Also listens at vLLM's own door."""
        facts = await super().start(former)
        self.seen: dict[str, dict[str, Any]] = {}
        generate = self.llm.generate

        async def listen(prompt: Any, parameters: Any, request: str) -> AsyncIterator[Any]:
            async for output in generate(prompt, parameters, request):
                result = output.outputs[0]
                self.seen[request] = {
                    "given": list(output.prompt_token_ids),
                    "produced": list(result.token_ids),
                    "logprobs": list(result.logprobs.logprobs),
                    "finish": str(result.finish_reason),
                }
                yield output

        self.llm.generate = listen
        return facts

    async def recording(self) -> dict[str, dict[str, Any]]:
        """By request id: tokens given, tokens produced, their log-probs, what ended them."""
        return self.seen


def start_engine(
    name: str, spec: EngineSpec, logs: Path, engines: int = 1, kind: type[VllmEngine] = VllmEngine
) -> ActorGroup:
    """Engine actors that have been started."""
    group = ActorGroup.spawn(name, kind, [{"spec": spec}] * engines, timeout=300, env=environment(spec), logs=logs)
    group.call_all("start", timeout=600)
    return group


def serving(group: ActorGroup, restarts: int = 0) -> Fleet:
    """These engines as a fleet; all hold the weights that are wanted."""
    fleet = Fleet(group, restarts=restarts, start_timeout_s=600)
    fleet.serve(range(len(group)))
    return fleet


def spec_of(path: Path, rollout: RolloutConfig, **more: Any) -> EngineSpec:
    """A float32 engine on CPU for sequences of up to 128 tokens."""
    return EngineSpec(path=str(path), dtype="float32", device="cpu", rollout=rollout, max_length=128, **more)


def complete(
    engines: ActorGroup, requests: list[Request], sampling: Sampling | None = None, rank: int = 0
) -> dict[str, Completion]:
    """Completions by request id."""
    sampling = sampling or Sampling()

    async def collect() -> list[Completion]:
        method = engines.actors[rank].generate_many.options(num_returns="streaming")
        found: list[Completion] = []
        async for reference in method.remote(requests, sampling):
            found += await reference
        return found

    return {c.id: c for c in asyncio.run(collect())}


def difference_from_transformers(path: Path, request: Request, completion: Completion, temperature: float = 1) -> float:
    """Largest difference between the engine's log-probs and those of transformers for the same tokens."""
    with LOADING:  # the import too: transformers fills its module as names are asked for
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    new = torch.tensor(completion.tokens)
    with torch.no_grad():
        logits = model(torch.tensor([[*request.tokens, *completion.tokens]])).logits[0]
    logprobs = (logits / temperature).log_softmax(-1)[len(request.tokens) - 1 : -1]
    ours = torch.tensor(completion.logprobs)
    return float((logprobs.gather(1, new[:, None])[:, 0] - ours).abs().max())
