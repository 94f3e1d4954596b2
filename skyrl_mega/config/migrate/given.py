"""Settings of another program as a user's file or command line gives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Given:
    """A setting of another program with its value."""

    key: str
    """Name in the other program: `trainer.nnodes`, `--rollout-batch-size`, `num_generations`."""
    value: Any
    """Value as YAML reads it, with variables of the script replaced; the text as written if `unresolved`."""
    unresolved: str = ""
    """Reason why the value needs a running shell or Python; empty for a known value."""


@dataclass
class GivenSettings:
    """All settings found in one input."""

    program: str
    """Program as named in `other_programs/table.yaml`: SkyRL, verl, slime or TRL."""
    settings: list[Given] = field(default_factory=list)
    """Settings in their order; a later setting replaces an earlier setting of the same key."""
    assumptions: list[str] = field(default_factory=list)
    """Sentences about values that the environment of a shell could change."""
    entry: str = ""
    """Module or script that the command starts, such as `verl.trainer.main_ppo`; empty if unknown."""
    processes: int | None = None
    """Number of processes given to the launcher, such as `accelerate launch --num_processes`; None if not given."""
