"""The export command: errors before any write, remains, and output."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml

from skyrl_mega.cli.export import main
from skyrl_mega.export import job
from skyrl_mega.export.export import export
from skyrl_mega.export.pool import WorkerDied
from skyrl_mega.export.progress import ExportPhase, Progress
from skyrl_mega.export.source import find
from skyrl_mega.export.work import ExportWorker
from skyrl_mega.hf_checkpoint.box_files import read_entries
from skyrl_mega.hf_checkpoint.box_header import read_header
from tests.export import saved
from tests.export.test_layouts import same, tensors_of
from tests.support.engines import build_model


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a read-only run with equal checkpoints of steps 0 and 4."""
    folder = tmp_path_factory.mktemp("runs") / "r"
    build_model(folder / "model", "qwen3_moe", seed=1, layers=1)
    saved.make_run(folder, 1, {}, dtype=torch.float32, steps=0)
    shutil.copytree(folder / "checkpoints" / "step_000000", folder / "checkpoints" / "step_000004")
    return folder


@pytest.fixture
def own(run: Path, tmp_path: Path) -> Path:
    """Returns a copy of the run for damage by a test."""
    copied: Path = shutil.copytree(run, tmp_path / "own")
    return copied


def command(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main([*map(str, arguments), "--workers", "1"])
    output = capsys.readouterr()
    return code, output.out, output.err


def policy(run: Path) -> Path:
    return run / "checkpoints" / "step_000004" / "policy"


def test_a_copy_beside_checkpoints_is_left_out_and_exported_by_its_path(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = own / "checkpoints" / "step_000004_best"
    (own / "checkpoints" / "step_000004").rename(copy)
    code, out, _ = command(capsys, own, "--output", tmp_path / "newest")
    assert code == 0 and "step_000000" in out
    code, out, _ = command(capsys, copy, "--output", tmp_path / "best")
    assert code == 0 and "step_000004_best" in out


@pytest.mark.parametrize("place", [".", "checkpoints/step_000004", "checkpoints/step_000000/policy"])
def test_a_run_or_one_of_its_checkpoints(
    run: Path, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(capsys, run / place, "--output", tmp_path / "new" / "out")
    assert code == 0 and "not read back" in out
    assert same(tensors_of(tmp_path / "new" / "out"), tensors_of(run / "model"))
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out"]


def test_json_and_an_empty_directory(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    code, out, err = command(capsys, run, "--output", tmp_path / "out", "--json", "--verify", "--step", 0)
    assert code == 0 and "verify" in err
    done = json.loads(out)
    assert done["verified"] and done["dtype"] == "float32" and "step_000000" in done["checkpoint"]
    assert done["nbytes"] == sum(t.nbytes for t in tensors_of(tmp_path / "out").values())


def spoil(run: Path, how: str) -> list[str]:
    """Damages a run and returns further arguments."""
    folder = policy(run)
    largest = max(folder.glob("*.safetensors"), key=lambda f: f.stat().st_size)
    match how:
        case "no such run":
            shutil.rmtree(run)
        case "no step of that number":
            return ["--step", "3"]
        case "no checkpoint":
            shutil.rmtree(run / "checkpoints")
        case "only broken saves":
            shutil.rmtree(run / "checkpoints" / "step_000000")
            (run / "checkpoints" / "step_000004").rename(run / "checkpoints" / "step_000004.partial")
        case "cut off":
            largest.write_bytes(largest.read_bytes()[:-1])
        case "a file is missing":
            largest.unlink()
        case "not complete":
            (folder / "checkpoint.json").unlink()
        case "an earlier version's":
            (folder / "checkpoint.json").rename(folder / ".metadata")
        case "edited":
            header = json.loads((folder / "checkpoint.json").read_text())
            (folder / "checkpoint.json").write_text(json.dumps({**header, "format": 3}))
        case "header cut off":
            (folder / "checkpoint.json").write_text((folder / "checkpoint.json").read_text()[:500])
        case "a file of another folder":
            header = json.loads((folder / "checkpoint.json").read_text())
            (folder / "checkpoint.json").write_text(json.dumps({**header, "files": {"../../state.json": 1}}))
        case "damaged file":
            largest.write_bytes(b"\0" * largest.stat().st_size)
        case "model is gone":
            shutil.rmtree(run / "model")
            config = yaml.safe_load((run / "config.yaml").read_text())
            config["model"]["path"] = str(run / "model")
            (run / "config.yaml").write_text(yaml.safe_dump(config))
        case "another model":
            hf = json.loads((run / "model" / "config.json").read_text())
            (run / "model" / "config.json").write_text(json.dumps({**hf, "hidden_size": 32}))
            return ["--model", str(run / "model")]
        case "no run beside it":
            (run / "config.yaml").unlink()
        case "a file is there":
            (run / "out").write_text("mine")
        case "the directory is full":
            (run / "out").mkdir()
            (run / "out" / "mine").write_text("mine")
        case "a type it cannot do":
            return ["--dtype", "float16"]
        case "no worker":
            return ["--workers", "0"]
        case "no size":
            return ["--shard-gib", "0"]
    return []


@pytest.mark.parametrize(
    "how, words",
    [
        ("no such run", ["own", "no such folder"]),
        ("no step of that number", ["--step 3", "allowed are 0, 4"]),
        ("no checkpoint", ["no whole checkpoint"]),
        ("only broken saves", ["no whole checkpoint"]),
        ("cut off", [".safetensors", "bytes of", "damaged"]),
        ("a file is missing", [".safetensors", "is missing"]),
        ("not complete", ["checkpoint.json", "interrupted"]),
        ("an earlier version's", ["distributed checkpoint of torch (.metadata)", "model.path"]),
        ("edited", ["checkpoint.json", "CRC-32"]),
        ("header cut off", ["checkpoint.json", "CRC-32"]),
        ("a file of another folder", ["checkpoint.json", "CRC-32"]),
        ("damaged file", [".safetensors", "CRC-32"]),
        ("model is gone", ["model.path", "--model"]),
        ("another model", ["config.json", "the checkpoint"]),
        ("no run beside it", ["--model: ", "no config.yaml", "give --model, a Hugging Face directory"]),
        ("a file is there", ["--output", "empty directory"]),
        ("the directory is full", ["--output", "empty directory"]),
        ("a type it cannot do", ["--dtype", "float16", "as-trained"]),
        ("no worker", ["--workers 0", "a whole number from 1"]),
        ("no size", ["--shard-gib 0", "a number from 0.001"]),
    ],
)
def test_refusals(
    own: Path, how: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expects a one-line message, exit code 2, and no new file."""
    more = spoil(own, how)
    monkeypatch.chdir(own.parent)
    before = sorted(own.parent.rglob("*"))
    code = main(
        [str(own), "--output", str(own / "out"), *(["--workers", "1"] if "--workers" not in more else []), *more]
    )
    err = capsys.readouterr().err
    assert code == 2
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err
    assert sorted(own.parent.rglob("*")) == before


def test_no_room_on_the_disk(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    full = SimpleNamespace(total=10**9, used=10**9, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    code, _, err = command(capsys, run, "--output", tmp_path / "out")
    assert code == 2 and "0.1 GB are needed" in err and "has 0.0 GB" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["a bit", "400 bytes", "the tail"])
@pytest.mark.parametrize("more", [[], ["--workers", "2"], ["--from", "master"]])
def test_a_damaged_element_is_found(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, more: list[str]
) -> None:
    """Damages an element: only the stored CRC-32 reveals the damage."""
    folder = policy(own)
    header = read_header(folder)
    entry = next(e for e in read_entries(folder, header, header.tensors) if "o_proj" in e.tensor and e.kind == "master")
    file = entry.file
    content = bytearray(file.read_bytes())
    match damage:
        case "a bit":
            content[entry.offset] ^= 1
        case "400 bytes":
            for at in range(400):
                content[entry.offset + at * entry.nbytes // 400] ^= 255
        case "the tail":
            content[entry.offset + entry.nbytes // 2 : entry.offset + entry.nbytes] = bytes(entry.nbytes // 2)
    file.write_bytes(content)
    code, _, err = command(capsys, own, "--output", tmp_path / "out", *more)
    assert code == 2 and str(file) in err and "o_proj" in err and "CRC-32" in err
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()


def test_a_disk_that_fails_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ExportWorker, "flush", full)
    code, _, err = command(capsys, run, "--output", tmp_path / "out")
    assert code == 1 and err == "fault: [Errno 28] No space left on device\n"
    assert list(tmp_path.iterdir()) == []


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_through_a_link_into_a_folder_that_cannot_be_renamed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, link = tmp_path / "mount", tmp_path / "link"
    place.mkdir()
    link.symlink_to(place)
    before = place.stat().st_ino
    assert command(capsys, run, "--output", link)[0] == 0
    assert place.stat().st_ino == before and link.is_symlink()
    assert same(tensors_of(place), tensors_of(run / "model"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "mount"]
    assert not [p for p in place.iterdir() if p.name.startswith(".")]


def test_what_a_killed_export_left_is_cleared_and_a_running_one_is_left_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partial = tmp_path / ".out.0011aabb"
    partial.mkdir()
    (partial / "model-00001-of-00009.safetensors").write_text("half")
    (tmp_path / ".out.partial").mkdir()  # a foreign name
    with opened(partial) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = command(capsys, run, "--output", tmp_path / "out")
        assert code == 2 and "another export writes it now" in err
        assert (partial / "model-00001-of-00009.safetensors").exists()
    assert command(capsys, run, "--output", tmp_path / "out")[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.partial", "out"]
    assert same(tensors_of(tmp_path / "out"), tensors_of(run / "model"))


class Killing(Progress):
    """A progress display that kills the workers after the first answer."""

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[ExportPhase]:
        yield KillingPhase(name, total, None)


class KillingPhase(ExportPhase):
    def advance(self, amount: int) -> None:
        if self.name == "write":
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):  # some are gone already
                    if "forkserver" in " ".join(process.cmdline()) and process.ppid() != os.getpid():
                        process.kill()


def test_several_processes_and_one_that_is_killed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "SLAB_BYTES", 3000)
    source = find(run, None, None)
    done = export(source, tmp_path / "out", workers=2, file_bytes=50_000, verify=True)
    assert done.files > 2 and same(tensors_of(tmp_path / "out"), tensors_of(run / "model"))
    monkeypatch.setattr(job, "SLAB_BYTES", 100)
    with pytest.raises(WorkerDied, match="fewer --workers"):
        export(source, tmp_path / "killed", workers=2, progress=Killing(None))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


PAUSED = """
import sys, time
from skyrl_mega.cluster import driver
driver.start("nothing is left of it")
from skyrl_mega.cli import export as cli
from skyrl_mega.export import job, progress

def pause(phase, amount):
    if phase.name == "write":
        print("writing", flush=True)
        time.sleep(100)

job.SLAB_BYTES = 3000
progress.ExportPhase.advance = pause
driver.run(lambda: cli.main(sys.argv[1:]))
"""
"""A program with the command, paused forever after the first write."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_as_a_process_that_is_stopped(run: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Stops the command: no process remains, and no file if the supervisor survives."""
    started = subprocess.Popen(
        [sys.executable, "-c", PAUSED, str(run), "--output", str(tmp_path / "out"), "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    while started.stdout.readline() not in ("writing\n", ""):
        pass
    family = psutil.Process(started.pid).children(recursive=True)
    assert len(family) >= 4  # the driver, the fork server and two workers
    started.send_signal(number)
    _, err = started.communicate(timeout=240)
    if number == signal.SIGTERM:
        assert (started.returncode, err) == (75, "stopped by SIGTERM; nothing is left of it\n")
        assert list(tmp_path.iterdir()) == []
    assert psutil.wait_procs(family, timeout=120)[1] == []
