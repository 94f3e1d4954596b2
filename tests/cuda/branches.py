"""Branches entered only on CUDA: found in the source, listed in docs/gpu.md, recorded while tests/cuda runs.

A branch is an expression. It is true on CUDA alone (`x.is_cuda`, `device == "cuda"`, `transport.on_streams`) or is
evaluated on CUDA alone (`torch.cuda.…`, `"nccl"`, `pin_memory`, NVML). File, function and text identify a branch, so
edits elsewhere do not move the branch.

`python -m tests.cuda.branches` prints missing branches as rows of the table, and listed branches gone from the source.
`--run` also runs tests/cuda, the tests named in the list and the given tests, fills in the test file of each new row,
and prints wrong claims. `--write` writes all of this into the table. A person must fill in the column about gaps.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "gpu.md"
FOLDERS = ("skyrl_mega", "kernels", "launch")
CPU_ONLY = {"skyrl_mega/megatron/cpu.py"}
"""Files that simulate CUDA on a CPU: these files name CUDA everywhere, and no GPU runs them."""
NAMES = {"cuda": True, "nccl": True, "te": True, "cpu": False, "gloo": False, "local": False}
"""Words compared with a device, a backend or a layer spec, and True if the word means CUDA."""
SPECS = {"te", "local"}
USED = {"nccl", "cuda"}
"""Words passed on as an argument."""
TRUE_ON_CUDA = {"is_cuda", "on_streams"}
HEADER = "| where | branch | entered by | what no rehearsal covers |"


@dataclass(frozen=True, order=True)
class Branch:
    """A branch, identified by `file:function` and text."""

    where: str
    text: str


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    branch: Branch
    entered_by: str
    """Test file relative to tests/, or empty."""
    not_covered: str


# ---- in the source ---------------------------------------------------------------------------------------------------


@dataclass
class Scan(ast.NodeTransformer):
    """Collects the branches of a module. With `wrap`, each branch calls `__cuda__(branch, occurrence, cuda's value,
    value)`."""

    file: str
    wrap: bool = False
    found: Counter[Branch] = field(default_factory=Counter)
    _path: list[str] = field(default_factory=list)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._scope(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._scope(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._scope(node)

    def _scope(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._path.append(node.name)
        node.body = [self.visit(statement) for statement in node.body]
        self._path.pop()
        return node  # types in annotations and defaults of arguments are no branches

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = node.value and self.visit(node.value)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        node.values = [self.visit(value) for value in node.values]
        return node  # a table by device: the code that reads the table is the branch

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node.value = self.visit(node.value)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        before = sum(self.found.values())
        node.test = self.visit(node.test)
        if sum(self.found.values()) == before or not isinstance(node.body, ast.Constant):
            node.body = self.visit(node.body)
        node.orelse = self.visit(node.orelse)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        words = {c.value for c in (node.left, *node.comparators) if isinstance(c, ast.Constant)}
        if words & SPECS and "spec" not in ast.unparse(node):
            return self.generic_visit(node)
        known = {NAMES[word] for word in words & NAMES.keys()}
        if len(known) == 1 and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            return self._branch(node, isinstance(node.ops[0], ast.Eq | ast.In) is known.pop())
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.ctx, ast.Load):
            if node.attr in TRUE_ON_CUDA:
                return self._branch(node, True)
            if _of_cuda(node):
                return self._branch(node, None)
            if node.attr.startswith(("nvml", "NVML")):
                return self._branch(node, None, "NVML")
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = ast.unparse(node.func)
        if called in ("torch.cuda.is_available", "current_platform.is_cpu"):
            return self._branch(node, called == "torch.cuda.is_available")
        if called.endswith(".pin_memory") or any(k.arg == "pin_memory" for k in node.keywords):
            return self._branch(node, None, "pin_memory")
        arguments = [a.value for a in node.args if isinstance(a, ast.Constant)]
        if "cpu" in arguments:  # CPU and CUDA are both accepted, or searched for
            return node
        return self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        values = [e.value for e in node.elts if isinstance(e, ast.Constant)]
        return node if "cpu" in values else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return self._branch(node, None) if isinstance(node.value, str) and node.value in USED else node

    def _branch(self, node: ast.expr, cuda: bool | None, text: str = "") -> ast.expr:
        where = f"{self.file}:{'.'.join(self._path) or '<module>'}"
        branch = Branch(where, text or ast.unparse(node).replace("'", '"'))
        self.found[branch] += 1
        if not self.wrap:
            return node
        arguments = (branch.where, branch.text, self.found[branch], cuda)
        call = ast.Call(ast.Name("__cuda__", ast.Load()), [*map(ast.Constant, arguments), node], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def _of_cuda(node: ast.Attribute) -> bool:
    """Returns True for `torch.cuda.x` and `dist.ProcessGroupNCCL`."""
    inside = node.value
    if isinstance(inside, ast.Attribute) and inside.attr == "cuda":
        return isinstance(inside.value, ast.Name) and inside.value.id == "torch"
    return node.attr == "ProcessGroupNCCL"


def name_of(path: Path) -> str | None:
    """Returns the module's name in the list; None for a module outside the scan."""
    try:
        name = path.resolve().relative_to(ROOT).as_posix()  # for skyrl_mega/kernels the name is kernels
    except ValueError:
        return None
    known = name.split("/")[0] in FOLDERS and name not in CPU_ONLY and not name.endswith("_triton.py")
    return name if known else None


def find() -> Counter[Branch]:
    """Returns all branches of the project, with the number of occurrences in the function."""
    branches: Counter[Branch] = Counter()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = name_of(path)
            if name is not None:
                scan = Scan(name)
                scan.visit(ast.parse(path.read_text()))
                branches |= scan.found
    return branches


# ---- in the list -----------------------------------------------------------------------------------------------------


def table(text: str | None = None) -> list[Row]:
    """Returns the rows of the table in docs/gpu.md."""
    lines = (DOCUMENT.read_text() if text is None else text).splitlines()
    if HEADER not in lines:
        raise ValueError(f"{DOCUMENT.name} has no table with the header {HEADER}")
    rows = []
    for line in lines[lines.index(HEADER) + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        where, code, entered_by, not_covered = cells
        rows.append(Row(Branch(where.strip("`"), code.strip("`")), entered_by.strip("`—"), not_covered))
    return rows


def line(row: Row) -> str:
    """Returns a row in the table's format."""
    code = row.branch.text.replace("|", "\\|")
    by = f"`{row.entered_by}`" if row.entered_by else "—"
    return f"| `{row.branch.where}` | `{code}` | {by} | {row.not_covered} |"


def unlisted(rows: Iterable[Row], branches: Iterable[Branch]) -> list[Branch]:
    """Returns the branches missing in the list."""
    return sorted(set(branches) - {row.branch for row in rows})


def gone(rows: Iterable[Row], branches: Iterable[Branch]) -> list[Branch]:
    """Returns the listed branches missing in the source."""
    return sorted({row.branch for row in rows} - set(branches))


def claimed(rows: Iterable[Row]) -> list[str]:
    """Returns the test files named in the list outside tests/cuda."""
    return sorted({f"tests/{row.entered_by}" for row in rows if row.entered_by and "cuda/" not in row.entered_by})


def occurrences(rows: Iterable[Row], counts: Counter[Branch]) -> dict[str, list[tuple[Branch, int]]]:
    """Returns the branches and occurrences to enter, by test file."""
    by_test: dict[str, list[tuple[Branch, int]]] = {}
    for row in rows:
        if row.entered_by:
            by_test.setdefault(row.entered_by, []).extend((row.branch, i + 1) for i in range(counts[row.branch]))
    return by_test


def not_entered(rows: Iterable[Row], counts: Counter[Branch], seen: dict[tuple[Branch, int], set[str]]) -> list[Row]:
    """Returns the rows with a test file that missed an occurrence of the branch."""
    claims = occurrences(rows, counts).items()
    false = {occurrence[0] for test, every in claims for occurrence in every if test not in seen.get(occurrence, ())}
    return [row for row in rows if row.branch in false]


def brought_up_to_date(
    rows: Iterable[Row], counts: Counter[Branch], seen: dict[tuple[Branch, int], set[str]] | None
) -> list[Row]:
    """Returns the updated table: a row for each branch, with an entering test file if tests ran."""
    known = {row.branch: row for row in rows}
    updated = []
    for branch in sorted(counts):
        old = known.get(branch, Row(branch, "", ""))
        by = old.entered_by
        if seen is not None:
            tests = set.intersection(*(seen.get((branch, i + 1), set()) for i in range(counts[branch])))
            best = sorted(tests, key=lambda name: (not name.startswith("cuda/"), name))
            by = by if by in tests else best[0] if best else ""
        updated.append(Row(branch, by, old.not_covered))
    return updated


def write(rows: Iterable[Row]) -> None:
    """Replaces the rows of the table in docs/gpu.md."""
    lines = DOCUMENT.read_text().splitlines()
    start = lines.index(HEADER) + 2
    stop = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    lines[start:stop] = map(line, rows)
    DOCUMENT.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.branches", description="What only CUDA enters.")
    parser.add_argument("--run", nargs="*", metavar="TESTS", help="run tests/cuda, and these; compare with the list")
    parser.add_argument("--write", action="store_true", help="bring the table of docs/gpu.md up to date")
    args = parser.parse_args()
    branches, rows = find(), table()
    seen: dict[tuple[Branch, int], set[str]] | None = None
    if args.run is not None:
        from tests.cuda.entered import run_tests

        seen = run_tests([*claimed(rows), *args.run])
    now = brought_up_to_date(rows, branches, seen)
    new = set(unlisted(rows, branches))
    for row in now:
        if row.branch in new:
            print(line(row))
    for branch in gone(rows, branches):
        print(f"gone: {branch.where} {branch.text}")
    for row in () if seen is None else not_entered(rows, branches, seen):
        print(f"not entered by {row.entered_by}: {row.branch.where} {row.branch.text}")
    if args.write:
        write(now)
    entered = sum(bool(row.entered_by) for row in now)
    print(f"{entered} of {len(branches)} branches are entered by a rehearsal ({entered / len(branches):.0%})")


if __name__ == "__main__":
    main()
