"""vLLM for the GPU machine, without a network: what the archive contains, and the call that uses it."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import prepare_vllm as command
from benchmarks.gpu.catalogue import PROOFS
from benchmarks.gpu.plan import described
from tests.benchmarks.test_gpu_prepare import CODE, fatbin

SPARE = fatbin((75, b"spare"))
FOREIGN = fatbin((80, b"ampere only" * 3))
OURS = fatbin((90, b"Mainloop_ILi64EEEEEELi64ENS_10bfloat16_tEfNS_Sm90"))
WIDER = fatbin((90, b"Mainloop_ILi128EEEEEELi128ENS_10bfloat16_tEfNS_Sm90"))
HALF = fatbin((90, b"Mainloop_ILi64EEEEEELi64ENS_6half_tEfNS_Sm90"))
AROUND = fatbin((90, b"Combine"))
WHEEL = {
    "vllm/__init__.py": b"here = True\n",
    "vllm/types.pyi": b"",
    "vllm/_C_stable_libtorch.abi3.so": CODE + FOREIGN + SPARE,
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": OURS + WIDER + HALF + AROUND,
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": CODE,
    "vllm/third_party/deep_gemm/__init__.py": b"",
    "vllm/benchmarks/serve.py": b"",
    "vllm-0.32.0.data/scripts/vllm": b"",
    "vllm-0.32.0.data/purelib/moved.py": b"",
}
KEPT = ["moved.py", "vllm/_C_stable_libtorch.abi3.so", "vllm/__init__.py", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the packages downloaded so far, as made wheels."""
    names: list[str] = []

    def download(folder: Path, packages: list[str]) -> None:
        for package in packages:
            name, version = package.split("==")
            names.append(name)
            with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
                for file, data in WHEEL.items() if name == "vllm" else ():
                    wheel.writestr(file, data)

    monkeypatch.setattr(command, "WORK", tmp_path / "work")
    monkeypatch.setattr(command, "download", download)
    return names


def test_vllm_is_packed_with_the_kernels_of_the_proofs(tmp_path: Path, asked: list[str]) -> None:
    folder = tmp_path / "packed"
    command.prepare_vllm(folder, lambda line: None)
    assert set(asked) == {"vllm", *command.PACKAGES}
    with tarfile.open(folder / command.SITE) as archive:
        files = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    assert sorted(files) == sorted(KEPT)
    extension = files["vllm/_C_stable_libtorch.abi3.so"]
    assert len(extension) == len(CODE + FOREIGN + SPARE)
    assert b"hopper" in extension and b"ampere" not in extension
    assert extension[len(CODE) :].startswith(SPARE)
    attention = files["vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"]
    assert attention.startswith(OURS + SPARE) and attention.endswith(AROUND)
    assert attention.count(SPARE) == 2 and attention.count(b"Mainloop") == 1


def test_vllm_is_packed_once(tmp_path: Path, asked: list[str]) -> None:
    """Reuses an archive that is whole, and the downloads after an interruption."""
    folder = tmp_path / "packed"
    lines: list[str] = []
    command.prepare_vllm(folder, lines.append)
    assert " in all, of 64 that a call can carry" in lines[-1]
    asked.clear()
    written = (folder / command.SITE).stat().st_ino
    command.prepare_vllm(folder, lines.append)
    assert not asked and (folder / command.SITE).stat().st_ino == written
    (folder / command.SCRIPT).unlink()
    next((tmp_path / "work" / "vllm").glob("xgrammar-*")).unlink()
    command.prepare_vllm(folder, lines.append)
    assert asked == ["xgrammar"] and (folder / command.SITE).stat().st_ino != written


def test_the_script_unpacks_vllm(tmp_path: Path, asked: list[str]) -> None:
    folder, site = tmp_path / "packed", tmp_path / "site"
    command.prepare_vllm(folder, lambda line: None)
    assert stat.S_IMODE((folder / command.SCRIPT).stat().st_mode) & 0o111
    subprocess.run([str(folder / command.SCRIPT), str(site)], check=True, timeout=60)
    assert sorted(str(f.relative_to(site)) for f in site.rglob("*") if f.is_file() and f.suffix != ".pyc") == KEPT
    assert os.access(site / "vllm" / "__init__.py", os.R_OK)


def test_the_plan_names_the_call_with_vllm(tmp_path: Path, asked: list[str]) -> None:
    folder = tmp_path / "packed"
    command.prepare_vllm(folder, lambda line: None)
    text = described(PROOFS, tmp_path / "wheels", folder, Path("OUT"), Path("kept"))
    assert "--only vllm vllm_bfloat16 --budget" in text and f"bash {folder}/install.sh /tmp/vllm-site" in text
    assert "without wheels" in text and "which these need: vllm" not in text and "--prepare-vllm" not in text
