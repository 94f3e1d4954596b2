"""`make gpu` without a GPU: running proofs, saving results, and a rehearsal of all proofs with tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.catalogue import PROOFS
from benchmarks.gpu.results import CUDA_ONLY, CUT, FAILED, NOT_HERE, PASSED, RUNNING, TIMEOUT, WAITING, Results, table
from benchmarks.gpu.runner import run
from tests.benchmarks.proofs import DEVICE, kept, proof, quiet, rehearsed, results
from tests.conftest import ROOT

# ---- running and saving ----------------------------------------------------------------------------------------------


def test_what_goes_wrong_is_kept_and_the_next_proof_runs(path: Path) -> None:
    proofs = [proof(name) for name in ("raises", "dies", "wrong", "not_a_number", "good")]
    assert not run(proofs, results(path), quiet())
    saved = kept(path)
    assert {name: saved[name]["status"] for name in saved} == {**dict.fromkeys(saved, FAILED), "good": PASSED}
    assert saved["raises"]["figures"] == [{"name": "before it", "value": 1.0, "unit": "s"}]
    assert saved["raises"]["why"] == "RuntimeError: the root cause"
    assert "in raises" in saved["raises"]["traceback"]
    assert "code 7" in saved["dies"]["why"] and "last words" in saved["dies"]["log"]
    assert saved["wrong"]["wrong"] == [
        "error: 0.5 nats, at most 0.1 is allowed",
        "not so: water is dry; seen: water",
    ]
    assert "nan" in saved["not_a_number"]["wrong"][0]
    (figure,) = saved["good"]["figures"]
    assert (figure["value"], figure["limit"], figure["ratio"]) == (30.0, 40.0, 0.75)
    lines = table(proofs, results(path))
    header, *rows = lines.splitlines()
    assert header.split() == ["proof", "status", "figure", "limit", "ratio", "seconds"]
    assert next(row for row in rows if row.startswith("good")).split()[1:7] == [
        *("passed", "speed", "30", "GB/s", "40", "0.750")
    ]  # fmt: skip
    assert "raises: RuntimeError: the root cause" in rows


def test_a_proof_that_hangs_ends_with_all_it_started(path: Path) -> None:
    start = time.monotonic()
    assert not run([proof("hangs", limit_s=12.0), proof("good")], results(path), quiet())
    assert time.monotonic() - start < 150
    saved = kept(path)
    assert (saved["hangs"]["status"], saved["good"]["status"]) == (TIMEOUT, PASSED)
    assert saved["hangs"]["figures"]
    deadline = time.monotonic() + 60
    while _runs(saved["hangs"]["notes"]["other"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(saved["hangs"]["notes"]["other"])


def _runs(pid: int) -> bool:
    """Returns True if the process runs; zombies do not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_figures_are_on_disk_while_the_proof_runs(path: Path) -> None:
    """Reads figures during the run; a proof whose runner was killed runs again in the next call."""
    thread = threading.Thread(target=run, args=([proof("hangs", limit_s=8.0)], results(path), quiet()))
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            saved = kept(path)["hangs"] if path.exists() else {}
            if saved.get("figures"):
                break
            time.sleep(0.05)
        assert (saved["status"], saved["figures"][0]["name"]) == (RUNNING, "before it")
    finally:
        thread.join()
    assert kept(path)["hangs"]["status"] == TIMEOUT
    stopped = json.loads(path.read_text())
    stopped["proofs"] = {"good": {"status": RUNNING, "figures": []}}
    path.write_text(json.dumps(stopped))
    assert run([proof("good")], results(path), quiet())


def test_a_second_call_goes_on(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROOFS_RUN", str(tmp_path / "runs"))
    large = proof("good", seconds=100.0, limit_s=200.0)
    # The first call is too short for the second proof.
    assert not run([proof("counts"), large], results(path), quiet(50.0))
    assert results(path).status(large) == WAITING
    assert run([proof("counts"), large], results(path), quiet(150.0))
    assert kept(path)["counts"]["figures"][0]["value"] == 1  # not run again: the proof has a verdict
    assert run([proof("counts")], results(path), quiet(again=True))
    assert kept(path)["counts"]["figures"][0]["value"] == 2


def test_what_the_end_of_a_call_cuts_short_has_no_verdict(path: Path) -> None:
    cut = proof("hangs", limit_s=500.0)
    start = time.monotonic()
    assert not run([cut], results(path), quiet(13.0))
    assert time.monotonic() - start < 40
    assert kept(path)["hangs"]["status"] == CUT
    assert not run([proof("hangs", limit_s=2.0)], results(path), quiet())  # starts again
    assert kept(path)["hangs"]["status"] == TIMEOUT


def test_paths_of_the_checkout_are_kept_relative(path: Path) -> None:
    saved = results(path)
    saved.put(proof("good"), {"status": FAILED, "log": f"{ROOT}/benchmarks/gpu/head.py:84: a warning"})
    assert kept(path)["good"]["log"] == "benchmarks/gpu/head.py:84: a warning"


def test_results_of_another_device_are_kept_apart(path: Path, tmp_path: Path) -> None:
    """Saves results of an H100 and an H200 in separate files: a call on one device neither fails for the other's
    results nor mixes them."""
    results(path).put(proof("good"), {"status": PASSED})
    other = Results(path.parent, {"name": "NVIDIA H200"}, {})
    assert other.status(proof("good")) == WAITING
    other.put(proof("wrong"), {"status": FAILED})
    assert (results(path).status(proof("good")), results(path).status(proof("wrong"))) == (PASSED, WAITING)
    assert sorted(file.name for file in path.parent.iterdir()) == ["a-gpu.json", "nvidia-h200.json"]


def test_a_call_goes_on_from_results_of_several_calls(path: Path, tmp_path: Path) -> None:
    """Merges results from the folders of several calls; a result with a verdict replaces a result without."""
    first, second = (results(tmp_path / name / "gpu.json") for name in ("first", "second"))
    names = good, wrong, cut = proof("good"), proof("wrong"), proof("cut")
    first.put(good, {"status": PASSED, "at": "2026-01-01T00:00:00Z"})
    first.put(cut, {"status": CUT, "at": "2026-01-01T00:01:00Z"})
    second.put(good, {"status": RUNNING, "at": "2026-01-02T00:00:00Z"})
    second.put(wrong, {"status": FAILED, "at": "2026-01-02T00:01:00Z"})
    second.put(cut, {"status": PASSED, "at": "2026-01-02T00:02:00Z"})
    third = Results(path.parent, DEVICE, {}, [tmp_path / "first", second.path])
    assert [third.status(name) for name in names] == [PASSED, FAILED, PASSED]
    third.put(proof("last"), {"status": PASSED})
    assert set(kept(path)) == {"good", "wrong", "cut", "last"}  # the newest file contains all results


def test_what_is_not_here(path: Path) -> None:
    """Runs proofs with missing packages: no failure in a later stage, but a failure in the first."""
    later = proof("good", stage=2, needs=("no_such_package.part",))
    assert run([later], results(path), quiet())
    assert kept(path)["good"] == {
        **{"about": "good", "stage": 2, "status": NOT_HERE},
        "why": "no_such_package.part cannot be imported here",
    }
    assert not run([proof("good", needs=("no_such_package",))], results(path), quiet())
    assert kept(path)["good"]["status"] == FAILED


def test_what_only_cuda_can_do_is_enough_for_a_rehearsal_alone(path: Path) -> None:
    assert run([proof("cuda_only")], results(path), quiet(tiny=True))
    assert kept(path)["cuda_only"]["status"] == CUDA_ONLY
    assert not run([proof("cuda_only")], results(path), quiet())


def test_mistakes_are_one_line(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*arguments: str) -> str:
        assert main(["--results", str(path.parent), *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("error: ")

    assert said("--wheels", "no/folder").startswith("--wheels no/folder: no such folder")
    assert said("--budget", "nan") == "--budget nan: allowed are seconds above 0"
    assert said("--nonsense") == "unrecognized arguments: --nonsense; see python -m benchmarks.gpu --help"
    assert said("--budget", "soon").startswith("--budget: invalid float value: 'soon'; see")
    assert said("--stage", "4").startswith("--stage: invalid choice: 4")
    assert said("--only", "nonsense").startswith("--only nonsense: no such proof; there are device,")
    assert said("--earlier", "no/file").startswith("--earlier no/file: no such file or folder")
    path.parent.mkdir()
    path.write_text("{}")
    assert "not a file of these proofs" in said("--rehearse")
    assert "not a file of these proofs" in said("--list")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "--rehearse" in said()


def test_the_list_tells_what_is_known(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results(path).put(next(p for p in PROOFS if p.name == "nccl"), {"status": PASSED})
    assert main(["--list", "--results", str(path.parent), "--earlier", str(path), "--stage", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [p.name for p in PROOFS if p.stage == 1]
    assert [line.split()[0] for line in lines if " passed " in line] == ["nccl"]


def test_every_proof_is_in_the_page() -> None:
    page = (ROOT / "benchmarks" / "gpu" / "README.md").read_text()
    assert [p.name for p in PROOFS if f"`{p.name}`" not in page] == []


# ---- on a bare host --------------------------------------------------------------------------------------------------

BARE = """
import importlib, pkgutil, sys

class Absent:
    names = {"ray", "vllm", "hydra", "omegaconf", "transformer_engine", "pytest", "tensorboard", "rich", "fastapi"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
modules = "megatron.worker megatron.objectives megatron.checkpoint weights.exchange.exchange weights.connection"
modules += " weights.transports.ipc planner.memory planner.times planner.fit models.published models.tiny"
modules += " models.megatron preflight.gpus kernels.boxes"
for name in modules.split():
    importlib.import_module(f"skyrl_mega.{name}")
import benchmarks.gpu
for found in pkgutil.iter_modules(benchmarks.gpu.__path__):
    importlib.import_module(f"benchmarks.gpu.{found.name}")
import tests.kernels.cases
"""
"""A script that imports the modules used by proofs, without the packages missing on a bare host."""


def test_a_bare_host_has_all_that_the_proofs_import() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_pattern_shows_what_is_wrong() -> None:
    import torch

    from benchmarks.gpu import parts, pattern
    from skyrl_mega.models.registry import architecture
    from skyrl_mega.parallel.dims import ParallelDims

    hf, _ = parts.slice_of_30b(tiny_size=True)
    layout = architecture(hf).engine_layout(hf, 1, 1)
    shard = layout.shards[0]
    params = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shard.params.items()}
    pattern.fill(shard, layout.tensors, params, version=1)
    assert all(bool(p.isfinite().all()) for p in params.values())
    assert pattern.different(shard, layout.tensors, params, version=1) == 0
    whole = sum(piece.box.numel for piece in shard.pieces)
    assert pattern.different(shard, layout.tensors, params, version=2) > 0.99 * whole
    params["model.norm.weight"][3] += 1
    assert pattern.different(shard, layout.tensors, params, version=1) == 1
    # A tensor's pattern is independent of the division into boxes.
    halves = architecture(hf).megatron_layout(hf, ParallelDims(ranks=2, tensor=2, expert_tensor=2), "local")
    both = []
    for half in halves.shards:
        params = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in half.params.items()}
        pattern.fill(half, halves.tensors, params, version=1)
        both.append(params["0.decoder.layers.0.self_attention.linear_proj.weight"])
    alone = architecture(hf).megatron_layout(hf, ParallelDims(), "local")
    params = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in alone.shards[0].params.items()}
    pattern.fill(alone.shards[0], alone.tensors, params, version=1)
    assert torch.equal(torch.cat(both, 1), params["0.decoder.layers.0.self_attention.linear_proj.weight"])


# ---- the rehearsal ---------------------------------------------------------------------------------------------------


def rehearse(path: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--results", str(path.parent), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return rehearsed(path)


def test_kernels_and_limits_are_rehearsed(path: Path) -> None:
    saved = rehearse(path, "--only", "device", "kernels")
    assert [saved[name]["status"] for name in ("device", "kernels")] == [PASSED, PASSED]


@pytest.mark.slow
def test_every_proof_but_vllms_is_rehearsed(path: Path) -> None:
    """Rehearses each proof in forks of a single process, and checks the results on a CPU; but for `te_speed`, because
    torch's profiler hangs in a fork."""
    names = [proof.name for proof in PROOFS if proof.stage < 3 and not proof.makes and proof.name != "te_speed"]
    on_cuda = {proof.name for proof in PROOFS if proof.stage == 2} - {"te_numbers", "te_train"}
    on_cuda |= {"exchange_segments", "fragmentation"}
    command = [sys.executable, "-m", "tests.benchmarks.rehearsal", str(path.parent), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    saved = rehearsed(path)
    went_wrong = {name: saved[name].get("why") or saved[name].get("wrong") for name in saved}
    assert {name: saved[name]["status"] for name in names} == {
        name: CUDA_ONLY if name in on_cuda else PASSED for name in names
    }, (went_wrong, done.stderr[-2000:])


@pytest.mark.slow
@pytest.mark.nightly
def test_the_proof_with_a_profile_is_rehearsed(path: Path) -> None:
    assert rehearse(path, "--only", "te_speed")["te_speed"]["status"] == PASSED


@pytest.mark.slow
@pytest.mark.nightly
def test_an_engine_is_rehearsed(path: Path) -> None:
    pytest.importorskip("vllm")
    saved = rehearse(path, "--stage", "3")
    assert saved["vllm"]["status"] == PASSED
