"""Proof: where the time of a training step on Transformer Engine goes, by precision and size of the micro-batch.

Twelve layers of the slice take a step in bfloat16 and in FP8, with micro-batches of 8,192 and 32,768 tokens. Each
precision has a separate process. All import at once, then measure one after another. An exception in one variant is
recorded as a note, and the others run.
"""

from __future__ import annotations

import fcntl
import gc
import json
import math
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import events, limits, parts, slice
from benchmarks.gpu.processes import Job, environment, together
from benchmarks.gpu.proof import Bench
from benchmarks.gpu.te_step import PRECISIONS
from skyrl_mega.planner.flops import flops

LAYERS = 12
SIZES = {8192: 1024, 32768: 4096}
"""Tokens of a micro-batch → tokens of each sequence."""
BUDGET_S = 75.0
"""No variant begins later than this after the proof's start, on CUDA."""
TIMEOUT_S = 60.0
"""Seconds after the budget until every process is killed."""
IMPORT_S = 40.0
"""Longest wait for the imports of the others."""
KEPT = 600
"""Characters kept of an exception."""


@dataclass(frozen=True)
class Variant:
    """A measured combination of settings, all in the same precision."""

    name: str
    sizes: tuple[int, ...]
    recompute: str = "full"
    causes: bool = False
    """True to look for the operations that take the host's time and make the host wait."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables of Transformer Engine."""
    accumulate: bool = False
    """True to let Transformer Engine add weight gradients to the gradient buffer within the matrix product."""


CUTLASS = ("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
FEWER = Variant("gradients added in the product", (8192,), accumulate=True)
VARIANTS = {
    "bfloat16": (
        Variant("recompute full", (8192, 32768), causes=True),
        Variant("recompute none", (8192,), recompute="none"),
        # One launch for all experts. Transformer Engine has this for Hopper and 16-bit numbers only.
        Variant("recompute none, CUTLASS grouped", (8192,), recompute="none", env=(CUTLASS,)),
    ),
    "FP8 products": (Variant("recompute full", (8192, 32768), causes=True), FEWER),
    "FP8 products and parameters": (Variant("recompute full", (8192, 32768)),),
}
"""Precision → variants, in the order of measuring; the one that may break the process comes last."""


def prove(bench: Bench) -> None:
    """Measures every variant; passes if something was measured, with finite numbers."""
    end = time.monotonic() + (BUDGET_S if bench.cuda else math.inf)
    gemm = limits.gemm_tflops(bench)
    precisions = [*VARIANTS] if bench.cuda else ["bfloat16"]
    answers = [bench.folder / f"{precision}.jsonl" for precision in precisions]
    for path in answers:
        path.touch()
    places = [str(path) for path in answers]
    jobs = [Job(_measure, (bench.tiny, places, at, name, end)) for at, name in enumerate(precisions)]
    try:
        ended = together(*jobs, timeout_s=BUDGET_S + TIMEOUT_S)
        bench.note("processes that were killed", [name for name, how in zip(precisions, ended, strict=True) if how])
    except (RuntimeError, TimeoutError) as error:
        bench.note("a process failed", str(error)[-KEPT:])
    numbers: list[float] = []
    for path in answers:
        for line in path.read_text().splitlines():
            numbers += _report(bench, json.loads(line), gemm)
    bench.holds("something was measured", bool(numbers))
    bench.holds("every number is finite", all(map(math.isfinite, numbers)), numbers)
    if not bench.cuda:
        bench.left_out("FP8, kernels, launches and waits: they exist on CUDA alone")


def _report(bench: Bench, seen: dict[str, Any], gemm: float) -> list[float]:
    """Records an answer, and returns the numbers."""
    name, numbers = seen["name"], list[float]()
    for what, value in seen["notes"].items():
        bench.note(f"{name}: {what}", value)
    for what, (seconds, work) in seen["passes"].items():
        rate = work / seconds / 1e12
        bench.figure(f"{name}: {what}", seconds, "s")
        bench.figure(f"{name}: {what}, recomputing not counted", rate, "TFLOP/s", limit=gemm,
                     limit_of="a large bfloat16 product")  # fmt: skip
        numbers += [seconds, rate]
    for what, value in seen["sums"].items():
        bench.figure(f"{name}: {what}", value, "s" if what.endswith("seconds") else "")
        numbers.append(value)
    return numbers


# ---- the process of a precision --------------------------------------------------------------------------------------


def _measure(tiny: bool, answers: list[str], place: int, precision: str, end: float) -> None:
    """Writes a line into the answers' file for each size of each variant: what is measured outlives a later crash."""
    path = Path(answers[place])
    bench = Bench(path.parent / "unread", path.parent, tiny=tiny)
    with _turn(answers, place):
        rank, recompute = None, ""
        for variant in VARIANTS[precision]:
            try:
                if recompute != variant.recompute:
                    rank, recompute = None, ""
                    gc.collect()  # a rank's hooks refer to the rank
                    rank, recompute = _open(bench, precision, variant.recompute), variant.recompute
            except Exception:
                _answer(path, f"{precision}, {variant.name}", _failed())
                continue
            for tokens in variant.sizes[:1] if tiny else variant.sizes:
                late = time.monotonic() > end
                try:
                    found = _nothing({"left out": "no time is left"}) if late else _one(bench, rank, variant, tokens)
                except Exception:
                    found = _failed()
                _answer(path, f"{precision}, {variant.name}, {tokens} tokens", found)


@contextmanager
def _turn(answers: list[str], place: int) -> Iterator[None]:
    """Imports what all need, then waits until all have imported and the process before has ended: timings are
    undisturbed. A process holds the lock of a file until the end, even if killed."""
    with open(f"{answers[place]}.turn", "w") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        try:
            import skyrl_mega.megatron.objectives
            import skyrl_mega.megatron.worker  # noqa: F401
        finally:
            Path(f"{answers[place]}.ready").touch()
        _wait(lambda: all(Path(f"{path}.ready").exists() for path in answers), IMPORT_S)
        if place:
            with open(f"{answers[place - 1]}.turn", "a") as before:
                _wait(lambda: _free(before), BUDGET_S)
        yield


def _free(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(until: Callable[[], bool], seconds: float) -> None:
    """Returns when `until` is true, at the latest after `seconds`."""
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.05)


def _answer(path: Path, name: str, found: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"name": name, **found}) + "\n")


def _nothing(notes: dict[str, Any]) -> dict[str, Any]:
    return {"notes": notes, "passes": {}, "sums": {}}


def _failed() -> dict[str, Any]:
    """Returns an answer with the end of the present traceback."""
    return _nothing({"failed": traceback.format_exc()[-KEPT:]})


def _open(bench: Bench, precision: str, recompute: str) -> Any:
    """Opens the slice with the settings of a run, in the given precision."""
    hf, parallel = parts.slice_of_30b(tiny_size=bench.tiny, layers=LAYERS)
    policy = parts.policy_config(
        "te" if bench.cuda else "local", recompute=recompute, logit_chunk=slice.CHUNK, micro_tokens=max(SIZES),
        precision=PRECISIONS[precision],
    )  # fmt: skip
    return parts.open_rank(hf, parallel, device=bench.device, policy=policy)


def _one(bench: Bench, rank: Any, variant: Variant, tokens: int) -> dict[str, Any]:
    """Returns what is measured at one size: seconds and operations of each pass, sums of a profile, and notes."""
    lengths = [16] * 4 if bench.tiny else [SIZES[tokens]] * (tokens // SIZES[tokens])
    decoder = parts.described(rank.hf)
    work = flops(decoder)
    counted = sum(lengths) * (work.matrices + work.attention * lengths[0] / 2)
    batch = parts.rows(lengths, rank.hf["vocab_size"])
    modules = [m for chunk in rank.chunks for m in chunk.modules() if hasattr(m, "fuse_wgrad_accumulation")]
    step = rank.optimizer.step
    try:
        for module in modules:
            module.fuse_wgrad_accumulation = variant.accumulate
        with environment(dict(variant.env)):
            passes = Passes(bench, rank, batch)
            for _ in range(2):  # warm-up: the first use of kernels, of the allocator, and of Adam's moments
                passes.backward()
            seconds = sorted(passes.backward() for _ in range(3))[1]
            forward = bench.seconds(lambda: rank.logprobs([batch]), repeats=3)
            found: dict[str, Any] = {
                "passes": {"forward and backward": (seconds, 3 * counted), "log-probs": (forward, counted)},
                "sums": {},
                "notes": {"share of the head in the counted operations": sum(lengths) * work.head / counted},
            }
            if bench.cuda:
                _profile(passes, seconds, decoder.layers, found)
            if variant.causes and tokens == min(SIZES):
                _causes(passes, found["notes"])
    finally:
        rank.optimizer.step = step
        for module in modules:
            module.fuse_wgrad_accumulation = False
    return found


def _profile(passes: Passes, seconds: float, layers: int, found: dict[str, Any]) -> None:
    """Adds time of kernels, launches and waits of a forward and backward pass to `found`."""
    recorded = profile(activities=[ProfilerActivity.CUDA])
    watched = passes.backward(recorded)
    seen = events.spans(recorded)
    total = events.sums(seen)
    found["sums"] |= {
        "forward and backward, profiled, seconds": watched,
        "kernels, seconds": total["kernels"],
        "GPU at work, seconds": total["busy"],
        "share of the time with the GPU at work": total["busy"] / seconds,
        "launches of a layer": total["launches"] / layers,
        "waits of the host of a layer": total["waits"] / layers,
    }
    found["notes"]["kernels with most time (name, count, ms)"] = events.longest(seen)


def _causes(passes: Passes, notes: dict[str, Any]) -> None:
    """Adds the operations with most time on the host, and the causes of waits, to `notes`."""
    cuda = passes.bench.cuda
    recorded = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])
    passes.backward(recorded)
    notes["operations of the host with most time of their own (name, count, ms)"] = events.operations(recorded)
    notes["waits of the host, within"] = events.waits(recorded)[: events.MOST]
    if cuda:
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with waiting_lines() as lines:
            passes.backward()
    finally:
        if cuda:
            torch.cuda.set_sync_debug_mode("default")
    notes["lines that make the host wait, optimizer included"] = lines.most_common(events.MOST)


class Passes:
    """Forward and backward passes of training steps, timed and profiled up to the optimizer's step. Replaces
    `rank.optimizer.step`."""

    def __init__(self, bench: Bench, rank: Any, batch: Any) -> None:
        self.bench, self._rank, self._batch = bench, rank, batch
        self._profile: Any = None
        self._end = 0.0
        step = rank.optimizer.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._stop()
            return step(*args, **kwargs)

        rank.optimizer.step = watched

    def backward(self, recorded: Any = None) -> float:
        """Takes a training step, and returns the seconds up to the optimizer's. A given profile records this part."""
        from skyrl_mega.megatron.objectives import supervised

        self.bench.synchronise()
        if recorded is not None:
            recorded.start()
        self._profile, start = recorded, time.perf_counter()
        try:
            self._rank.train([self._batch], supervised)
        finally:
            seconds = self._end - start
            self._stop()
        return seconds

    def _stop(self) -> None:
        self.bench.synchronise()
        self._end = time.perf_counter()
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


@contextmanager
def waiting_lines() -> Iterator[Counter[str]]:
    """Counts the Python lines of torch's warnings about waits: the two innermost frames outside torch."""
    seen = Counter[str]()

    def record(message: object, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        if "synchronizing" in str(message):
            frames = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
            outside = [f for f in frames if f.filename != __file__ and "/torch/" not in f.filename]
            named = [f for f in outside if not f.filename.endswith("warnings.py")][:2]
            seen[" < ".join(f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno} {f.name}" for f in named)] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record  # type: ignore[assignment]
        yield seen
