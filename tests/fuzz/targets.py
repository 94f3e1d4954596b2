"""What is fed: each reader of something from outside, with the errors that it may raise."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose, dump
from skyrl_mega.config.errors import UserError
from skyrl_mega.config.keys import keys
from skyrl_mega.config.schema import BuildConfig, EnvironmentConfig, SamplingConfig
from skyrl_mega.data.rows import load_demonstrations, load_prompts
from skyrl_mega.envs import registry
from skyrl_mega.evaluate.endpoint import MOST_TOKENS, Client, Endpoint, EndpointFailed
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.weights.checkpoint_header import FORMAT, HEADER, read_header
from skyrl_mega.weights.headers import check_files
from tests.fuzz.values import packed, real, spoilt, unpacked, value

CONFIG = b"""\
defaults: [_self_]
run: {name: a, seed: 1, steps: 3}
model: {path: m}
policy: {ranks: 4, layout: {tensor: 2}}
rollout: {sampling: {stop: ["</answer>"]}, options: {block_size: 16}}
data: {train: [t.parquet], prompts_per_step: 8}
environment: {options: {math: {tail: 5}}}
"""


@dataclass(frozen=True)
class Target:
    """One reader."""

    make: Callable[[Random], Any]
    run: Callable[[Any, Path], None]
    errors: tuple[type[Exception], ...] = (UserError,)


def _config(random: Random) -> Any:
    arguments = []
    for _ in range(random.randrange(3)):
        shown = random.choice((str, json.dumps))(value(random))
        arguments.append(f"{random.choice((*keys(), 'x.y', '', '..'))}={shown}")
    return {"file": packed(CONFIG if random.random() < 0.3 else spoilt(random, CONFIG)), "arguments": arguments}


def _run_config(case: Any, folder: Path) -> None:
    (folder / "it.yaml").write_bytes(unpacked(case["file"]))
    config = compose(folder / "it.yaml", case["arguments"])
    check(config, planned=True)
    registry.check(config.environment)
    (folder / "again.yaml").write_text(dump(config))
    assert compose(folder / "again.yaml") == config


def _options(random: Random) -> Any:
    name = random.choice(list(registry.BUILT_IN))
    declared = list(registry.resolve(name, EnvironmentConfig()).OPTIONS or {})
    return {name: {random.choice([*declared, "x"]): value(random) for _ in range(random.randrange(1, 4))}}


def _run_options(case: Any, folder: Path) -> None:
    registry.check(EnvironmentConfig(options=real(case)))


@cache
def _model() -> dict[str, Any]:
    return hf_config(BuildConfig())


def _model_files(random: Random) -> Any:
    hf = _model()
    for _ in range(random.randrange(3)):
        hf = {**hf, random.choice(list(hf)): value(random)}
    config = json.dumps(real(hf)).encode()
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": {**tensor, random.choice(list(tensor)): real(value(random))}}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(8)
    files = {"config.json": config, "model.safetensors": weights}
    return {name: packed(spoilt(random, data) if random.random() < 0.5 else data) for name, data in files.items()}


def _run_model_files(case: Any, folder: Path) -> None:
    for name, data in case.items():
        (folder / name).write_bytes(unpacked(data))
    check_files(folder)


def _parquet(random: Random) -> Any:
    said = [value(random) for _ in range(3)]
    messages = [[{"role": "user", "content": json.dumps(one)}] for one in said]
    columns: dict[str, Any] = {
        "prompt": messages if random.random() < 0.8 else [json.dumps(one) for one in said],
        "env_class": [random.choice(("gsm8k", "math", "", "x\x1b", None)) for _ in said],
        "reward_spec": [{"ground_truth": random.choice(("1", None))} for _ in said],
        "extra_info": [{"demonstration": random.choice(("a", None))} for _ in said],
    }
    kept = {name: column for name, column in columns.items() if random.random() < 0.9}
    buffer = io.BytesIO()
    pq.write_table(pa.table(kept), buffer, compression="none")
    data = buffer.getvalue()
    return packed(spoilt(random, data) if random.random() < 0.7 else data)


def _run_parquet(case: Any, folder: Path) -> None:
    file = folder / "t.parquet"
    file.write_bytes(unpacked(case))
    for read in (
        lambda: load_prompts([file], EnvironmentConfig(default="gsm8k")),
        lambda: load_demonstrations([file]),
    ):
        try:
            read()
        except UserError as error:
            one_line(error)


def _endpoint(random: Random) -> Any:
    reply = {
        "choices": [{"message": {"content": "a"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1},
    }
    at: Any = reply
    for _ in range(random.randrange(1, 5)):
        key = random.choice(range(len(at)) if isinstance(at, list) else list(at))
        if not isinstance(at[key], dict | list) or random.random() < 0.3:
            at[key] = real(value(random))
            break
        at = at[key]
    data = json.dumps(reply).encode()
    status = random.choice((200, 200, 200, 400, 401, 404, 422))
    return {"status": status, "body": packed(spoilt(random, data) if random.random() < 0.4 else data)}


def _run_endpoint(case: Any, folder: Path) -> None:
    answer = httpx.MockTransport(lambda request: httpx.Response(case["status"], content=unpacked(case["body"])))

    async def ask() -> None:
        async with httpx.AsyncClient(transport=answer) as http:
            endpoint = Endpoint("http://x/v1", "m", "s3cret-key")
            client = Client(endpoint, SamplingConfig(stop=["</a>"]), 5.0, http)
            reply = await client.reply([{"role": "user", "content": "x"}], 9, 1)
            if reply is not None:
                reply.text.encode()
                assert 0 <= reply.tokens <= MOST_TOKENS and 0 <= reply.prompt_tokens <= MOST_TOKENS

    asyncio.run(ask())


def _checkpoint(random: Random) -> Any:
    header = {"format": FORMAT, "model": _model(), "tensors": {"a": [2]}, "files": {"boxes": 3}, "ranks": 1, "step": 1}
    for _ in range(random.randrange(3)):
        header[random.choice(list(header))] = real(value(random))
    data = json.dumps(header).encode()
    return packed(spoilt(random, data) if random.random() < 0.5 else data)


def _run_checkpoint(case: Any, folder: Path) -> None:
    (folder / HEADER).write_bytes(unpacked(case))
    read_header(folder)


TARGETS: Mapping[str, Target] = {
    "config": Target(_config, _run_config),
    "options": Target(_options, _run_options),
    "model": Target(_model_files, _run_model_files),
    "parquet": Target(_parquet, _run_parquet),
    "endpoint": Target(_endpoint, _run_endpoint, (UserError, EndpointFailed)),
    "checkpoint": Target(_checkpoint, _run_checkpoint),
}


def one_line(error: Exception) -> None:
    """What a person is told is one line that no terminal is steered by."""
    assert str(error).isprintable() and 0 < len(str(error)) <= 4000, repr(str(error))[:300]
