"""Tests that docs/gpu.md lists every CUDA-only branch with the right test file."""

from __future__ import annotations

import ast

import pytest

from tests.cuda.branches import (
    DOCUMENT,
    ROOT,
    Branch,
    Row,
    Scan,
    claimed,
    find,
    gone,
    line,
    not_entered,
    occurrences,
    table,
    unlisted,
)
from tests.cuda.entered import run_tests

LEAST = 0.9
"""Lower bound of the share of branches entered by a rehearsal."""


def test_every_branch_is_in_the_list_and_nothing_else() -> None:
    branches, rows = find(), table()
    new, old = unlisted(rows, branches), gone(rows, branches)
    assert not new, "docs/gpu.md lacks:\n" + "\n".join(line(Row(branch, "", "")) for branch in new)
    assert not old, "docs/gpu.md names what is gone:\n" + "\n".join(f"{b.where} {b.text}" for b in old)
    assert len({row.branch for row in rows}) == len(rows)


def test_what_is_not_entered_has_a_reason() -> None:
    for row in table():
        if row.entered_by:
            assert (ROOT / "tests" / row.entered_by).is_file(), line(row)
        else:
            assert row.not_covered, line(row)


def test_nearly_all_branches_are_entered() -> None:
    rows = table()
    share = sum(bool(row.entered_by) for row in rows) / len(rows)
    print(f"{share:.0%} of {len(rows)} branches are entered by a rehearsal")
    assert share >= LEAST


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_tests_enter_what_the_list_says() -> None:
    """Runs the tests again in recording processes, each file until all its listed branches are entered."""
    rows, branches = table(), find()
    false = not_entered(rows, branches, run_tests(claimed(rows), occurrences(rows, branches)))
    assert not false, f"{DOCUMENT.name} claims what does not happen:\n" + "\n".join(map(line, false))


SOURCE = '''
"""Names "cuda" and torch.cuda.Stream."""
TABLE = {"cuda": 1, "cpu": 2}

def f(x: torch.cuda.Stream, device: str) -> None:
    "cuda"
    print(f"cuda {device}")
    choose("auto", "cpu", "cuda")
    TABLE["cuda"]
    if device == "cuda" or device == "cuda":
        torch.cuda.synchronize()
    backend = "nccl" if device != "cpu" else "gloo"

class C:
    def g(self):
        return (self.t.is_cuda, torch.zeros(1, pin_memory=True), self.nvml.nvmlInit(), kind == "local")
'''


def test_what_counts_as_a_branch() -> None:
    scan = Scan("m.py")
    scan.visit(ast.parse(SOURCE))
    assert dict(scan.found) == {
        Branch("m.py:f", 'device == "cuda"'): 2,
        Branch("m.py:f", "torch.cuda.synchronize"): 1,
        Branch("m.py:f", 'device != "cpu"'): 1,
        Branch("m.py:C.g", "self.t.is_cuda"): 1,
        Branch("m.py:C.g", "pin_memory"): 1,
        Branch("m.py:C.g", "NVML"): 1,
    }


def test_only_cuda_s_side_counts_as_entered() -> None:
    source = "def f(device):\n    return device == 'cuda', device != 'cpu', on(torch.cuda.x)\n"
    code = compile(Scan("m.py", wrap=True).visit(ast.parse(source)), "m.py", "exec")
    calls: list[tuple[str, bool]] = []

    def saw(where: str, text: str, occurrence: int, cuda: bool | None, value: object) -> object:
        calls.append((text, cuda is None or bool(value) is cuda))
        return value

    class Torch:
        class cuda:
            x = 1

    space = {"__cuda__": saw, "torch": Torch, "on": lambda x: x}
    exec(code, space)
    assert space["f"]("cuda") == (True, True, 1) and [entered for _, entered in calls] == [True, True, True]
    calls.clear()
    assert space["f"]("cpu") == (False, False, 1) and [entered for _, entered in calls] == [False, False, True]


def test_a_claim_holds_for_every_occurrence() -> None:
    branch, twice = Branch("m.py:f", "x.is_cuda"), Branch("m.py:g", "x.is_cuda")
    rows = [Row(branch, "cuda/test_a.py", ""), Row(twice, "cuda/test_a.py", ""), Row(Branch("m.py:h", "a"), "", "why")]
    counts = type(find())({branch: 1, twice: 2})
    both = {(branch, 1): {"cuda/test_a.py"}, (twice, 1): {"cuda/test_a.py"}, (twice, 2): {"cuda/test_b.py"}}
    assert not_entered(rows, counts, both) == [rows[1]]
    assert unlisted(rows[:1], counts) == [twice] and gone(rows, counts) == [Branch("m.py:h", "a")]
