"""The stored results: a JSON file, rewritten after every event of a proof, and the printed table."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.proof import Proof
from skyrl_mega.common.errors import UserError

PASSED, FAILED, TIMEOUT, CUT, RUNNING = "passed", "failed", "timeout", "cut short", "running"
NOT_HERE, CUDA_ONLY, WAITING = "not here", "cuda only", "not yet"
CHECKOUT = Path(__file__).parents[2]
VERDICTS = (PASSED, FAILED, TIMEOUT, CUDA_ONLY)
"""Final statuses: a later call does not repeat such a proof."""


class Results:
    """The known results of a device, and the file that stores them.

    Raises:
        UserError: A file with earlier results has another format.
    """

    def __init__(
        self,
        folder: Path,
        device: dict[str, Any],
        versions: dict[str, str | None],
        earlier: Iterable[Path] = (),
    ) -> None:
        """Reads this device's results from the folder and from earlier files and folders."""
        self.path = folder / f"{re.sub('[^a-z0-9]+', '-', str(device['name']).lower()).strip('-')}.json"
        self.kept: dict[str, Any] = {"device": device, "versions": versions, "proofs": {}}
        for path in (folder, *earlier):
            for file in files(path):
                before = read(file)
                if before["device"]["name"] == device["name"]:
                    self._merge(before["proofs"])

    def _merge(self, proofs: dict[str, Any]) -> None:
        """Merges results: a result with a verdict wins over a result without, then the later result wins."""
        for name, result in proofs.items():
            known = self.kept["proofs"].get(name)
            if known is None or _rank(result) > _rank(known):
                self.kept["proofs"][name] = result

    def of(self, proof: Proof) -> dict[str, Any]:
        """Returns the result of a proof; empty before its start."""
        result: dict[str, Any] = self.kept["proofs"].get(proof.name, {})
        return result

    def status(self, proof: Proof) -> str:
        """Returns the status of a proof: a constant of this module."""
        return str(self.of(proof).get("status", WAITING))

    def put(self, proof: Proof, result: dict[str, Any]) -> None:
        """Stores a proof's result and writes the file atomically: a reader sees the old or the new file."""
        self.kept["proofs"][proof.name] = {"about": proof.about, "stage": proof.stage, **result}
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The file is kept and read elsewhere, so paths of this checkout are relative.
            new.write_text(json.dumps(self.kept, indent=1).replace(f"{CHECKOUT}/", "") + "\n")
            new.replace(self.path)
        except OSError as error:
            raise UserError(
                f"--results {self.path}: cannot be written ({error.strerror}); give another folder"
            ) from error


def _rank(result: dict[str, Any]) -> tuple[bool, str]:
    return result.get("status") in VERDICTS, str(result.get("at", ""))


def files(path: Path) -> list[Path]:
    """Returns the results files of a folder, or the file itself."""
    return sorted(path.glob("*.json")) if path.is_dir() else [path] if path.exists() else []


def read(path: Path) -> dict[str, Any]:
    """Returns the content of a results file.

    Raises:
        UserError: The file has another format.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        dict(content["proofs"]), str(content["device"]["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--results {path}: not a file of these proofs ({error}); give another path") from error
    return content


def table(proofs: Sequence[Proof], results: Results) -> str:
    """Returns the table of proof, status, figure, limit, ratio and seconds; failures and parts left out follow."""
    rows = [("proof", "status", "figure", "", "limit", "ratio", "seconds")]
    below: list[str] = []
    for proof in proofs:
        result = results.of(proof)
        seconds = f"{result['seconds']:.0f}" if "seconds" in result else ""
        first = (proof.name, results.status(proof))
        figures = result.get("figures", [])
        for i, figure in enumerate(figures or [None]):
            head = first if i == 0 else ("", "")
            last = seconds if i == 0 else ""
            rows.append((*head, *(_cells(figure) if figure else ("", "", "", "")), last))
        below += [f"{proof.name}: {line}" for line in result.get("wrong", [])]
        below += [f"{proof.name}: {result['why']}"] if result.get("why") else []
        below += [f"{proof.name}: left out: {line}" for line in result.get("left out", [])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(w) if i in (3, 4, 5, 6) else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([line.rstrip() for line in lines] + (["", *below] if below else []))


def _cells(figure: dict[str, Any]) -> tuple[str, str, str, str]:
    value = f"{figure['value']:.4g} {figure['unit']}"
    if "limit" in figure:
        ratio = figure["ratio"]
        return figure["name"], value, f"{figure['limit']:.4g}", "" if ratio is None else f"{ratio:.3f}"
    bound = "".join(f"{sign} {figure[key]:.3g}" for key, sign in (("at_most", "≤"), ("at_least", "≥")) if key in figure)
    return figure["name"], value, bound, ""
