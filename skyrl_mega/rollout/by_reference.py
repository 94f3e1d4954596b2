"""Trajectories whose arrays are elsewhere: what a step decides by stays, what is computed on goes by reference."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from skyrl_mega.megatron.parts import Stored
from skyrl_mega.megatron.sequences import Column, Sequences
from skyrl_mega.rollout.away import Away, short
from skyrl_mega.rollout.trajectory import ARRAYS, Trajectory, words


def put_away(t: Trajectory) -> tuple[Trajectory, Stored]:
    """A trajectory without its arrays, and these. `Trajectory.away.ref` is yours to set.

    What is asked for of the former and is not there, is fetched then.
    """
    stored = Sequences.of([np.asarray(t.tokens, np.int32)])
    stored.add("mask", Column(torch.from_numpy(np.array(t.mask, np.int8))))
    stored.add("rollout_logprobs", Column(torch.from_numpy(np.array(t.logprobs, np.float32))))
    for name, column in t.columns.items():
        stored.add(name, column)
    small = copy.copy(t)
    small.away = Away(t.length, t.drawn_by_version(), t.written, [short(text) for text in words(t)])
    for name in ARRAYS:
        del vars(small)[name]
    return small, Stored(stored, json.dumps(t.messages).encode())


def joined(small: Trajectory, ref: Any) -> Trajectory:
    """A trajectory that was put away, with the place where its arrays are."""
    assert small.away is not None
    small.away.ref = ref
    return small


def brought(t: Trajectory) -> Trajectory:
    """A trajectory with its arrays, wherever they were."""
    if t.away is None:
        return t
    whole = copy.copy(t)
    vars(whole).update(t.away.fetch(), away=None)
    return whole


def all_away(played: Sequence[Trajectory]) -> bool:
    """Whether none of them has arrays here."""
    return bool(played) and all(t.away is not None for t in played)
