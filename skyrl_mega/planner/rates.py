"""Rates of a time estimate: the value of each, its source, and how far the true rate may be off.

A rate set in the settings counts first, then a measured rate (`cluster.rates_file`), then the default: a data sheet's
figure, or an assumption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.common import safe_read
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.pools import engine_cluster
from skyrl_mega.config.schema import ClusterConfig, Config
from skyrl_mega.planner.candidates import Change, changed, value_of
from skyrl_mega.planner.flops import BACKWARD
from skyrl_mega.planner.memory import on_cpu
from skyrl_mega.planner.times import PASSES

MEASURED, GIVEN, SHEET, DERIVED, ASSUMED = 1.1, 1.25, 1.25, 1.5, 2.0
"""Uncertainty of a rate by source: the true rate lies between the value divided and multiplied by this factor. A rate
derived from the difference of two measurements is 13 % off if one of them is 2 % off, and other models have other
layers. A data sheet's link is reached to about 80 %; a set rate is somebody's own figure for other sizes; an assumed
share may be half or twice as large (published steps of 30B models on H100 reach 10 to 40 % of the peak)."""
DEFAULTS: Mapping[str, tuple[str, float]] = {
    "rates.tflops": ("H100 SXM data sheet", 1.0),
    "rates.tflops_share": ("assumed", ASSUMED),
    "rates.memory_gb_s": ("H100 SXM data sheet", 1.0),
    "rates.memory_share": ("assumed", ASSUMED),
    "rates.layer_us": ("assumed", ASSUMED),
    "rates.engine_layer_us": ("assumed", ASSUMED),
    "rates.engine_step_us": ("assumed: in engine_layer_us", 1.0),
    "rates.trajectory_us": ("assumed: none", 1.0),
    "rates.sync_s": ("assumed: none", 1.0),
    "rates.step_s": ("assumed: none", 1.0),
    "rates.host_gb_s": ("PCIe 5.0 x16 data sheet", SHEET),
    "rates.host_node_gb_s": ("assumed: two sockets, DDR5", ASSUMED),
    "rates.disk_gb_s": ("assumed", ASSUMED),
    "topology.nic_gb_s": ("400 Gb/s data sheet", SHEET),
    "topology.fabric_gb_s": ("NVLink 4 data sheet", SHEET),
    "topology.device_gb_s": ("assumed", SHEET),
}
"""Rate → source and uncertainty of the default. A share carries the uncertainty of its peak."""
POOL = (
    ("tflops", "{} data sheet", 1.0),
    ("memory_gb_s", "{} data sheet", 1.0),
    ("nic_gb_s", "", SHEET),
    ("fabric_gb_s", "{} data sheet", SHEET),
)
"""Rate of the engines' nodes in a pool, source and uncertainty of the default; shares are those of `cluster.rates`."""
FOLDER = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu"
"""Results of `python -m benchmarks.gpu`, a file per device; absent outside of a checkout."""
DEVICE, SAME_CHIP, OTHERS = "H100", "H200", ("PCIe", "NVL")
"""Device of the defaults, a device with the same chip and a faster memory, and slower devices with one of these words
in their names."""
CHIP_RATES = frozenset({"rates.tflops_share", "rates.layer_us", "rates.host_gb_s"})
"""Rates that do not depend on a GPU's memory: those of an H200 hold for an H100."""
FORMAT = "give a file of python -m benchmarks.gpu or python -m benchmarks.bet, or leave cluster.rates_file out"
STEP = "FP8 products"
"""Part of the proof `te_train` that says what launches cost."""
UPDATE, LOGPROBS = "… of which the optimizer", "log-probs, recomputing not counted"
TRAIN = "forward and backward, recomputing not counted"
SLICE_LAYERS = 48
"""Layers of the model in `te_train` (`benchmarks/gpu/slice.py`)."""
RECOMPUTED = 4 / 3
"""Passes computed by the measured step, which recomputes every layer, over the passes counted in its figure."""


@dataclass(frozen=True)
class Rate:
    """A rate used by time estimates, with source and uncertainty."""

    key: str
    """Key of the setting."""
    value: float
    """Value in the setting's unit."""
    source: str
    """Source of the value, for people: data sheet, assumption, settings, or measured figure and file."""
    factor: float
    """Uncertainty: the true rate lies between value / factor and value · factor."""


def with_measured(config: Config) -> tuple[Config, list[Rate]]:
    """Returns the settings with measured rates in place of defaults, and all rates with their sources.

    Measured rates come from `cluster.rates_file`. If the setting is null, on GPUs: from the first file, by name, of
    `FOLDER` with results of an H100 SXM; or else from the first file of an H200, but only the rates named in
    `CHIP_RATES`. A rate set to its default value counts as a default, and a measured rate replaces it.

    Raises:
        UserError: The file of measured rates cannot be read or has another format.
    """
    measured, file = _measured(config)
    on_gpus = not on_cpu(config)
    default, change, rates = Config(cluster=ClusterConfig()), list[tuple[str, Any]](), list[Rate]()
    for name, (source, factor) in DEFAULTS.items():
        key = f"cluster.{name}"
        value = value_of(config, key)
        if value != value_of(default, key):
            source, factor = "settings", GIVEN
        elif name in measured:
            value, what = measured[name]
            change.append((key, value))
            source, factor = f"measured: {what}, {file}", DERIVED if name == "rates.layer_us" and on_gpus else MEASURED
        rates.append(Rate(key, value, source, factor))
    return changed(config, tuple(change)), [*rates, *_of_pool(config)]


def _of_pool(config: Config) -> list[Rate]:
    """Returns the rates of the engines' GPUs and links, if the engines have nodes of their own."""
    pool, cluster = config.cluster.pools.engines, engine_cluster(config)
    if pool is None:
        return []
    values = {**vars(cluster.rates), **vars(cluster.topology)}
    sources = {name: ("settings", GIVEN) if getattr(pool, name) else (text, factor) for name, text, factor in POOL}
    return [
        Rate(f"cluster.pools.engines.{name}", values[name], source.format(pool.gpu), factor)
        for name, (source, factor) in sources.items()
        if name != "nic_gb_s" or pool.nic_gb_s  # otherwise the rate is that of `cluster.topology`
    ]


def has_times(config: Config) -> bool:
    """Returns True if times can be estimated: on GPUs, and on a CPU with measured rates."""
    return not on_cpu(config) or config.cluster.rates_file is not None


def with_scaled_rate(config: Config, rate: Rate, factor: float) -> Config:
    """Returns new settings with `rate.value` · `factor` as the value of the setting `rate.key`, whatever its value in
    `config`. A share (`…_share`) becomes at most 1."""
    value = rate.value * factor
    change: Change = ((rate.key, min(1.0, value) if rate.key.endswith("_share") else value),)
    return changed(config, change)


MeasuredRates = Mapping[str, tuple[float, str]]
"""Rate → value, and what was measured."""


def _measured(config: Config) -> tuple[MeasuredRates, str]:
    """Returns the measured rates, and the name of the file; no rates without a file."""
    given, names = config.cluster.rates_file, frozenset(DEFAULTS)
    file = Path(given) if given is not None else None if on_cpu(config) else _results_of(DEVICE)
    if file is None and not on_cpu(config):
        file, names = _results_of(SAME_CHIP), CHIP_RATES
    if file is None:
        return {}, ""
    content = safe_read.read_json(file, FORMAT)
    try:
        rates = _stated(content) if "rates" in content else _from_proofs(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"not a file of rates ({why})", key="cluster.rates_file", value=str(file), fix=FORMAT
        ) from error
    return {name: rate for name, rate in rates.items() if name in names}, file.name


def _results_of(device: str) -> Path | None:
    """Returns the first file in `FOLDER` with results of a device, `DEVICE` or `SAME_CHIP`; None without a file."""
    for file in sorted(FOLDER.glob("*.json")):
        name = str(safe_read.read_json(file, f"remove {file}").get("device", {}).get("name", ""))
        if device in name.split() and not any(word in name for word in OTHERS):
            return file
    return None


def _stated(content: Mapping[str, Any]) -> MeasuredRates:
    """Returns the rates of a file that names each (`python -m benchmarks.bet`)."""
    device = str(content["device"]["name"])
    for name, value in content["rates"].items():
        if name not in DEFAULTS or not isinstance(value, int | float) or not 0 <= value < 1e15:
            raise ValueError(f"{name}: {value}")
    return {name: (float(value), device) for name, value in content["rates"].items()}


def _from_proofs(content: Mapping[str, Any]) -> MeasuredRates:
    """Returns the rates contained in results of `python -m benchmarks.gpu`: figures of passed proofs, and of a failed
    proof the figures of parts (`part: figure`) of which nothing was wrong."""
    figures = {
        (proof, figure["name"]): float(figure["value"])
        for proof, result in content["proofs"].items()
        for figure in result.get("figures", [])
        if result.get("status") == "passed" or _part_holds(result, figure["name"])
    }
    rates: dict[str, tuple[float, str]] = {}
    for name, proof, figure, convert in FIGURES:
        if name not in rates and figures.get((proof, figure), 0.0) > 0:
            rates[name] = convert(figures[proof, figure]), f"{proof}, {figure}"
    launches = _launches({figure: value for (proof, figure), value in figures.items() if proof == "te_train"})
    if launches is not None and "rates.tflops_share" not in rates:  # the share of a whole step includes launches
        rates["rates.layer_us"] = launches, f"te_train, {STEP}"
    return rates


def _part_holds(result: Mapping[str, Any], name: str) -> bool:
    """Returns True if `name` is a figure of a part of a failed proof, and nothing was wrong in this part."""
    part, colon, _ = name.partition(":")
    wrong = result.get("wrong", [])
    return result.get("status") == "failed" and bool(colon and wrong) and not any(f"{part}:" in text for text in wrong)


def _launches(figures: Mapping[str, float]) -> float | None:
    """Returns the microseconds of kernel launches per layer in a forward pass, from the figures of a training step that
    recomputes every layer; None without them.

    A forward pass takes c + l seconds, products and launches, and a training step takes m·c + n·l seconds by the
    numbers of passes m and n in `times.PASSES`: two equations for c and l. c is that of FP8 products, and is not used.
    """
    try:
        update, logprobs, train = (figures[f"{STEP}: {name}"] for name in (UPDATE, LOGPROBS, TRAIN))
        whole = next(value for name, value in figures.items() if name.startswith(f"{STEP}: a training step of"))
    except (KeyError, StopIteration):
        return None
    products, _, launches = PASSES["full"]
    step = whole - update
    forward = step * train / (BACKWARD * logprobs)  # the same operations, at another speed
    return max(0.0, (products * forward - step) / (products - launches) / SLICE_LAYERS * 1e6)


def _share(tflops: float) -> float:
    """Returns the share of the data sheet's peak reached by a measured step with recomputation."""
    return min(1.0, RECOMPUTED * tflops / ClusterConfig().rates.tflops)


def _same(value: float) -> float:
    return value


def _twice(value: float) -> float:
    """Returns the traffic of a copy: each byte is read and written."""
    return 2 * value


FIGURES: tuple[tuple[str, str, str, Callable[[float], float]], ...] = (
    ("rates.tflops_share", "te_slice", "all, 48 layers: forward and backward", _share),
    ("rates.tflops_share", "slice", "forward and backward, recomputing not counted", _share),
    ("rates.memory_gb_s", "device", "copy within memory", _twice),
    ("rates.host_gb_s", "device", "pinned host memory to device", _same),
    ("topology.device_gb_s", "device", "copy within memory", _same),
)
"""Rate, proof and figure of `benchmarks/gpu`, and conversion; the first figure that is present counts."""
