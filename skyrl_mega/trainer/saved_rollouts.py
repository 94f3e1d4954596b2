"""Trajectories in a checkpoint: finished or requested, and not yet trained on.

These trajectories are valid only under the settings of the saved run. Under other settings the prompts are sampled
again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_mega.common.safe_read import read_json, writing
from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.trajectories import parquet
from skyrl_mega.trajectories.by_reference import attach_arrays, detach_arrays
from skyrl_mega.trajectories.trajectory import Group, Trajectory

_STATE, _ROWS = "rollouts.json", "rollouts.parquet"


@dataclass(frozen=True)
class Discarded:
    """Saved trajectories unusable for the resumed run. The prompts are sampled again."""

    groups: int
    """Number of discarded groups, finished or requested."""
    reason: str
    """The cause, for the console."""
    named_steps: int
    """Number of steps with names already given to groups; some of these groups may have been trained on."""

    def __str__(self) -> str:
        """Returns a line for the console; empty without discarded groups."""
        if not self.groups:
            return ""
        return (
            f"discarded {count_groups(self.groups)} generated ahead or unfinished; their prompts are sampled again "
            f"first; {self.reason}"
        )


def count_groups(groups: int) -> str:
    """Returns a number of groups with the noun, such as "1 group" or "2,000 groups"."""
    return "1 group" if groups == 1 else f"{groups:,} groups"


def write(folder: Path, config: Config, state: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> None:
    """Writes JSON with further state, and trajectories, if any, with all columns; replaces files that exist.

    Args:
        folder: The checkpoint's folder for rollouts.
        config: The run's settings.
        state: Contains `stream`, the position in the data, and `prompts`, indices of prompts taken before this position
            and not yet trained on. Also `named` if groups carry names of future steps (`Discarded`).
        trajectories: The trajectories to write.

    Raises:
        ClusterError: The trajectories' arrays are lost, or writing took too long.
        OSError: A file could not be written, also because `folder` does not exist.
    """
    with writing(folder / _STATE), (folder / _STATE).open("w") as opened:
        json.dump({**state, "form": FORMAT, "settings": _settings(config)}, opened)
    if trajectories:
        parquet.write_apart(folder / _ROWS, list(trajectories), columns=True)


def read(
    folder: Path, config: Config, stream: PromptStream, prompts: Sequence[Prompt]
) -> tuple[dict[str, Any], list[Trajectory]] | Discarded | None:
    """Reads the output of `write`, connects the trajectories to `prompts` by uid, and restores the stream's position.

    Returns:
        The state given to `write`, and the trajectories. None if nothing was saved: then nothing is changed.
        `Discarded` if the files' format, a setting or the messages of a prompt differ: then the prompts not yet trained
        on are put back into the stream.

    Raises:
        UserError: `rollouts.json` cannot be read, or the number of data rows, the seed or the shuffling changed.
        OSError, pyarrow.ArrowException, TypeError, ValueError: `rollouts.parquet` cannot be read, or was not written by
            `write`.
    """
    if not (folder / _STATE).exists():
        return None
    state: dict[str, Any] = read_json(folder / _STATE, "take another checkpoint")
    stream.restore(state["stream"])
    by_uid = {prompt.uid: prompt for prompt in prompts}
    reason = _differing(state, _settings(config))
    store = _store_remotely if config.environment.processes else lambda t: t
    chunks = parquet.read_some(folder / _ROWS) if not reason and (folder / _ROWS).exists() else ()
    trajectories = [store(t) for chunk in chunks for t in chunk]
    if any(by_uid[t.prompt.uid].messages != t.prompt.messages for t in trajectories if t.prompt.uid in by_uid):
        reason = "data.train now has other prompts in their rows"
    if reason:
        stream.put_back(state["prompts"])
        return Discarded(len(state["prompts"]), reason, _named_steps(state))
    for t in trajectories:
        t.prompt = by_uid.get(t.prompt.uid, t.prompt)
    return state, trajectories


def _named_steps(state: Mapping[str, Any]) -> int:
    """Returns the number of steps with names already given to groups. Earlier versions saved only the number of groups;
    a step contained at least a group."""
    steps: int = state["named"] if "named" in state else state.get("asked", 0)
    return steps


def _store_remotely(t: Trajectory) -> Trajectory:
    """Moves a trajectory's arrays into Ray's object store, as rollout workers do."""
    import ray

    small, arrays = detach_arrays(t)
    return attach_arrays(small, ray.put(arrays))


FORMAT = 4
"""Format version of the files. Trajectories in another format are discarded."""
ENGINE_SETTINGS = (
    *("engines", "tensor", "memory_fraction", "kv_cache_gib", "concurrency", "threads", "eager"),
    *("request_timeout_s", "restarts"),
)
"""Settings in `rollout` about the number and care of engines, without effect on the content of trajectories."""
PLACE_SETTINGS = ("workers", "slots", "processes", "retries", "max_failed")
"""Settings in `environment` about the place and concurrency of environments, without effect on the content of
trajectories."""


def _settings(config: Config) -> dict[str, str]:
    """Returns a digest of each setting that affects the number, age or content of groups."""
    data, algorithm = config.data, config.algorithm
    # A service has another address in each start of a run.
    retriever = replace(config.environment.retriever, url=None, token_variable="")
    environment = asdict(replace(config.environment, retriever=retriever))
    parts = {
        **{f"asynchrony.{k}": v for k, v in asdict(config.asynchrony).items()},
        "data.prompts_per_step": data.prompts_per_step,
        "data.samples_per_prompt": data.samples_per_prompt,
        **{f"rollout.{k}": v for k, v in asdict(config.rollout).items() if k not in ENGINE_SETTINGS},
        **{f"environment.{k}": v for k, v in environment.items() if k not in PLACE_SETTINGS},
        "algorithm.advantage": algorithm.advantage,
        "algorithm.reward_weights": algorithm.reward_weights,
        "policy.moe.replay": config.policy.moe.replay,
    }
    texts = {key: json.dumps(value, sort_keys=True, default=str) for key, value in parts.items()}
    return {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}


def _differing(state: Mapping[str, Any], now: Mapping[str, str]) -> str:
    """Returns the reason why saved trajectories cannot be used under the present settings; empty if usable."""
    before = state.get("settings")
    if state.get("form") != FORMAT or not isinstance(before, dict):
        return "another version of the program saved them"
    keys = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    return f"settings unlike the checkpoint's: {', '.join(keys)}" if keys else ""


def group_indices(groups: Sequence[Group], trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """Returns, for each group, `{"samples": indices, "greedy": index or None}`, positions of its trajectories in
    `trajectories`; the inverse of `rebuild_groups`."""
    index = {id(t): place for place, t in enumerate(trajectories)}
    return [
        {
            "samples": [index[id(t)] for t in group.trajectories],
            "greedy": index[id(group.greedy)] if group.greedy else None,
        }
        for group in groups
    ]


def rebuild_groups(indices: Sequence[Mapping[str, Any]], trajectories: Sequence[Trajectory]) -> list[Group]:
    """Returns the groups whose `group_indices` are `indices`. Entries with the same samples become the same object."""
    groups: dict[tuple[int, ...], Group] = {}
    for entry in indices:
        samples = tuple(entry["samples"])
        if samples not in groups:
            members = [trajectories[i] for i in samples]
            greedy = None if entry["greedy"] is None else trajectories[entry["greedy"]]
            groups[samples] = Group(members[0].prompt, members, greedy)
    return [groups[tuple(entry["samples"])] for entry in indices]
