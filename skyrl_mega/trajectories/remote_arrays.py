"""Summary and location of a trajectory's remote arrays."""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from skyrl_mega.cluster.errors import ClusterError, describe

if TYPE_CHECKING:  # torch is not for those who only read trajectories
    from skyrl_mega.trajectories.sequences import Sequences

LONGEST = 256
"""Longest answer kept in full, in characters. A longer answer is reduced to the last `END` characters and a hash of the
whole."""
END = 200


class StoredTrajectory(NamedTuple):
    """A stored trajectory, in memory shared by all processes of a node."""

    tokens: Sequences
    """A single sequence, with `mask` int8, `rollout_logprobs` float32, and the trajectory's further columns."""
    messages: bytes
    """The conversation as JSON, for human readers."""
    tools: bytes = b"[]"
    """The tools in the prompt as JSON, for human readers."""


@dataclass
class RemoteArrays:
    """Summary and location of a trajectory's remote arrays."""

    length: int
    """Number of tokens."""
    tokens_by_version: list[int]
    """Number of the policy's tokens for each entry of `Trajectory.versions`."""
    written: int
    """Number of the policy's tokens."""
    texts: list[str]
    """The policy's text in each turn; for a long answer a hash and the last characters, so that two entries are equal
    exactly if the answers are."""
    ref: Any = None
    """Ray's reference to a `StoredTrajectory`; None until the caller of `by_reference.detach_arrays` sets it."""

    def fetch(self) -> dict[str, Any]:
        """Fetches the arrays and returns field name of `Trajectory` → value, for all fields in `ARRAYS`. Every call
        makes new values; only tensors in `columns` share Ray's memory and must not be written to.

        Raises:
            ClusterError: The arrays are lost.
        """
        import ray

        try:
            stored: StoredTrajectory = ray.get(self.ref)
        except ray.exceptions.RayError as error:
            raise arrays_lost(error) from error
        sequences, columns = stored.tokens, dict(stored.tokens.columns)
        mask, logprobs = columns.pop("mask").values, columns.pop("rollout_logprobs").values
        return {
            "tokens": array("i", sequences.tokens.numpy().tobytes()),
            "mask": array("b", mask.numpy().tobytes()),
            "logprobs": array("f", logprobs.numpy().tobytes()),
            "columns": columns,
            "messages": json.loads(stored.messages),
            "tools": json.loads(stored.tools),
        }


def arrays_lost(error: Exception) -> ClusterError:
    """Returns, without raising, the error for remote arrays that Ray could not deliver, with the text of `error`."""
    return ClusterError(
        f"trajectories stored on a node were lost (the node died, or its object store is full): {describe(error)}"
    )


def shortened(text: str) -> str:
    """Returns an answer of at most `LONGEST` characters unchanged; for a longer answer a hash of the whole and the last
    `END` characters."""
    if len(text) <= LONGEST:
        return text
    return f"{hashlib.blake2b(text.encode(errors='surrogatepass'), digest_size=12).hexdigest()} … {text[-END:]}"
