"""The cache of plans on disk: equal plans after a reload, and no use of damaged or foreign files."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from skyrl_mega.models.registry import architecture
from skyrl_mega.weights.plan.cache import cached_plan
from skyrl_mega.weights.plan.plan import Plan, plan
from tests.weights.grids import LAYOUTS, MODELS


def make(engines: int = 2) -> Plan:
    hf = MODELS["qwen3_moe"]
    arch = architecture(hf)
    return plan(arch.megatron_layout(hf, LAYOUTS["tp2 ep2"], "local"), arch.engine_layout(hf, 1, engines))


def never() -> Plan:
    raise AssertionError("the plan is made again")


def equal(a: Plan, b: Plan) -> bool:
    pairs = [(getattr(a.parts, f), getattr(b.parts, f)) for f in ("tensor", "start", "shape", "nbytes")]
    pairs += [(getattr(a.demand, f), getattr(b.demand, f)) for f in ("kind", "holders", "takers")]
    pairs += [(x.parts, y.parts) for x, y in zip(a.routes, b.routes, strict=True)]
    ends = [[(r.source, r.receivers) for r in p.routes] for p in (a, b)]
    return (
        all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)
        and ends[0] == ends[1]
        and list(a.parts.tensors.items()) == list(b.parts.tensors.items())
        and a.topology == b.topology
    )


def test_the_same_plan_comes_back(tmp_path: Path) -> None:
    new_plan = cached_plan(tmp_path / "new", ["a", 1], make)
    assert equal(cached_plan(tmp_path / "new", ["a", 1], never), new_plan)
    assert equal(new_plan, make())
    assert [f.suffix for f in (tmp_path / "new").iterdir()] == [".npz"]


def test_another_key_is_another_plan(tmp_path: Path) -> None:
    cached_plan(tmp_path, {"engines": 2}, make)
    assert equal(cached_plan(tmp_path, {"engines": 1}, lambda: make(1)), make(1))


def spoil(file: Path, how: str, other: bytes) -> None:
    data = file.read_bytes()
    match how:
        case "empty":
            file.write_bytes(b"")
        case "cut off":
            file.write_bytes(data[: len(data) // 2])
        case "a bit is wrong":
            file.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
        case "foreign":
            file.write_bytes(other)
        case "no arrays":
            np.savez(file, x=np.zeros(3))
        case "pickled":
            np.savez(file, header=np.array([{"key": "?"}], dtype=object))


@pytest.mark.parametrize("how", ["empty", "cut off", "a bit is wrong", "foreign", "no arrays", "pickled"])
def test_a_spoiled_file_is_replaced(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached_plan(tmp_path / "other", "other", lambda: make(1))
    (other,) = (tmp_path / "other").iterdir()
    cached_plan(tmp_path / "here", "key", make)
    (file,) = (tmp_path / "here").iterdir()
    spoil(file, how, other.read_bytes())
    with caplog.at_level(logging.WARNING):
        assert equal(cached_plan(tmp_path / "here", "key", make), make())
    assert str(file) in caplog.text
    assert equal(cached_plan(tmp_path / "here", "key", never), make())


def test_a_folder_that_cannot_be_written_costs_the_cache_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert equal(cached_plan(tmp_path / "file" / "folder", "key", make), make())
    assert "cannot be stored" in caplog.text


def test_a_plan_with_another_digest_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = make(1), make()
    assert old.digest != new.digest
    cached_plan(tmp_path, "key", lambda: old)
    assert equal(cached_plan(tmp_path, "key", never, old.digest), old)
    with caplog.at_level(logging.WARNING):
        assert equal(cached_plan(tmp_path, "key", make, new.digest), new)
    assert new.digest in caplog.text
    assert equal(cached_plan(tmp_path, "key", never, new.digest), new)
