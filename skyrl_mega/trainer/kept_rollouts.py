"""Trajectories in a checkpoint: what was generated, or asked for, and no step has learned from yet.

They are of the settings that the run had. Under other ones their prompts are drawn again.
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
    """What a run that resumes cannot use: its prompts are drawn again."""

    groups: int
    """That were generated, or asked for."""
    why: str
    named: int
    """Steps whose names were given to groups, some of which may have been trained on."""

    def __str__(self) -> str:
        """As a line for people; nothing of no groups."""
        if not self.groups:
            return ""
        return (
            f"discarded: {counted(self.groups)} generated ahead or under way, whose prompts are drawn again first; "
            f"{self.why}"
        )


def counted(groups: int) -> str:
    """So many groups, as a person says it."""
    return "1 group" if groups == 1 else f"{groups:,} groups"


def write(folder: Path, config: Config, about: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> None:
    """Writes trajectories with their columns, and JSON about them.

    Args:
        folder: The checkpoint's.
        config: The run's settings.
        about: With `stream`, the place in the data, and `prompts`, those that were drawn before it and no step has
            learned from. Also `named`, where groups have names of steps that are not done (`Discarded`).
        trajectories: What is written.
    """
    with writing(folder / _ABOUT), (folder / _ABOUT).open("w") as opened:
        json.dump({**about, "form": FORM, "settings": _settings(config)}, opened)
    if trajectories:
        trajectory_io.write_apart(folder / _ROWS, list(trajectories), columns=True)


def read(
    folder: Path, config: Config, stream: PromptStream, prompts: Sequence[Prompt]
) -> tuple[dict[str, Any], list[Trajectory]] | Discarded | None:
    """What `write` was given; trajectories have these prompts, by uid. The stream is where it was.

    None where there is nothing. Where it was made with other settings or prompts, what no step has learned from is
    drawn again.
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
    """Steps whose names were given to groups. Earlier versions tell how many groups there were and not how many a step
    had: it had one at least."""
    steps: int = about["named"] if "named" in about else about.get("asked", 0)
    return steps


def _away(t: Trajectory) -> Trajectory:
    """As those are that other processes play."""
    import ray

    small, arrays = detach_arrays(t)
    return attach_arrays(small, ray.put(arrays))


FORM = 4
"""Of what is written: another one's trajectories are drawn again."""
ENGINES = (
    *("engines", "tensor", "memory_fraction", "kv_cache_gib", "concurrency", "threads", "eager"),
    *("request_timeout_s", "restarts"),
)
"""Settings of `rollout` that say what engines there are and how they are looked after, and not what they are asked."""
WHERE = ("workers", "slots", "processes", "retries", "max_failed")
"""Settings of `environment` that say where and how many at once trajectories are played, and not what they are."""


def _settings(config: Config) -> dict[str, str]:
    """Digests of what decides how many groups there may be, of what age, and what is in them."""
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
    """Why what was written cannot be used with these settings; nothing where it can."""
    before = about.get("settings")
    if about.get("form") != FORM or not isinstance(before, dict):
        return "another version of the program has written it"
    keys = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    return f"not as in the checkpoint: {', '.join(keys)}" if keys else ""


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
