"""Trajectories in a checkpoint: what was generated, or asked for, and no step has learned from yet.

They are of the settings that the run had. Under other ones their prompts are drawn again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_mega.config.outside import json_object
from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout import trajectory_io
from skyrl_mega.rollout.by_reference import joined, put_away
from skyrl_mega.rollout.trajectory import Group, Trajectory

_ABOUT, _ROWS = "rollouts.json", "rollouts.parquet"


def write(folder: Path, config: Config, about: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> None:
    """Writes trajectories with their columns, and JSON about them.

    Args:
        folder: The checkpoint's.
        config: The run's settings.
        about: With `stream`, the place in the data, and `prompts`, those that were drawn before it and no step has
            learned from.
        trajectories: What is written.
    """
    with (folder / _ABOUT).open("w") as opened:
        json.dump({**about, "settings": _settings(config)}, opened)
    if trajectories:
        trajectory_io.write_apart(folder / _ROWS, list(trajectories), columns=True)


def read(
    folder: Path, config: Config, stream: PromptStream, prompts: Sequence[Prompt]
) -> tuple[dict[str, Any], list[Trajectory]] | None:
    """What `write` was given; trajectories have these prompts, by uid. The stream is where it was.

    None where there is nothing, or it was made with other settings or prompts: what no step has learned from is then
    drawn again.
    """
    if not (folder / _ABOUT).exists():
        return None
    about: dict[str, Any] = json_object(folder / _ABOUT, "take another checkpoint")
    stream.restore(about["stream"])
    own = {prompt.uid: prompt for prompt in prompts}
    same = about["settings"] == _settings(config)
    away = _away if config.environment.processes else lambda t: t
    there = trajectory_io.read_some(folder / _ROWS) if same and (folder / _ROWS).exists() else ()
    trajectories = [away(t) for some in there for t in some]
    if not same or any(own[t.prompt.uid].messages != t.prompt.messages for t in trajectories if t.prompt.uid in own):
        stream.put_back(about["prompts"])
        return None
    for t in trajectories:
        t.prompt = own.get(t.prompt.uid, t.prompt)
    return about, trajectories


def _away(t: Trajectory) -> Trajectory:
    """As those are that other processes play."""
    import ray

    small, arrays = put_away(t)
    return joined(small, ray.put(arrays))


FORM = 3
"""Of what is written: another one's trajectories are drawn again."""
ENGINES = (
    *("engines", "tensor", "memory_fraction", "kv_cache_gib", "concurrency", "threads", "eager"),
    *("request_timeout_s", "restarts"),
)
"""Settings of `rollout` that say what engines there are and how they are looked after, and not what they are asked."""
WHERE = ("workers", "slots", "processes", "retries", "max_failed")
"""Settings of `environment` that say where and how many at once trajectories are played, and not what they are."""


def _settings(config: Config) -> str:
    """A digest of what decides how many groups there may be, of what age, and what is in them."""
    data, algorithm = config.data, config.algorithm
    rollout = {k: v for k, v in asdict(config.rollout).items() if k not in ENGINES}
    environment = {k: v for k, v in asdict(config.environment).items() if k not in WHERE}
    parts = [
        FORM,
        asdict(config.asynchrony),
        [data.prompts_per_step, data.samples_per_prompt],
        [rollout, environment],
        [algorithm.advantage, algorithm.reward_weights, config.policy.moe.replay],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


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
