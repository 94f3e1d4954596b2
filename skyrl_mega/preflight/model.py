"""The model's files: every node sees all of them, whole and the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skyrl_mega.config.errors import UserError
from skyrl_mega.hf_checkpoint.index import check_files
from skyrl_mega.preflight.finding import Finding, usual


@dataclass(frozen=True)
class ModelFacts:
    """What a node says of the model's folder."""

    error: str | None
    """What is wrong with a file, by name."""
    print: str | None
    """A hash over names and sizes of the weights, and the content of the small files."""


def gather(model: Path) -> ModelFacts:
    """Reads the headers of all weights and compares them with config.json."""
    try:
        check_files(model)
        digest = hashlib.sha256()
        for file in sorted(model.iterdir()):
            if file.is_file() and not file.name.startswith("."):
                digest.update(f"{file.name} {file.stat().st_size}\n".encode())
                if file.suffix in (".json", ".jinja", ".txt"):
                    digest.update(file.read_bytes())
        return ModelFacts(None, digest.hexdigest()[:12])
    except (UserError, OSError) as error:
        return ModelFacts(str(error), None)


def check(facts: Mapping[str, ModelFacts], model: Path) -> list[Finding]:
    """Names the nodes that have not what the most have."""
    found = [Finding(node, "model", "bad", f.error) for node, f in facts.items() if f.error]
    prints = {node: f.print for node, f in facts.items() if f.print}
    for node, value in prints.items():
        if value != (common := usual(prints)):
            others = sum(other == common for other in prints.values())
            text = f"{model}: not the names, sizes or configuration of {others} of {len(prints)} nodes; copy it again"
            found.append(Finding(node, "model", "bad", text))
    return found
