"""Does every advantage and loss learn? Each trains addition from the same start, with Megatron, vLLM and the real loop.

    python -m benchmarks.learning_table [--seeds 0 1 2] [--only NAME …] [--steps N] [--draw]

The start is the quickstart's small mixture of experts after the supervised warm-up, made once and kept in
runs/learning_table/. All rows share start and evaluation, and all rows of a seed share the prompts and their order.
Each measurement is written to benchmarks/results/learning_table.json at once; the same command continues with missing
measurements, seed by seed. The command writes docs/learning_table.svg and the table in docs/learning.md; `--draw` does
only this.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.learning_page import lines, write_page
from benchmarks.learning_plot import write_plot
from benchmarks.learning_results import Figures, Results
from benchmarks.learning_rows import COMMON, STEPS, Row, rows
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.command import DONE, Parser, guarded
from skyrl_mega.telemetry.table import duration

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "learning_table.json"
PLOT, PAGE = ROOT / "docs" / "learning_table.svg", ROOT / "docs" / "learning.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures missing rows, prints the table, and writes plot and page."""
    os.chdir(ROOT)
    parser = Parser(prog="python -m benchmarks.learning_table", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows (default: all)")
    parser.add_argument("--steps", type=int, default=STEPS, help="RL steps of a row (default: %(default)s)")
    parser.add_argument("--draw", action="store_true", help="measure nothing; write plot and page of what was measured")
    return guarded(lambda: _run(parser.parse_args(arguments)), as_json=False)


def _run(args: argparse.Namespace) -> int:
    results = Results(RESULTS, [*COMMON, f"run.steps={args.steps}"])
    wanted = chosen(args.only)
    if not args.draw:
        _measure(results, wanted, args.seeds, args.steps)
    print("\n".join(lines(results, list(rows().values()))))
    write_plot(results, list(rows().values()), PLOT)
    write_page(results, list(rows().values()), PAGE)
    return DONE


def chosen(names: list[str] | None) -> list[Row]:
    """Returns the named rows, or all.

    Raises:
        UserError: A name is unknown.
    """
    known = rows()
    for name in names or ():
        if name not in known:
            raise UserError(f"--only {name}: no such row; allowed is {', '.join(known)}")
    return [known[name] for name in names or known]


def _measure(results: Results, wanted: list[Row], seeds: list[int], steps: int) -> None:
    """Measures missing rows, seed by seed: first rows with shared processes, then the others."""
    from benchmarks import learning_runs as runs  # slow imports, only needed to run

    missing = [(row, seed) for seed in seeds for row in wanted if not results.has(row.name, seed)]
    separate = {row.name for row in wanted if runs.needs_processes(row)}
    print(f"{len(missing)} of {len(wanted) * len(seeds)} runs to do", flush=True)
    if any(row.name not in separate for row, _ in missing) or (missing and results.start is None):
        with runs.session(steps, print) as session:
            results.begin_with(session.accuracy_at_the_start())
            for row, seed in missing:
                if row.name not in separate:
                    _keep(results, row, seed, lambda r=row, s=seed: session.train(r, s, steps))
    for row, seed in missing:
        if row.name in separate:
            _keep(results, row, seed, lambda r=row, s=seed: runs.alone(r, s, steps))


def _keep(results: Results, row: Row, seed: int, train: Callable[[], Figures]) -> None:
    began = time.monotonic()
    figures = train()
    results.keep(row.name, seed, figures)
    assert results.start is not None
    change = f"{results.start['accuracy']:.3f} → {figures['accuracy']:.3f}"
    took = duration(time.monotonic() - began)
    print(f"  {time.strftime('%H:%M:%S')}  seed {seed}  {row.name.ljust(22)} accuracy {change}   {took}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
