"""`make gpu` on a host with missing packages: wheels are installed, and Transformer Engine arrives in parts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.catalogue import PROOFS
from benchmarks.gpu.proof import Proof
from benchmarks.gpu.results import FAILED, NOT_HERE, PASSED, WAITING
from benchmarks.gpu.runner import run
from tests.benchmarks.proofs import kept, proof, quiet, rehearsed, results


def test_wheels_are_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs wheels once, into a separate folder; an invalid wheel is a user error."""
    import tempfile
    import zipfile

    from benchmarks.gpu.wheels import install
    from skyrl_mega.common.errors import UserError

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "wheels"
    folder.mkdir()
    assert install(folder) is None
    info = "brought-1.0.dist-info"
    with zipfile.ZipFile(folder / "brought-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "here = True\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    site = install(folder)
    assert site is not None and (site / "brought.py").exists()
    (site / "mark").touch()
    assert install(folder) == site and (site / "mark").exists()
    (folder / "broken-1.0-py3-none-any.whl").write_text("not a wheel")
    with pytest.raises(UserError, match="--wheels"):
        install(folder)


def test_a_rehearsal_installs_nothing_that_it_is_not_given(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignores the folder of `--prepare`, with wheels for the GPU host's Python, unless given."""
    from benchmarks.gpu import __main__ as command

    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "PROOFS", (proof("good"),))
    (tmp_path / ".wheels").mkdir()
    (tmp_path / ".wheels" / "other-1.0-cp399-cp399-linux_x86_64.whl").write_text("")
    asked = ["--rehearse", "--results", str(path.parent)]
    assert main(asked) == 0
    assert main([*asked, "--wheels", str(tmp_path / ".wheels")]) == 2


# ---- Transformer Engine in parts -------------------------------------------------------------------------------------

INIT = """
import sys

if "torch" not in sys.modules:
    raise OSError("libnccl.so.2: cannot open shared object file")
"""
"""A stand-in for `transformer_engine`: the core is linked against libraries loaded by torch."""
ENGINE = """
from importlib.metadata import version
from pathlib import Path

libraries = Path(__file__).parents[1] / "wheel_lib"
for name in ("core.so", "torch.so"):
    if not (libraries / name).exists():
        raise FileNotFoundError("Could not find shared object file")
version("transformer-engine-torch")
"""
"""A stand-in for `transformer_engine.pytorch`: megatron-core imports the module, and does not catch this error."""
EXTENSION = """
from setuptools import setup

setup(
    name="transformer_engine_torch",
    version="1.0",
    packages=["transformer_engine.wheel_lib"],
    package_data={"transformer_engine.wheel_lib": ["*.so"]},
)
"""


def wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    import zipfile

    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        metadata = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "RECORD": ""}
        metadata["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for path, text in {**files, **{f"{info}/{key}": value for key, value in metadata.items()}}.items():
            file.writestr(path, text)


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with wheels of the Python part and the core, and the source of the extension; all three share
    the package folder."""
    import io
    import tarfile
    import tempfile

    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = tmp_path / "wheels"
    folder.mkdir()
    package = {"transformer_engine/__init__.py": INIT, "transformer_engine/pytorch/__init__.py": ENGINE}
    wheel(folder, "transformer_engine", package)
    wheel(folder, "transformer_engine_cu13", {"transformer_engine/wheel_lib/core.so": ""})
    wheel(folder, "other", {"other.py": ""})
    with tarfile.open(folder / "transformer_engine_torch-1.0.tar.gz", "w:gz") as source:
        for path, text in {"setup.py": EXTENSION, "transformer_engine/wheel_lib/torch.so": "compiled"}.items():
            entry = tarfile.TarInfo(f"transformer_engine_torch-1.0/{path}")
            entry.size = len(text)
            source.addfile(entry, io.BytesIO(text.encode()))
    return folder


def test_transformer_engine_comes_whole_or_not_at_all(
    brought: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiles the source between the stages; the same folder serves all stages, in this call and the next."""
    from benchmarks.gpu import __main__ as command

    needs = ("transformer_engine", "transformer-engine-torch")
    before = proof("imports")
    after = replace(before, name="after", stage=2, needs=needs)
    build = next(p for p in PROOFS if p.name == "te_build")

    def call(*proofs: Proof) -> dict[str, Any]:
        monkeypatch.setattr(command, "PROOFS", proofs)
        monkeypatch.setattr(sys, "path", [*sys.path])
        assert main(["--rehearse", "--results", str(path.parent), "--wheels", str(brought), "--again"]) == 0
        return rehearsed(path)

    saved = call(before, build, after)
    assert [(name, p["status"], p.get("wrong")) for name, p in saved.items()] == [
        (name, PASSED, None) for name in ("imports", "te_build", "after")
    ]
    (site,) = (folder.name for folder in (brought.parent / "temporary").glob("skyrl-mega-gpu-*"))
    assert [saved[name]["notes"]["Transformer Engine"] for name in ("imports", "after")] == ["absent", site]
    assert call(before)["imports"]["notes"]["Transformer Engine"] == site


def test_transformer_engine_that_cannot_be_imported_stays_out(
    brought: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installs an extension that fails at import, such as a build for another torch version."""
    from benchmarks.gpu import __main__ as command

    (brought / "transformer_engine_torch-1.0.tar.gz").unlink()
    wheel(brought, "transformer_engine_torch", {})
    build = next(p for p in PROOFS if p.name == "te_build")
    monkeypatch.setattr(command, "PROOFS", (build, proof("imports")))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["--rehearse", "--results", str(path.parent), "--wheels", str(brought)]) == 1
    saved = rehearsed(path)
    assert saved["te_build"]["status"] == FAILED and "shared object" in saved["te_build"]["wrong"][0]
    assert (saved["imports"]["status"], saved["imports"]["notes"]) == (PASSED, {"Transformer Engine": "absent"})


def test_what_a_proof_made_is_made_again_where_it_is_gone(
    brought: Path, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds again if the machine's temporary folder is gone while the results remain."""
    monkeypatch.setenv("PROOFS_RUN", str(tmp_path / "runs"))
    makes = proof("counts", makes="transformer_engine", stage=2)
    waits = [makes, proof("good", needs=("transformer_engine",), stage=2)]
    for proofs, wheels, times in ((waits, brought, 1), (waits, brought, 2), (waits, None, 2), ([makes], brought, 2)):
        assert run(proofs, results(path), quiet(wheels=wheels))
        assert kept(path)["counts"]["figures"][0]["value"] == times
    assert not run(waits, results(path), quiet(budget_s=0.1, wheels=brought)), "no time for it is no success"
    assert kept(path)["counts"]["status"] == WAITING
    assert run([proof("good", makes="transformer_engine", stage=2)], results(path), quiet())
    assert kept(path)["good"]["status"] == NOT_HERE
