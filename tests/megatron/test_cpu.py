"""Test of the simulated CUDA in an environment with packages that compute on CUDA only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from skyrl_mega.megatron import cpu

cpu.stand_in()
import torch
from megatron.core import optimizer
from megatron.core.extensions import transformer_engine
from megatron.core.inference import contexts

with torch.device("meta"):
    elsewhere = torch.zeros(1).device.type
print(optimizer.Adam is torch.optim.AdamW, transformer_engine.HAVE_TE, elsewhere, torch.zeros(1, device="cuda").device)
"""


def test_megatron_takes_nothing_that_computes_on_cuda_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports megatron-core beside CUDA packages. In the GPU environment an import of such a package would fail, and
    another package would supply the optimizer."""
    for path in ("transformer_engine", "transformer_engine/pytorch", "apex", "flashinfer"):
        (tmp_path / path).mkdir()
        (tmp_path / path / "__init__.py").write_text("raise RuntimeError('it computes on CUDA alone')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "False", "meta", "cpu"], done.stderr[-2000:]
