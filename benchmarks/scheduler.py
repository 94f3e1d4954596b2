"""Measures CPU time per token in vLLM's scheduler and in ours, without a model.

    python -m benchmarks.scheduler [--requests 128] [--tokens 128] [--rounds 5]

A fake model returns tokens and log-probs that depend only on the request and the position. Prompts have 16 tokens,
blocks 128. The lines: vLLM's scheduler; ours without steady batches (tokens are sent in groups only); ours. `equal`:
every request has `--tokens` tokens. `ragged`: lengths are even between 1 and `--tokens`, so that requests end in
different steps. The best of the rounds counts.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.engines.vllm.plugin import MAY_HOLD
from skyrl_mega.engines.vllm.scheduler import HoldingScheduler
from skyrl_mega.models import tiny

VOCABULARY = 97
PROMPT = 16
Key = tuple[str, int]


def settings(folder: Path, **more: Any) -> VllmConfig:
    """Returns vLLM's settings for a tiny model, as the CPU engine has them."""
    model = folder / "model"
    tiny.build(BuildConfig(hidden=32, layers=1, heads=2, kv_heads=1, max_length=512), model)
    arguments: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "block_size": 128,
        "enable_prefix_caching": True,
    }
    return EngineArgs(
        **{**arguments, **more},
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enable_chunked_prefill=False,
        disable_log_stats=True,
    ).create_engine_config()


def scheduler(kind: type[Scheduler], config: VllmConfig, blocks: int) -> Any:
    """Returns a scheduler with a cache of this many blocks, one of which vLLM keeps."""
    init_none_hash(sha256)
    size = config.cache_config.block_size
    config.cache_config.num_gpu_blocks = blocks
    attention = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)])
    return kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=size,
        hash_block_size=size,
    )


def request(name: str, prompt: Sequence[int], config: VllmConfig, *, client: int = 0, **parameters: Any) -> Request:
    """Returns a request; `parameters` are vLLM's sampling parameters."""
    defaults: dict[str, Any] = {
        "logprobs": 0,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "extra_args": {MAY_HOLD: True},
    }
    hasher = get_request_block_hasher(config.cache_config.block_size, sha256)
    caching = config.cache_config.enable_prefix_caching
    return Request(
        name,
        list(prompt),
        SamplingParams(**{**defaults, **parameters}),
        None,
        client_index=client,
        arrival_time=0.0,
        block_hasher=hasher if caching else None,
    )


class FakeModel:
    """A model runner with rows in an order of its own, as vLLM's: the last request moves to a freed row."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def __call__(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Returns a token and a log-prob for each scheduled request."""
        counts = scheduled.num_scheduled_tokens
        for name in [name for name in self.rows if name not in counts]:
            row = self.rows.index(name)
            self.rows[row] = self.rows[-1]
            self.rows.pop()
        known = set(self.rows)
        self.rows += [name for name in counts if name not in known]
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        numbers = [crc32(f"{name} {computed[name] + counts[name]}".encode()) for name in self.rows]
        ids = np.array([[number % VOCABULARY] for number in numbers], np.int32).reshape(-1, 1)
        values = np.array([[-(number % 997) / 64] for number in numbers], np.float32).reshape(-1, 1)
        ranks = np.array([number % 13 for number in numbers], np.int64)
        return ModelRunnerOutput(
            req_ids=list(self.rows),
            req_id_to_index={name: row for row, name in enumerate(self.rows)},
            sampled_token_ids=ids.tolist(),
            logprobs=LogprobsLists(ids, values, ranks) if self.rows else None,
        )


class Loop:
    """The steps of an engine around a scheduler; collects everything that is sent."""

    def __init__(self, target: Any) -> None:
        self.scheduler = target
        self.model: Callable[[SchedulerOutput], ModelRunnerOutput] = FakeModel()
        self.tokens: dict[Key, list[int]] = defaultdict(list)
        """Tokens by request and client."""
        self.logprobs: dict[Key, list[tuple[int, float, int]]] = defaultdict(list)
        """Token id, log-prob and rank of each token, by request and client."""
        self.ends: dict[Key, tuple[Any, Any]] = {}
        """Finish reason and stop reason, by request and client."""
        self.seconds = 0.0
        """CPU time in the scheduler."""

    def step(self) -> SchedulerOutput:
        """Runs a step and returns its schedule."""
        before = time.thread_time()
        scheduled: SchedulerOutput = self.scheduler.schedule()
        between = time.thread_time()
        output = self.model(scheduled)
        after = time.thread_time()
        messages = self.scheduler.update_from_output(scheduled, output)
        self.seconds += time.thread_time() - after + between - before
        for client, message in messages.items():
            for sent in message.outputs:
                key = (sent.request_id, client)
                self.tokens[key] += sent.new_token_ids
                if sent.new_logprobs is not None:
                    columns = (column.reshape(-1).tolist() for column in sent.new_logprobs[:3])
                    self.logprobs[key] += zip(*columns, strict=True)
                if sent.finish_reason is not None:
                    self.ends[key] = (sent.finish_reason, sent.stop_reason)
        return scheduled


class GroupsOnly(HoldingScheduler):
    """Our scheduler without steady batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.may_be_steady = False


def microseconds(kind: type[Scheduler], config: VllmConfig, lengths: Sequence[int]) -> float:
    """Returns the microseconds per token in a scheduler until requests of these lengths have ended."""
    loop = Loop(scheduler(kind, config, blocks=4 * len(lengths)))
    for index, length in enumerate(lengths):
        prompt = [index % VOCABULARY] * PROMPT
        loop.scheduler.add_request(request(str(index), prompt, config, max_tokens=length))
    while loop.scheduler.has_requests():
        loop.step()
    assert sum(map(len, loop.tokens.values())) == sum(lengths), "a request has another length"
    return loop.seconds / sum(lengths) * 1e6


def main() -> None:
    """Prints a line for each scheduler."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    equal = [args.tokens] * args.requests
    ragged = [1 + i * (args.tokens - 1) // max(1, args.requests - 1) for i in range(args.requests)]
    random.Random(0).shuffle(ragged)
    with tempfile.TemporaryDirectory() as folder:
        config = settings(Path(folder), max_num_seqs=args.requests)
        kinds = {"vLLM's scheduler": Scheduler, "ours, groups only": GroupsOnly, "ours": HoldingScheduler}
        for name, kind in kinds.items():
            figures = {
                shape: min(microseconds(kind, config, lengths) for _ in range(args.rounds))
                for shape, lengths in (("equal", equal), ("ragged", ragged))
            }
            print(f"{name}: {', '.join(f'{value:.1f} us a token ({shape})' for shape, value in figures.items())}")


if __name__ == "__main__":
    main()
