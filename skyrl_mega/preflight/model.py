"""Model files: every node must see all of them, complete and equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skyrl_mega.common.errors import UserError
from skyrl_mega.hf_checkpoint.index import check_files
from skyrl_mega.preflight.finding import NodeProblem, outliers


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model's folder on a node."""

    error: str | None
    """Error with the file's name; None without an error."""
    digest: str | None
    """Hash of the names and sizes of all files and the content of small files; None on an error."""


def gather(model: Path) -> ModelFacts:
    """Returns the facts about the model's folder on this node. A missing or damaged folder is described in
    `ModelFacts.error`, not raised.

    Checks the headers of all weights against config.json. The hash covers the names and sizes of all files, and the
    contents of small files, but no weights.
    """
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


def check(facts: Mapping[str, ModelFacts], model: Path) -> list[NodeProblem]:
    """Returns findings (bad) for nodes with an error, and for nodes whose files differ from most nodes'; [] without
    any.

    Args:
        facts: Node → result of `gather`.
        model: The model's folder, for the texts.
    """
    findings = [NodeProblem(node, "model", "bad", f.error) for node, f in facts.items() if f.error]
    digests = {node: f.digest for node, f in facts.items() if f.digest}
    for node, _, most in outliers(digests):
        text = f"{model}: names, sizes or configuration differ from {most}; copy it again"
        findings.append(NodeProblem(node, "model", "bad", text))
    return findings
