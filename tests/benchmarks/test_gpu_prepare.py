"""Preparation of `make gpu` without a GPU: downloaded and shrunk packages, and the plan of a call."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import prepare as command
from benchmarks.gpu.catalogue import PROOFS
from benchmarks.gpu.fatbin import HEADER, MACHINE_CODE, PTX, shrink, shrink_wheel, smallest_foreign
from benchmarks.gpu.plan import CALL_S, described, plan
from benchmarks.gpu.runner import expected_s
from tests.benchmarks.proofs import proof


def fatbin(*entries: tuple[int, bytes], kind: int = MACHINE_CODE) -> bytes:
    """Returns a fat binary in nvcc's format: each entry is an architecture and its code."""
    body = b"".join(struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(code), arch) + code for arch, code in entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


CODE = fatbin((80, b"ampere!!" * 5), (90, b"hopper!!" * 7), (100, b"blackwell!!!" * 9))


def test_other_architectures_are_taken_out_and_nothing_moves() -> None:
    image = b"head" + CODE + b"between" + CODE + b"tail"
    small = shrink(image)
    kept = fatbin((90, b"hopper!!" * 7))
    assert len(small) == len(image)
    assert small.index(kept) == 4 and small.count(kept) == 2
    assert b"ampere" not in small and b"blackwell" not in small
    assert small.endswith(b"tail") and small[4 + len(CODE) :].startswith(b"between")
    assert shrink(small) == small


@pytest.mark.parametrize(
    "image",
    [
        fatbin((80, b"ampere only")),
        CODE[:-20],  # truncated
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 60) + b"numbers that look so",
        CODE[:16] + struct.pack("<I", 7) * ((len(CODE) - 16) // 4),  # entries of another format
        struct.pack("<I", 0xBA55ED50),
    ],
)
def test_what_is_not_understood_stays_as_it_is(image: bytes) -> None:
    assert shrink(image) == image


def both(machine_code: bytes, ptx: bytes) -> bytes:
    """Returns a fat binary with the entries of two."""
    body = machine_code[HEADER.size :] + ptx[HEADER.size :]
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_ptx_stays_only_without_machine_code() -> None:
    code, ptx = fatbin((90, b"hopper!!")), fatbin((90, b"text....text...."), (80, b"old text"), kind=PTX)
    small = shrink(both(code, ptx))
    assert small.startswith(code) and not small[len(code) :].strip(b"\0")
    assert shrink(ptx).startswith(fatbin((90, b"text....text...."), kind=PTX)) and b"old text" not in shrink(ptx)


def test_the_spare_code_is_the_smallest_machine_code_of_another_gpu() -> None:
    others = fatbin((80, b"ampere!!" * 5), (75, b"turing!!" * 2), (90, b"hopper!!"))
    image = b"head" + others + both(fatbin((90, b"hopper!!")), fatbin((75, b"text"), kind=PTX))
    assert smallest_foreign(image) == fatbin((75, b"turing!!" * 2))[HEADER.size :]
    assert smallest_foreign(fatbin((90, b"hopper!!"))) == b""


def test_a_wheel_keeps_its_files(tmp_path: Path) -> None:
    whole, small = tmp_path / "whole.whl", tmp_path / "small.whl"
    with zipfile.ZipFile(whole, "w") as wheel:
        wheel.writestr("te/libte.so.1", CODE)
        wheel.writestr("te/data.bin", CODE)
    shrink_wheel(whole, small)
    with zipfile.ZipFile(small) as wheel:
        assert wheel.namelist() == ["te/libte.so.1", "te/data.bin"]
        assert wheel.read("te/data.bin") == CODE
        assert b"ampere" not in wheel.read("te/libte.so.1")


def test_preparing_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads only missing wheels; shrinks wheels downloaded whole."""
    asked: list[str] = []

    def download(folder: Path, packages: list[str]) -> None:
        asked.extend(packages)
        for package in packages:
            name, version = package.split("==")
            with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
                wheel.writestr("lib.so", CODE)

    def compiled(folder: Path, version: str, say: object) -> None:
        asked.append("compile")
        (folder / f"transformer_engine_torch-{version}-cp312-cp312-linux_x86_64.whl").touch()

    monkeypatch.setattr(command, "WORK", tmp_path / "work")
    monkeypatch.setattr(command, "download", download)
    monkeypatch.setattr(command, "_bring_extension", compiled)
    lines: list[str] = []
    command.prepare(tmp_path / "wheels", lines.append)
    assert len(asked) == len(command.PACKAGES) + 2 and asked[-1] == "compile"
    (core,) = (tmp_path / "wheels").glob("transformer_engine_cu13-*")
    assert "-1sm90-py3-none-any.whl" in core.name
    assert " in all, of 64 that a call can carry" in lines[-1]
    asked.clear()
    next((tmp_path / "wheels").glob("pydantic-*")).unlink()
    command.prepare(tmp_path / "wheels", lines.append)
    assert [package.split("==")[0] for package in asked] == ["pydantic"]


@pytest.fixture
def brought(tmp_path: Path) -> Path:
    """Returns a folder as left by `--prepare`."""
    names = ["megatron_core", "transformer_engine", "transformer_engine_cu13", "transformer_engine_torch"]
    for name in names:
        (tmp_path / f"{name}-1.0-py3-none-any.whl").touch()
    return tmp_path


def test_a_window_runs_the_most_valuable_proofs_first(brought: Path) -> None:
    first, second = plan(PROOFS, brought)
    assert all(sum(expected_s(p, brought) for p in call) <= CALL_S for call in (first, second))
    assert [p.name for p in first][:3] == ["device", "te_build", "te_numbers"]
    assert {"exchange", "head", "residency"} <= {p.name for p in first}
    assert "te_build" in {p.name for p in second}, "a fresh machine has nothing that the first call installed"
    assert not {"attention", "fragmentation", "vllm"} & {p.name for p in (*first, *second)}
    assert len({p.name for p in (*first, *second)}) == len(first) + len(second) - 1


def test_an_extension_that_comes_as_source_is_expected_to_take_longer(brought: Path) -> None:
    build = next(p for p in PROOFS if p.name == "te_build")
    assert expected_s(build, brought) == build.seconds
    next(brought.glob("transformer_engine_torch-*")).rename(brought / "transformer_engine_torch-1.0.tar.gz")
    assert expected_s(build, brought) == build.seconds + build.compile_s


def test_a_proof_that_does_not_fit_leaves_room_for_others(tmp_path: Path) -> None:
    proofs = [proof("a", seconds=60.0), proof("b", seconds=70.0), proof("c", seconds=30.0), proof("d", seconds=300.0)]
    assert [[p.name for p in call] for call in plan(proofs, tmp_path, 2, 100.0)] == [["a", "c"], ["b"]]


def test_the_plan_says_what_is_absent_and_how_to_bring_it(brought: Path, tmp_path: Path) -> None:
    text = described(PROOFS, brought, tmp_path / "vllm", Path("OUT"), Path("kept"))
    assert "no call has time for: " in text and "does not bring vllm, which these need: vllm" in text
    assert "--prepare " not in text and f"--prepare-vllm {tmp_path / 'vllm'}" in text
    nothing = tmp_path / "nothing"
    text = described(PROOFS, nothing, tmp_path / "vllm", Path("OUT"), Path("kept"))
    assert "call 1" in text and "call 2" not in text and "no call has time" not in text
    assert "nothing does not bring megatron.core, which these need: te_numbers" in text
    assert "nothing does not bring transformer_engine, which these need: te_build" in text
    assert f"--prepare {nothing}" in text
