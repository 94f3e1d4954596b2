"""One line of a table: another program's key, and what it is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """What stands for a key of another program."""

    here: tuple[str, ...] = ()
    """Our settings, as `group.key` or `group.key=value`; with `.*` at the end, what is below their key goes below ours.
    Empty: there is none."""
    note: str = ""
    """In what it differs, or what to do instead where there is none."""
    values: Mapping[str, Entry] = field(default_factory=dict)
    """Their value, as YAML writes it → what that value is here, where it is another answer than the key's."""


Table = Mapping[str, Entry]
"""Their key → what it is here. A key that ends in `.*` stands for all keys below it that have no entry of their own.
docs/configuration.md names the first key that leads to a setting and has no note."""


def to(*here: str, note: str = "", values: Mapping[str, Entry] | None = None) -> Entry:
    """It is one or several of our settings."""
    return Entry(here, note, values or {})


def none(note: str, values: Mapping[str, Entry] | None = None) -> Entry:
    """There is no setting for it; `note` says what to do instead."""
    return Entry((), note, values or {})


def several(entry: Entry, theirs: str, before: str = "") -> dict[str, Entry]:
    """The same entry for several keys, whose names stand in one text; `before` goes before each."""
    return {before + key: entry for key in theirs.split()}


def under(group: str, entries: Table) -> dict[str, Entry]:
    """The entries with `group.` before each key."""
    return {f"{group}.{key}": entry for key, entry in entries.items()}


ALWAYS = none("it is always so, and cannot be turned off; leave it out")
UNUSED = none("nothing here needs it; leave it out")
FROM_CONFIG = none("it is read from the model's config.json; leave it out")
NO_FSDP = none("Megatron trains every model; policy.layout cuts it over the GPUs")
NO_LORA = none("all weights are trained; leave it out")
ASYNC = to("asynchrony.mode", note="one_step is one batch ahead, full generates all the time (docs/asynchrony.md)")
STALENESS = to("asynchrony.max_staleness", note="syncs, with asynchrony.mode=full (docs/asynchrony.md)")
PARTIAL = none("asynchrony.mode=full goes on with unfinished answers after a sync; each token has its version")
EVERY_SYNC = none("engines get the weights after every step; leave it out")
RUN_DECIDES = none("the run decides it; leave it out")
PROFILED_STEPS = to("telemetry.profile.steps", note="a list of steps, each of which has a trace of all processes")
PROFILED_RANKS = to("telemetry.profile.ranks", note="a list of policy ranks")
NO_PROFILER = none("telemetry.profile has no such choice: it records steps for Perfetto (docs/report.md); leave it out")
PROFILER: Table = {"enable": PROFILED_STEPS, "ranks": PROFILED_RANKS, "*": NO_PROFILER}
"""Below the group of a profiler's settings."""
NO_MEMORY_HISTORY = none("memory/* in metrics.jsonl has the most of every phase (docs/metrics.md); leave it out")
NO_REWARD_MODEL = none("an environment gives the reward, which may ask a service (docs/own-environment.md)")
NO_MULTIMODAL = none("models and prompts are text alone")
NO_DISTILLATION = none("there is no teacher; leave it out")
NO_MTP = none("multi-token prediction is neither trained nor used for decoding")
ROLLOUT_REPLAY = to(
    "policy.moe.replay", values={"true": to("policy.moe.replay=rollout"), "false": to("policy.moe.replay=off")}
)
RECOMPUTED = to(
    "policy.recompute",
    note="none, selective, moe or full (docs/speed.md); none unless given",
    values={"true": to("policy.recompute=full"), "false": to("policy.recompute=none")},
)
"""Gradient checkpointing as a switch."""
FUSED_HEAD = to("policy.head", values={"true": to("policy.head=fused"), "false": to("policy.head=chunked")})
NO_CHECKPOINT_CHOICE = none("a checkpoint holds all that a run needs, for any layout; leave it out")
REWARD = to("environment.classes", note="an environment of your own gives the reward (docs/own-environment.md)")
MICRO = to("policy.micro_tokens", note="a budget of tokens, not a number of sequences")
LAYOUT_OF_REFERENCE = "reference.layout=null takes the policy's"
OWN_LOSS = none("algorithm.loss has no such loss; it may be your own function by import path (docs/own-loss.md)")
ONE_CAP = "of the ratio of algorithm.importance_level; null is off"
CLIP_LOW = "of ppo and clip_cov; cispo has algorithm.cispo.clip_low, gspo algorithm.gspo.clip_low"
CLIP_HIGH = "of ppo and clip_cov; cispo has algorithm.cispo.clip_high, gspo algorithm.gspo.clip_high"
CLIP_BOTH = "of ppo and clip_cov; cispo has algorithm.cispo.clip_low and clip_high, gspo those of algorithm.gspo"
