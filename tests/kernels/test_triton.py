"""The Triton kernels where there is no GPU: in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def test_kernels_in_the_interpreter_are_the_references() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: the kernels' text cannot run here")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/interpreted.py"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.parametrize("architecture", [90, 100], ids=["Hopper", "Blackwell"])
@pytest.mark.parametrize("width", [8, 1])
def test_the_tables_kernels_compile_for_a_gpu(architecture: int, width: int) -> None:
    """What the interpreter takes for granted, Triton's compiler does not. It needs no GPU."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from skyrl_mega.kernels import boxes_triton

    constants = {"WORD": boxes_triton.WORDS[width], "TILE": boxes_triton.TILE}
    pointers = {"addresses": "*i64", "table": "*i64", "of_tile": "*i32"}
    for kernel, signature, more in (
        (boxes_triton._copy, pointers | {"flat": "*u8"}, {"PACK": True}),
        (boxes_triton._copy, pointers | {"flat": "*u8"}, {"PACK": False}),
        (boxes_triton._sum, pointers | {"sums": "*i64"}, {"SIZE": width}),
    ):
        given = constants | more
        source = ASTSource(kernel, signature | dict.fromkeys(given, "constexpr"), given)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
        assert len(made.asm["cubin"]) > 1000
