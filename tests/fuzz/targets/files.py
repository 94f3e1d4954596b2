"""Files written by other programs: models, rows, checkpoints."""

from __future__ import annotations

import io
import json
import struct
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import BuildConfig, EnvironmentConfig
from skyrl_mega.data.rows import load_demonstrations, load_prompts
from skyrl_mega.hf_checkpoint.box_header import FORMAT, HEADER, read_header
from skyrl_mega.hf_checkpoint.index import check_files
from skyrl_mega.models.tiny import hf_config
from tests.fuzz.target import Target, one_line
from tests.fuzz.values import packed, real, spoilt, unpacked, value


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
    values = [value(random) for _ in range(3)]
    messages = [[{"role": "user", "content": json.dumps(one)}] for one in values]
    columns: dict[str, Any] = {
        "prompt": messages if random.random() < 0.8 else [json.dumps(one) for one in values],
        "env_class": [random.choice(("gsm8k", "math", "", "x\x1b", None)) for _ in values],
        "reward_spec": [{"ground_truth": random.choice(("1", None))} for _ in values],
        "extra_info": [{"demonstration": random.choice(("a", None))} for _ in values],
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


def _checkpoint(random: Random) -> Any:
    header = {"format": FORMAT, "dtype": "float32", "step": 1, "schedule": {}, "layout": {}, "tensors": {"a": [2]}}
    header["files"] = {"boxes": {"nbytes": 3, "crc": 7}}
    for _ in range(random.randrange(3)):
        header[random.choice(list(header))] = real(value(random))
    data = json.dumps(header).encode()
    return packed(spoilt(random, data) if random.random() < 0.5 else data)


def _run_checkpoint(case: Any, folder: Path) -> None:
    (folder / HEADER).write_bytes(unpacked(case))
    read_header(folder)


TARGETS = {
    "model": Target(_model_files, _run_model_files),
    "parquet": Target(_parquet, _run_parquet),
    "checkpoint": Target(_checkpoint, _run_checkpoint),
}
