"""Settings of another program as given by a user's file or command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Given:
    """A given setting of another program: key and value."""

    key: str
    """Name in the other program: `trainer.nnodes`, `--rollout-batch-size`, `num_generations`."""
    value: Any
    """Value as parsed by YAML, after replacing variables of the script; the text as written if `unresolved`."""
    unresolved: str = ""
    """Reason why the value needs a running shell or Python; empty for a known value."""


@dataclass
class GivenSettings:
    """All given settings of another program, from a file or from command-line arguments."""

    program: str
    """Program as named in `other_programs/table.yaml`: SkyRL, verl, slime, TRL or NeMo-RL."""
    settings: list[Given] = field(default_factory=list)
    """Settings in their order; a later setting replaces an earlier setting of the same key."""
    missing: list[str] = field(default_factory=list)
    """Sentences about files that the user's file inherits from, and that were not found."""
    inherited: set[str] = field(default_factory=set)
    """Keys whose value comes only from an inherited file: neither the user's file nor the command line gives them."""
    assumptions: list[str] = field(default_factory=list)
    """Sentences for the user about values assumed, such as defaults that environment variables could replace."""
    entry: str = ""
    """Module or script started by the command, such as `verl.trainer.main_ppo`; empty if unknown."""
    file_name: str = ""
    """Name of NeMo-RL's YAML file without its ending, as a name for the run; empty without a file."""
    processes: int | None = None
    """Number of processes given to the launcher, such as `accelerate launch --num_processes`; None if not given."""
