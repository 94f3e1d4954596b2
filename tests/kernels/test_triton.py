"""Tests of the Triton kernels without a GPU: in Triton's interpreter, in a separate process."""

from __future__ import annotations

import importlib
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
    """Compiles the kernels with Triton's compiler, stricter than the interpreter, for a GPU that need not be
    present."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from skyrl_mega.kernels import boxes_triton

    constants = {"WORD": boxes_triton.WORDS[width], "TILE": boxes_triton.TILE}
    pointers = {"addresses": "*i64", "table": "*i64", "of_tile": "*i32"}
    for kernel, signature, more in (
        (boxes_triton._copy, pointers | {"flat": "*u8"}, {"PACK": True}),
        (boxes_triton._copy, pointers | {"flat": "*u8"}, {"PACK": False}),
        (boxes_triton._sum, pointers | {"sums": "*i64"}, {}),
    ):
        known = {name: value for name, value in (constants | more).items() if name in kernel.arg_names}
        source = ASTSource(kernel, signature | dict.fromkeys(known, "constexpr"), known)
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": 4})
        assert len(compiled.asm["cubin"]) > 1000


@pytest.mark.parametrize(("architecture", "half"), [(90, True), (100, True), (89, True), (90, False)])
def test_the_heads_kernels_compile_for_a_gpu(architecture: int, half: bool) -> None:
    """Compiles with cap, temperature, support, entropy and squares; on Hopper the products must use tensor cores."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from skyrl_mega.kernels import linear_logprobs_triton as head

    kind = "*bf16" if half else "*fp32"
    tile = head.tile(torch.empty(0, dtype=torch.bfloat16 if half else torch.float32))
    if architecture == 89:
        tile = head.SMALL
    constants = {"TEMPERATURE": 0.7, "CAP": 30.0, "FLOOR": True, "EVEN": True, "DOUBLE": False}
    constants |= {"BT": tile.tokens, "BV": tile.columns, "BK": tile.depth}
    types = {"hidden": kind, "weight": kind, "out": kind, "targets": "*i64"}
    numbers = {"tokens", "columns", "width", "first", "valid", "split"}
    for kernel, more in ((head._sums, {"SQUARES": True}), (head._gradient, {"ENTROPY": True})):
        known = constants | more
        others = [name for name in kernel.arg_names if name not in known]
        signature = {name: types.get(name, "i32" if name in numbers else "*fp32") for name in others}
        even = [name for name in ("hidden", "weight", "width", "out", "columns") if name in others]
        attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in even}
        source = ASTSource(kernel, signature | dict.fromkeys(known, "constexpr"), known, attributes)
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        assert len(compiled.asm["cubin"]) > 1000
        most = 99 if architecture == 89 else 160
        assert compiled.metadata.shared <= most * 1024, "an A100 has 163 KiB, an H100 227"
        if half and architecture == 90:
            assert "wgmma.mma_async" in compiled.asm["ptx"]


FP8 = ("rows", "columns", "row_in", "col_in", "stack_stride", "row_stride", "col_stride")
HEAD = ("tokens", "columns", "width", "first", "valid", "split")


@pytest.mark.parametrize(
    ("module", "name", "ones"),
    [
        *(
            ("block_fp8_triton", name, ones)
            for name in ("_amax", "_quantise", "_dequantise")
            for ones in (FP8, FP8[6:])
        ),
        *(("linear_logprobs_triton", name, ones) for name in ("_sums", "_gradient") for ones in (HEAD, HEAD[:1])),
    ],
)
def test_kernels_compile_for_numbers_that_are_one(module: str, name: str, ones: tuple[str, ...]) -> None:
    """Compiles with arguments equal to 1: Triton turns such an argument into a constant without tensor methods."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"skyrl_mega.kernels.{module}"), name)
    pointers = {"amax": "*i32", "numbers": "*u8", "targets": "*i64"}
    pointers |= dict.fromkeys(("weight", "hidden", "out"), "*bf16")
    pointers |= dict.fromkeys(("inverse", "scales", "floor", "sums", "peak", "log_sum"), "*fp32")
    pointers |= dict.fromkeys(("entropy", "grad_logprobs", "grad_entropy"), "*fp32")
    constants = {"TEMPERATURE": 0.7, "CAP": 30.0, "FLOOR": True, "EVEN": False, "DOUBLE": False, "SQUARES": True}
    constants |= {"ENTROPY": True, "BT": 32, "BV": 32, "BK": 32}
    known = {key: value for key, value in constants.items() if key in kernel.arg_names}
    known |= {key: 1 for key in ones if key in kernel.arg_names}
    signature = {key: "constexpr" if key in known else pointers.get(key, "i32") for key in kernel.arg_names}
    source = ASTSource(kernel, signature, known)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert len(compiled.asm["cubin"]) > 1000
