"""Reading and writing Hugging Face directories, compared with safetensors and transformers, and error messages."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.groups import groups
from skyrl_mega.hf_checkpoint import load as files
from skyrl_mega.hf_checkpoint.index import check_files, read_config
from skyrl_mega.hf_checkpoint.load import exported, load, save
from skyrl_mega.models.registry import architecture
from skyrl_mega.parallel.dims import ParallelDims
from skyrl_mega.weights.exchange import exchange
from tests.support.ranks import run_ranks
from tests.weights.grids import LAYOUTS, MODELS, cut, empty, global_tensors, pairs
from tests.weights.test_execute import same


def write(path: Path, hf: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Writes a directory of two files with an index, using safetensors alone, and returns the tensors."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = global_tensors(architecture(hf).tensors(hf), seed)
    (path / "config.json").write_text(json.dumps(hf))
    (path / "tokenizer.json").write_text("{}")
    names = list(tensors)
    weight_map = {}
    for file, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({n: tensors[n] for n in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize("hf, parallel", pairs())
def test_load_any_layout(hf: dict[str, Any], parallel: ParallelDims, tmp_path: Path) -> None:
    tensors = write(tmp_path, hf)
    check_files(tmp_path)
    layout = architecture(hf).megatron_layout(hf, parallel, "local")
    for shard in layout.shards:
        params = empty(shard)
        load(tmp_path, shard, params)
        assert same(params, cut(shard, tensors))


def round_trip(rank: int, address: str, source: Path, path: Path, hf: dict[str, Any], parallel: ParallelDims) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=parallel.ranks)
    layout = architecture(hf).megatron_layout(hf, parallel, "local")
    params = empty(layout.shards[rank])
    load(source, layout.shards[rank], params)
    save(path, source, layout, params, file_bytes=100_000, writers=(0, parallel.ranks - 1))
    save(path, source, layout, params, file_bytes=100_000)  # replaces the first
    dist.destroy_process_group()


def count_buffers(
    rank: int, address: str, source: Path, path: Path, hf: dict[str, Any], parallel: ParallelDims
) -> tuple[int, int, int, int]:
    """Saves several files twice and returns four counts: the allocations of buffers, the largest and the final number
    of buffer bytes, and the largest number of tensors of other files still alive while a file is filled.
    """
    allocations, most = [], [0]
    tensors: list[weakref.ref[Tensor]] = []
    others = 0

    class Exchange(files.Exchange):
        def run(self, source: Any, target: Any, **more: Any) -> Any:
            nonlocal others
            mine = {id(tensor) for tensor in target.values()}
            alive = [tensor for ref in tensors if (tensor := ref()) is not None and id(tensor) not in mine]
            others = max(others, len(alive))
            tensors[:] = map(weakref.ref, target.values())
            return super().run(source, target, **more)

    class Buffers(exchange.SharedBuffers):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            allocations.append(self)
            most[0] = max(most[0], sum(each.flat.numel() for each in allocations))

    with mock.patch.object(exchange, "SharedBuffers", Buffers), mock.patch.object(files, "Exchange", Exchange):
        round_trip(rank, address, source, path, hf, parallel)
    return len(allocations), most[0], sum(each.flat.numel() for each in allocations), others


def test_one_stream_and_three_buckets_serve_all_files(tmp_path: Path) -> None:
    hf = MODELS["qwen3_moe"]
    write(tmp_path / "source", hf)
    arguments = (tmp_path / "source", tmp_path / "out", hf, LAYOUTS["tp2 pp2 ep2"])
    for allocations, most, left, others in run_ranks(4, count_buffers, *arguments):
        assert allocations == 2, "one of each save"
        assert others == 0, "one file at a time in memory"
        assert 0 < most <= 3 * 1.05 * 100_000 and left == 0  # a bucket ends with room for checksums
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2


@pytest.mark.parametrize("model", MODELS)
def test_round_trip_on_disk(model: str, tmp_path: Path) -> None:
    """Loads files on 4 ranks and saves: equal tensors bit by bit, several files with an index, tokenizer included."""
    hf = MODELS[model]
    parallel = LAYOUTS["tp2 pp2 ep2"] if "num_experts" in hf else ParallelDims(4, tensor=2, pipeline=2)
    tensors = write(tmp_path / "source", hf)
    run_ranks(4, round_trip, tmp_path / "source", tmp_path / "out", hf, parallel)
    check_files(tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    saved_tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert same(saved_tensors, tensors)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert {f.name for f in (tmp_path / "out").iterdir()} == {
        ".exported.json", "config.json", "tokenizer.json", "model.safetensors.index.json", *(f.name for f in files)
    }  # fmt: skip
    assert {f.name for f in tmp_path.iterdir()} == {"source", "out"}
    names = {f.name for f in (tmp_path / "out").iterdir()}
    assert exported(tmp_path / "out", names), "a later export may replace it"
    assert not exported(tmp_path / "out", {*names, "README.md"}) and not exported(tmp_path / "source", {"config.json"})
    (tmp_path / "out" / "config.json").write_text("{}")
    assert not exported(tmp_path / "out", names), "somebody changed it"


def save_with_source_of_rank_0(rank: int, address: str, source: Path, path: Path, hf: dict[str, Any]) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    layout = architecture(hf).megatron_layout(hf, ParallelDims(2, pipeline=2), "local")
    params = empty(layout.shards[rank])
    load(source, layout.shards[rank], params)
    save(path, source if rank == 0 else source / "missing", layout, params)
    dist.destroy_process_group()


def test_only_rank_0_reads_the_source_of_a_save(tmp_path: Path) -> None:
    hf = MODELS["qwen3_moe"]
    tensors = write(tmp_path / "source", hf)
    run_ranks(2, save_with_source_of_rank_0, tmp_path / "source", tmp_path / "out", hf)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), tensors)


def test_a_failed_write_is_an_error_of_the_system(tmp_path: Path) -> None:
    """Raises OSError, which `on_all_ranks` passes to all ranks; safetensors raises SafetensorError."""
    file = tmp_path / "missing" / "model.safetensors"
    with pytest.raises(OSError, match=f"{file} cannot be written: .*No such file"):
        files._write({"weight": torch.ones(2)}, file, {})


def test_transformers_reads_what_we_write(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from skyrl_mega.config.schema import BuildConfig
    from skyrl_mega.models.tiny import build

    build(BuildConfig(layers=2), tmp_path / "built")
    hf = read_config(tmp_path / "built")
    run_ranks(1, round_trip, tmp_path / "built", tmp_path / "out", hf, ParallelDims())
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    before = {k: v for f in (tmp_path / "built").glob("*.safetensors") for k, v in load_file(f).items()}
    after = {k: v for f in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(f).items()}
    assert same(after, before)


def test_groups_keep_order_and_limit() -> None:
    sizes = {"a": 10, "b": 10, "c": 100, "d": 1}
    assert list(groups(sizes, sizes.__getitem__, 20)) == [["a", "b"], ["c"], ["d"]]
    assert list(groups([], len, 20)) == []


def spoil(path: Path, how: str) -> None:
    file = path / "b.safetensors"
    match how:
        case "cut off":
            file.write_bytes(file.read_bytes()[:-7])
        case "header cut off":
            file.write_bytes(file.read_bytes()[:20])
        case "not safetensors":
            file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        case "empty":
            file.write_bytes(b"")
        case "no file":
            file.unlink()
        case "missing tensor":
            tensors = load_file(file)
            tensors.pop("model.norm.weight", None)
            tensors.pop("lm_head.weight", None)
            save_file(tensors, file)
        case "wrong shape":
            tensors = load_file(file)
            name = next(iter(tensors))
            save_file({**tensors, name: torch.zeros(3, 5)}, file)
        case "wrong type":
            tensors = load_file(file)
            save_file({k: v.to(torch.int8) for k, v in tensors.items()}, file)
        case "index without tensor":
            index = json.loads((path / "model.safetensors.index.json").read_text())
            index["weight_map"].pop("model.norm.weight")
            (path / "model.safetensors.index.json").write_text(json.dumps(index))
        case "index leads out":
            index = json.loads((path / "model.safetensors.index.json").read_text())
            index["weight_map"]["model.norm.weight"] = "../b.safetensors"
            (path / "model.safetensors.index.json").write_text(json.dumps(index))
        case "no weights":
            for damaged_file in path.glob("*.safetensors*"):
                damaged_file.unlink()
        case "no config":
            (path / "config.json").unlink()
        case "broken config":
            (path / "config.json").write_text("{")
        case "no directory":
            shutil.rmtree(path)


@pytest.mark.parametrize(
    "how, words",
    [
        ("cut off", ["b.safetensors", "bytes", "cut off"]),
        ("header cut off", ["b.safetensors", "bytes", "cut off"]),
        ("not safetensors", ["b.safetensors", "no safetensors file"]),
        ("empty", ["b.safetensors", "0 bytes"]),
        ("no file", ["b.safetensors", "cannot be read"]),
        ("missing tensor", ["b.safetensors", "is missing"]),
        ("wrong shape", ["b.safetensors", "[3, 5]", "config.json makes it"]),
        ("wrong type", ["b.safetensors", "I8", "BF16"]),
        ("index without tensor", ["index.json", "model.norm.weight is missing"]),
        ("index leads out", ["index.json", "no file name"]),
        ("no weights", ["model.safetensors", "neither"]),
        ("no config", ["config.json", "is missing"]),
        ("broken config", ["config.json", "JSON"]),
        ("no directory", ["model.path", "is not there"]),
    ],
)
def test_a_spoiled_directory_is_refused_in_one_line(how: str, words: list[str], tmp_path: Path) -> None:
    hf = MODELS["qwen3"]
    path = tmp_path / "model"
    write(path, hf)
    spoil(path, how)
    shard = architecture(hf).megatron_layout(hf, ParallelDims(), "local").shards[0]
    for check in (lambda: check_files(path), lambda: load(path, shard, empty(shard))):
        with pytest.raises(UserError) as error:
            check()
        assert "\n" not in str(error.value)
        for word in words:
            assert word in str(error.value)


def test_checks_need_no_torch() -> None:
    """Checks a directory before any process starts, without an import of torch."""
    import subprocess
    import sys

    code = "import sys, skyrl_mega.hf_checkpoint.index, skyrl_mega.models.registry; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
