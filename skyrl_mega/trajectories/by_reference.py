"""Trajectories with remote arrays: small fields stay in this process, token arrays are passed by reference."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from skyrl_mega.trajectories.remote_arrays import RemoteArrays, StoredTrajectory, shortened
from skyrl_mega.trajectories.sequences import Column, Sequences
from skyrl_mega.trajectories.trajectory import ARRAYS, Group, Trajectory, policy_texts


def detach_arrays(t: Trajectory) -> tuple[Trajectory, StoredTrajectory]:
    """Splits a trajectory into a copy without arrays and the arrays themselves. The caller sets
    `Trajectory.remote_arrays.ref`.

    Reading any missing array fetches all arrays.
    """
    stored = Sequences.of([np.asarray(t.tokens, np.int32)])
    stored.add("mask", Column(torch.from_numpy(np.array(t.mask, np.int8))))
    stored.add("rollout_logprobs", Column(torch.from_numpy(np.array(t.logprobs, np.float32))))
    for name, column in t.columns.items():
        stored.add(name, column)
    small = copy.copy(t)
    small.remote_arrays = RemoteArrays(
        t.length, t.tokens_by_version(), t.written, [shortened(text) for text in policy_texts(t)]
    )
    for name in ARRAYS:
        del vars(small)[name]
    return small, StoredTrajectory(stored, json.dumps(t.messages).encode())


def attach_arrays(small: Trajectory, ref: Any) -> Trajectory:
    """Sets the Ray reference `ref` to a trajectory's remote arrays and returns the trajectory."""
    assert small.remote_arrays is not None
    small.remote_arrays.ref = ref
    return small


def fetch_arrays(t: Trajectory) -> Trajectory:
    """Returns the trajectory with all arrays in this process, after fetching remote arrays.

    Raises:
        ClusterError: The remote arrays are lost.
    """
    if t.remote_arrays is None:
        return t
    whole = copy.copy(t)
    vars(whole).update(t.remote_arrays.fetch(), remote_arrays=None)
    return whole


def fetch_group_arrays(groups: list[Group]) -> list[Group]:
    """Returns the groups of a step with all arrays in this process. A trajectory or group listed twice stays a single
    object.

    Raises:
        ClusterError: Remote arrays are lost.
    """
    remote = {id(t): t for group in groups for t in _all(group) if t.remote_arrays is not None}
    if not remote:
        return groups
    fetched = {one: fetch_arrays(t) for one, t in remote.items()}
    rebuilt: dict[int, Group] = {}
    for group in groups:
        trajectories = [fetched.get(id(t), t) for t in group.trajectories]
        greedy = None if group.greedy is None else fetched.get(id(group.greedy), group.greedy)
        rebuilt.setdefault(id(group), Group(group.prompt, trajectories, greedy))
    return [rebuilt[id(group)] for group in groups]


def _all(group: Group) -> list[Trajectory]:
    return group.trajectories if group.greedy is None else [*group.trajectories, group.greedy]


def all_remote(played: Sequence[Trajectory]) -> bool:
    """Returns True if there are trajectories, all with remote arrays."""
    return bool(played) and all(t.remote_arrays is not None for t in played)
