"""Small models, engines with these models, and comparisons of answers with transformers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from skyrl_mega.cluster import reaper
from skyrl_mega.cluster.fleet import Fleet
from skyrl_mega.cluster.group import ActorGroup
from skyrl_mega.config.schema import BuildConfig, RolloutConfig
from skyrl_mega.engines.base import Completion, Facts, Request, Sampling
from skyrl_mega.engines.vllm.actor import VllmEngine
from skyrl_mega.engines.vllm.spec import EngineSpec, environment
from skyrl_mega.models import tiny
from skyrl_mega.models.registry import architecture

LOADING = threading.Lock()
"""A lock around loading: transformers patches torch while loading, and two threads at once leave tied heads with random
values."""


def build_model(path: Path, architecture: str, seed: int, **sizes: Any) -> Path:
    """Builds a tiny model with large weights for sharp distributions: a wrong or misplaced tensor shows."""
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
    """Writes a tiny model with the config.json `hf` and random weights to the existing folder `path`, and returns it.
    A tokenizer there stays."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: 1 + 0.3 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else 0.16 * torch.randn(shape, generator=generator)
        for name, shape in architecture(hf).tensors(hf).items()
    }
    forms = architecture(hf).describe(hf).disk_forms
    weights = {name: forms[name].to_disk(t) if name in forms else t for name, t in weights.items()}
    (path / "config.json").write_text(json.dumps(hf))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


class Recorder(VllmEngine):
    """An engine that records vLLM's inputs and outputs."""

    async def start(self, former: Facts | None = None) -> Facts:
        """Starts the engine, and records vLLM's `generate`."""
        facts = await super().start(former)
        self.seen: dict[str, dict[str, Any]] = {}
        generate = self.llm.generate

        async def listen(prompt: Any, parameters: Any, request: str, **more: Any) -> AsyncIterator[Any]:
            async for output in generate(prompt, parameters, request, **more):
                result = output.outputs[0]
                self.seen[request] = {
                    "given": list(output.prompt_token_ids),
                    "produced": list(result.token_ids),
                    "logprobs": list(result.logprobs),
                    "finish": str(result.finish_reason),
                }
                yield output

        self.llm.generate = listen
        return facts

    async def recording(self) -> dict[str, dict[str, Any]]:
        """Returns, by request id: input tokens, output tokens, log-probs, and the reason for the end."""
        return self.seen


def start_engine(
    name: str, spec: EngineSpec, logs: Path, engines: int = 1, kind: type[VllmEngine] = VllmEngine
) -> ActorGroup:
    """Starts engine actors."""
    group = ActorGroup.spawn(name, kind, [{"spec": spec}] * engines, timeout=300, env=environment(spec), logs=logs)
    group.call_all("start", timeout=600)
    return group


def serving(group: ActorGroup, restarts: int = 0) -> Fleet:
    """Returns a fleet of these engines; all serve the current weights."""
    fleet = Fleet(group, restarts=restarts, start_timeout_s=600)
    fleet.serve(range(len(group)))
    return fleet


def spec_of(path: Path, rollout: RolloutConfig, **more: Any) -> EngineSpec:
    """Returns the spec of a float32 engine on CPU for sequences of up to 128 tokens."""
    return EngineSpec(path=str(path), dtype="float32", device="cpu", rollout=rollout, max_length=128, **more)


def complete(
    engines: ActorGroup, requests: list[Request], sampling: Sampling | None = None, rank: int = 0
) -> dict[str, Completion]:
    """Returns completions by request id."""
    sampling = sampling or Sampling()

    async def collect() -> list[Completion]:
        method = engines.actors[rank].generate_many.options(num_returns="streaming")
        completions: list[Completion] = []
        async for reference in method.remote(requests, sampling):
            completions += await reference
        return completions

    return {c.id: c for c in asyncio.run(collect())}


def difference_from_transformers(path: Path, request: Request, completion: Completion, temperature: float = 1) -> float:
    """Returns the largest difference between log-probs of the engine and of transformers for the same tokens."""
    with LOADING:  # includes the import: transformers fills its module lazily
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    new = torch.tensor(completion.tokens)
    with torch.no_grad():
        logits = model(torch.tensor([[*request.tokens, *completion.tokens]])).logits[0]
    logprobs = (logits / temperature).log_softmax(-1)[len(request.tokens) - 1 : -1]
    ours = torch.tensor(completion.logprobs)
    return float((logprobs.gather(1, new[:, None])[:, 0] - ours).abs().max())


def vllm_process(engines: ActorGroup, rank: int) -> int:
    """Returns the process id of vLLM's engine core, a child of the engine's actor, for an engine without workers of
    its own.

    vLLM titles the process, unless its first environment variable was changed before: the command line is then that of
    Python's `multiprocessing`.
    """
    actor = engines.where[rank].pid
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in reaper.members(actor) if pid != actor}
    found = [pid for pid, words in commands.items() if b"EngineCore" in words or b"spawn_main" in words]
    assert len(found) == 1, commands
    return found[0]
