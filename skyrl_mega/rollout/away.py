"""What is known of a trajectory's arrays that are elsewhere."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_mega.cluster.errors import ClusterError
from skyrl_mega.cluster.group import describe

if TYPE_CHECKING:  # torch is not for those who only read trajectories
    from skyrl_mega.megatron.parts import Stored

LONGEST = 256
"""Characters of an answer that stay as they are; of a longer one its end does, and a digest of all."""
END = 200


@dataclass
class Away:
    """What is known of arrays that are elsewhere."""

    length: int
    """Tokens."""
    drawn: list[int]
    """Tokens of the policy, for each entry of `Trajectory.versions`."""
    written: int
    """Tokens of the policy."""
    words: list[str]
    """What the policy said in each turn; of a long one its end, after a digest: two are equal where the answers are."""
    ref: Any = None
    """Ray's reference to a `Stored`."""

    def fetch(self) -> dict[str, Any]:
        """`ARRAYS`, as the trajectory had them."""
        import ray

        try:
            stored: Stored = ray.get(self.ref)
        except ray.exceptions.RayError as error:
            raise lost(error) from error
        own, columns = stored.tokens, dict(stored.tokens.columns)
        mask, logprobs = columns.pop("mask").values, columns.pop("rollout_logprobs").values
        return {
            "tokens": array("i", own.tokens.numpy().tobytes()),
            "mask": array("b", mask.numpy().tobytes()),
            "logprobs": array("f", logprobs.numpy().tobytes()),
            "columns": columns,
            "messages": json.loads(stored.messages),
        }


def lost(error: Exception) -> ClusterError:
    """What is raised where arrays are gone: the run ends and goes on from its checkpoint."""
    return ClusterError(f"what was played on a node is gone with it, or with its memory: {describe(error)}")


def short(text: str) -> str:
    """An answer as `Away.words` has it."""
    if len(text) <= LONGEST:
        return text
    return f"{hashlib.blake2b(text.encode(errors='surrogatepass'), digest_size=12).hexdigest()} … {text[-END:]}"
