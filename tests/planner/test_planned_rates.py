"""Rates of an estimate and their sources, with files as `benchmarks.gpu` writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.catalogue import PROOFS
from benchmarks.gpu.results import Results
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.planner import rates
from skyrl_mega.planner.rates import Rate

SXM = "NVIDIA H100 80GB HBM3"


def written(folder: Path, device: str = SXM, status: str = "passed", copy: float = 1400.0) -> Path:
    """Writes results of the proofs `device` and `slice`."""
    results = Results(folder, {"name": device}, {})
    figures = {
        "device": {"copy within memory": copy, "pinned host memory to device": 55.0},
        "slice": {"forward and backward, recomputing not counted": 222.525},
    }
    for proof in PROOFS:
        if proof.name in figures:
            each = [{"name": name, "value": value, "unit": ""} for name, value in figures[proof.name].items()]
            results.put(proof, {"status": status, "figures": each})
    return results.path


def by_key(config: Config) -> dict[str, Rate]:
    return {rate.key.removeprefix("cluster."): rate for rate in rates.with_measured(config)[1]}


def gpus(**changes: object) -> Config:
    config = Config()
    config.cluster.device = "cuda"
    for name, value in changes.items():
        setattr(config.cluster, name, value)
    return config


def test_without_measurements_they_are_the_data_sheets_and_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "FOLDER", Path("/nonexistent"))
    config = gpus()
    planned, listed = rates.with_measured(config)
    assert planned == config
    assert {rate.source for rate in listed if rate.factor == 1} == {
        "H100 SXM data sheet",
        "assumed: in engine_layer_us",
        "assumed: none",
    }
    assert by_key(config)["rates.tflops_share"] == Rate("cluster.rates.tflops_share", 0.2, "assumed", 2.0)


def test_measured_rates_replace_assumed_ones_and_settings_replace_both(tmp_path: Path) -> None:
    file = written(tmp_path)
    config = gpus(rates_file=str(file))
    planned, _ = rates.with_measured(config)
    assert planned.cluster.rates.tflops_share == pytest.approx(0.3), "4/3 of 222.5 TFLOP/s, of 989"
    assert planned.cluster.rates.memory_gb_s == 2800, "a copy reads and writes"
    assert planned.cluster.rates.host_gb_s == 55 and planned.cluster.topology.device_gb_s == 1400
    listed = by_key(config)
    assert listed["rates.host_gb_s"].source == f"measured: device, pinned host memory to device, {file.name}"
    assert listed["rates.host_gb_s"].factor == rates.MEASURED < listed["rates.layer_us"].factor
    config.cluster.rates.host_gb_s = 20.0
    assert by_key(config)["rates.host_gb_s"] == Rate("cluster.rates.host_gb_s", 20.0, "settings", rates.GIVEN)


def test_failed_proofs_measure_nothing(tmp_path: Path) -> None:
    config = gpus(rates_file=str(written(tmp_path, status="failed")))
    assert rates.with_measured(config)[0] == config


def test_launches_follow_from_a_measured_step(tmp_path: Path) -> None:
    """A forward pass of 0.3 s of products and 0.48 s of launches (10 ms a layer), and a step of 4 and 3 times as much
    with half a second of the optimizer: the rate is 10 ms, if nothing is wrong in this part of the proof."""
    forward, step, tera = 0.78, 4 * 0.3 + 3 * 0.48, 20.0
    speed = {
        "a training step of 8192 tokens": step + 0.5,
        rates.UPDATE: 0.5,
        rates.LOGPROBS: tera / forward,
        rates.TRAIN: 3 * tera / step,
    }
    figures = [{"name": f"{rates.STEP}: {name}", "value": value, "unit": ""} for name, value in speed.items()]
    (proof,) = (proof for proof in PROOFS if proof.name == "te_train")

    def read(status: str, wrong: list[str], file: Path | None = None) -> Rate:
        results = Results(tmp_path / str(wrong), {"name": SXM}, {}, [file] if file else [])
        results.put(proof, {"status": status, "figures": figures, "wrong": wrong})
        return by_key(gpus(rates_file=str(results.path)))["rates.layer_us"]

    assumed = Config().cluster.rates.layer_us
    assert read("passed", []).value == pytest.approx(10_000)
    other = read("failed", ["not so: FP8 products and parameters: the loss falls"])
    assert other.value == pytest.approx(10_000) and other.factor == rates.DERIVED
    assert read("failed", [f"not so: {rates.STEP}: the loss falls; seen: 2"]).value == assumed
    assert read("failed", []).value == assumed, "the proof ended before it knew what was wrong"
    assert read("passed", ["a slice"], written(tmp_path)).value == assumed, "the share of a whole step has launches"


def test_results_of_the_checkout_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 has the chip of an H100, and another memory."""
    monkeypatch.setattr(rates, "FOLDER", tmp_path)
    written(tmp_path, "NVIDIA H100 PCIe", copy=900.0)
    assert rates.with_measured(gpus())[0] == gpus()
    written(tmp_path, "NVIDIA H200", copy=2100.0)
    planned = rates.with_measured(gpus())[0].cluster
    assert planned.rates.host_gb_s == 55 and planned.rates.tflops_share == pytest.approx(0.3)
    assert planned.rates.memory_gb_s == Config().cluster.rates.memory_gb_s
    assert planned.topology == Config().cluster.topology
    written(tmp_path)
    assert rates.with_measured(gpus())[0].cluster.rates.memory_gb_s == 2800
    assert rates.with_measured(gpus(device="cpu"))[0] == gpus(device="cpu"), "no rates of a GPU for a CPU"


def test_a_cpu_has_times_with_a_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    file.write_text(json.dumps({"device": {"name": "two cores"}, "rates": {"rates.tflops": 0.05}}))
    assert not rates.has_times(gpus(device="cpu"))
    config = gpus(device="cpu", rates_file=str(file))
    assert rates.has_times(config) and rates.with_measured(config)[0].cluster.rates.tflops == 0.05
    assert by_key(config)["rates.tflops"].source == "measured: two cores, cpu.json"


@pytest.mark.parametrize(
    "text",
    ["{}", '{"rates": {}}', '{"device": {"name": "x"}, "rates": {"speed": 1}}', '{"device": 1, "proofs": {"a": 1}}'],
)
def test_another_format_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rates.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"cluster\.rates_file = .*rates\.json: not a file of rates"):
        rates.with_measured(gpus(rates_file=str(file)))


def test_a_share_stays_below_one() -> None:
    moved = rates.with_scaled_rate(Config(), Rate("cluster.rates.memory_share", 0.7, "assumed", 2.0), 2.0)
    assert moved.cluster.rates.memory_share == 1.0
