"""Trajectories with remote arrays: small fields stay in this process, token arrays are passed by reference."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import torch

from skyrl_mega.trajectories.remote_arrays import RemoteArrays, StoredTrajectory, shortened
from skyrl_mega.trajectories.sequences import Column, Sequences
from skyrl_mega.trajectories.trajectory import ARRAYS, Trajectory, policy_texts


def stored_tokens(t: Trajectory) -> Sequences:
    """Returns a trajectory's tokens as a single sequence (N = 1) with the columns `mask` (int8), `rollout_logprobs`
    (float32) and all entries of `Trajectory.columns`. Fetches remote arrays.

    Raises:
        ValueError: The number of a column's values differs from the number of tokens.
        ClusterError: Remote arrays are lost.
    """
    stored = Sequences.of([np.asarray(t.tokens, np.int32)])
    stored.add("mask", Column(torch.from_numpy(np.array(t.mask, np.int8))))
    stored.add("rollout_logprobs", Column(torch.from_numpy(np.array(t.logprobs, np.float32))))
    for name, column in t.columns.items():
        stored.add(name, column)
    return stored


def detach_arrays(t: Trajectory) -> tuple[Trajectory, StoredTrajectory]:
    """Returns a shallow copy of a trajectory without the fields `ARRAYS`, and these fields as a `StoredTrajectory`. The
    trajectory itself stays unchanged; it must have no remote arrays yet.

    The caller stores the second with Ray and sets `remote_arrays.ref` of the copy to the reference (`attach_arrays`).
    From then on, each reading of one of the fields of the copy fetches the stored arrays.

    Raises:
        ValueError: The number of a column's values differs from the number of tokens.
        TypeError: Messages or tools contain a value unknown to JSON.
    """
    small = copy.copy(t)
    small.remote_arrays = RemoteArrays(
        t.length, t.tokens_by_version(), t.written, [shortened(text) for text in policy_texts(t)]
    )
    for name in ARRAYS:
        del vars(small)[name]
    messages, tools = (json.dumps(value).encode() for value in (t.messages, t.tools))
    return small, StoredTrajectory(stored_tokens(t), messages, tools)


def attach_arrays(small: Trajectory, ref: Any) -> Trajectory:
    """Sets `small.remote_arrays.ref` to `ref`, Ray's reference to the stored arrays, and returns the same `small`.
    Raises AssertionError for a trajectory with its own arrays."""
    assert small.remote_arrays is not None
    small.remote_arrays.ref = ref
    return small


def fetch_arrays(t: Trajectory) -> Trajectory:
    """Fetches the remote arrays of a trajectory and returns a copy that contains the arrays. A trajectory without
    remote arrays is returned itself.

    Raises:
        ClusterError: The remote arrays are lost.
    """
    if t.remote_arrays is None:
        return t
    whole = copy.copy(t)
    vars(whole).update(t.remote_arrays.fetch(), remote_arrays=None)
    return whole
