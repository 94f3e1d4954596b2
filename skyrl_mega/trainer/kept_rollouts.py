"""Trajectories in a checkpoint: what was generated, or asked for, and no step has learned from yet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_mega.config.outside import json_object
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout import trajectory_io
from skyrl_mega.rollout.trajectory import Group, Trajectory

_ABOUT, _ROWS = "rollouts.json", "rollouts.parquet"


def write(folder: Path, about: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> None:
    """Writes trajectories with their columns, and JSON about them."""
    with (folder / _ABOUT).open("w") as opened:
        json.dump(about, opened)
    if trajectories:
        trajectory_io.write(folder / _ROWS, list(trajectories), columns=True)


def read(folder: Path, prompts: Sequence[Prompt]) -> tuple[dict[str, Any], list[Trajectory]]:
    """What `write` was given; trajectories have these prompts, by uid."""
    about: dict[str, Any] = json_object(folder / _ABOUT, "take another checkpoint")
    trajectories = trajectory_io.read(folder / _ROWS) if (folder / _ROWS).exists() else []
    own = {prompt.uid: prompt for prompt in prompts}
    for t in trajectories:
        t.prompt = own.get(t.prompt.uid, t.prompt)
    return about, trajectories


def there(folder: Path) -> bool:
    """Whether a checkpoint has any."""
    return (folder / _ABOUT).exists()


def places(groups: Sequence[Group], trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """Where the groups' trajectories are among these."""
    at = {id(t): place for place, t in enumerate(trajectories)}
    return [
        {"samples": [at[id(t)] for t in group.trajectories], "greedy": at[id(group.greedy)] if group.greedy else None}
        for group in groups
    ]


def grouped(places: Sequence[Mapping[str, Any]], trajectories: Sequence[Trajectory]) -> list[Group]:
    """The groups again; one that is named twice is the same group twice."""
    made: dict[tuple[int, ...], Group] = {}
    for place in places:
        samples = tuple(place["samples"])
        if samples not in made:
            own = [trajectories[i] for i in samples]
            greedy = None if place["greedy"] is None else trajectories[place["greedy"]]
            made[samples] = Group(own[0].prompt, own, greedy)
    return [made[tuple(place["samples"])] for place in places]
