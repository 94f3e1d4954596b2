"""Trajectories in a checkpoint: finished or requested, and not yet trained on.

These trajectories are valid only under the settings of the saved run. Under other settings the prompts are sampled
again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.config.safe_read import read_json, writing
from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout import trajectory_io
from skyrl_mega.rollout.by_reference import attach_arrays, detach_arrays
from skyrl_mega.rollout.trajectory import Group, Trajectory

_ABOUT, _ROWS = "rollouts.json", "rollouts.parquet"


@dataclass(frozen=True)
class Discarded:
    """Saved trajectories unusable for the resumed run. The prompts are sampled again."""

    groups: int
    """Number of discarded groups, finished or requested."""
    why: str
    named: int
    """Number of steps with names already given to groups; some of these groups may have been trained on."""

    def __str__(self) -> str:
        """Returns a line for the console; empty without discarded groups."""
        if not self.groups:
            return ""
        return (
            f"discarded: {counted(self.groups)} generated ahead or under way, whose prompts are drawn again first; "
            f"{self.why}"
        )


def counted(groups: int) -> str:
    """Returns the number with the noun, such as "1 group"."""
    return "1 group" if groups == 1 else f"{groups:,} groups"


def write(folder: Path, config: Config, about: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> None:
    """Writes trajectories with all columns, and JSON with further state.

    Args:
        folder: The checkpoint's folder for rollouts.
        config: The run's settings.
        about: Contains `stream`, the position in the data, and `prompts`, indices of prompts taken before this position
            and not yet trained on. Also `named` if groups carry names of future steps (`Discarded`).
        trajectories: The trajectories to write.
    """
    with writing(folder / _ABOUT), (folder / _ABOUT).open("w") as opened:
        json.dump({**about, "form": FORM, "settings": _settings(config)}, opened)
    if trajectories:
        trajectory_io.write_apart(folder / _ROWS, list(trajectories), columns=True)


def read(
    folder: Path, config: Config, stream: PromptStream, prompts: Sequence[Prompt]
) -> tuple[dict[str, Any], list[Trajectory]] | Discarded | None:
    """Reads the output of `write`, connects the trajectories to `prompts` by uid, and restores the stream's position.

    Returns None if nothing was saved. If settings or prompts differ, returns `Discarded` and puts the prompts not yet
    trained on back into the stream.
    """
    if not (folder / _ABOUT).exists():
        return None
    about: dict[str, Any] = read_json(folder / _ABOUT, "take another checkpoint")
    stream.restore(about["stream"])
    own = {prompt.uid: prompt for prompt in prompts}
    why = _differing(about, _settings(config))
    away = _away if config.environment.processes else lambda t: t
    there = trajectory_io.read_some(folder / _ROWS) if not why and (folder / _ROWS).exists() else ()
    trajectories = [away(t) for some in there for t in some]
    if any(own[t.prompt.uid].messages != t.prompt.messages for t in trajectories if t.prompt.uid in own):
        why = "data.train has other prompts in their place"
    if why:
        stream.put_back(about["prompts"])
        return Discarded(len(about["prompts"]), why, _named(about))
    for t in trajectories:
        t.prompt = own.get(t.prompt.uid, t.prompt)
    return about, trajectories


def _named(about: Mapping[str, Any]) -> int:
    """Returns the number of steps with names already given to groups. Earlier versions saved only the number of groups;
    a step contained at least a group."""
    steps: int = about["named"] if "named" in about else about.get("asked", 0)
    return steps


def _away(t: Trajectory) -> Trajectory:
    """Moves a trajectory's arrays into Ray's object store, as rollout workers do."""
    import ray

    small, arrays = detach_arrays(t)
    return attach_arrays(small, ray.put(arrays))


FORM = 4
"""Format version of the files. Trajectories in another format are discarded."""
ENGINES = (
    *("engines", "tensor", "memory_fraction", "kv_cache_gib", "concurrency", "threads", "eager"),
    *("request_timeout_s", "restarts"),
)
"""Settings in `rollout` about the number and care of engines, without effect on the content of trajectories."""
WHERE = ("workers", "slots", "processes", "retries", "max_failed")
"""Settings in `environment` about the place and concurrency of environments, without effect on the content of
trajectories."""


def _settings(config: Config) -> dict[str, str]:
    """Returns a digest of each setting that affects the number, age or content of groups."""
    data, algorithm = config.data, config.algorithm
    parts = {
        **{f"asynchrony.{k}": v for k, v in asdict(config.asynchrony).items()},
        "data.prompts_per_step": data.prompts_per_step,
        "data.samples_per_prompt": data.samples_per_prompt,
        **{f"rollout.{k}": v for k, v in asdict(config.rollout).items() if k not in ENGINES},
        **{f"environment.{k}": v for k, v in asdict(config.environment).items() if k not in WHERE},
        "algorithm.advantage": algorithm.advantage,
        "algorithm.reward_weights": algorithm.reward_weights,
        "policy.moe.replay": config.policy.moe.replay,
    }
    texts = {key: json.dumps(value, sort_keys=True, default=str) for key, value in parts.items()}
    return {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}


def _differing(about: Mapping[str, Any], now: Mapping[str, str]) -> str:
    """Returns the reason why saved trajectories cannot be used under the present settings; empty if usable."""
    before = about.get("settings")
    if about.get("form") != FORM or not isinstance(before, dict):
        return "another version of the program has written it"
    keys = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    return f"not as in the checkpoint: {', '.join(keys)}" if keys else ""


def places(groups: Sequence[Group], trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """Returns the indices of each group's trajectories in `trajectories`."""
    at = {id(t): place for place, t in enumerate(trajectories)}
    return [
        {"samples": [at[id(t)] for t in group.trajectories], "greedy": at[id(group.greedy)] if group.greedy else None}
        for group in groups
    ]


def grouped(places: Sequence[Mapping[str, Any]], trajectories: Sequence[Trajectory]) -> list[Group]:
    """Rebuilds the groups. Equal entries become the same object."""
    made: dict[tuple[int, ...], Group] = {}
    for place in places:
        samples = tuple(place["samples"])
        if samples not in made:
            own = [trajectories[i] for i in samples]
            greedy = None if place["greedy"] is None else trajectories[place["greedy"]]
            made[samples] = Group(own[0].prompt, own, greedy)
    return [made[tuple(place["samples"])] for place in places]
