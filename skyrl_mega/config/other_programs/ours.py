"""Settings that no other program of the tables has, and the check that each of ours has a name there or stands here."""

from __future__ import annotations

from collections.abc import Iterable

from skyrl_mega.config.other_programs.lookup import names

ALONE = {
    "run.restarts", "run.patience", "run.patience_groups", "health",
    "cluster.gpu_memory_gib", "cluster.gpu_reserve_gib", "cluster.host_memory_gib", "cluster.topology", "cluster.rates",
    "cluster.numa_nodes", "cluster.preflight", "cluster.preflight_timeout_s",
    "model.build", "policy.optimizer.warmup_from_zero", "policy.threads",
    "reference.layout.first_stage_layers", "reference.layout.last_stage_layers",
    "critic.layout.first_stage_layers", "critic.layout.last_stage_layers",
    "critic.optimizer.warmup_from_zero", "critic.optimizer.eps",
    "rollout.kv_cache_gib", "rollout.env_timeout_s", "rollout.trajectory_timeout_s", "rollout.threads",
    "algorithm.gspo", "algorithm.gmpo", "algorithm.dro", "algorithm.kl.mean", "algorithm.loss_mean_samples",
    "algorithm.sequence_unit",
    "weights.wire", "weights.timeout_s",
    "data.folder", "data.prepare",
    "environment.retriever.index", "environment.retriever.build", "environment.retriever.serve",
    "environment.retriever.passage_chars", "environment.retriever.token_variable",
    "environment.slots", "environment.retries", "environment.max_failed",
    "warmup", "telemetry.trajectory_columns", "telemetry.timeline",
}  # fmt: skip
"""Settings, or groups of them, without a name in SkyRL, verl, slime and TRL."""


def unnamed(settings: Iterable[str], alone: Iterable[str] = frozenset(ALONE)) -> list[str]:
    """The settings that have no name in another program and are not among those of ours alone."""
    alone = set(alone)
    return [setting for setting in settings if not alone.intersection(_above(setting)) and not names(setting)]


def wrongly_alone(settings: Iterable[str], alone: Iterable[str] = frozenset(ALONE)) -> list[str]:
    """Those of `alone` that are no setting or group, or are a setting that has a name in another program."""
    settings = list(settings)
    groups = {above for setting in settings for above in _above(setting)}
    return [each for each in alone if each not in groups or (each in settings and names(each))]


def _above(setting: str) -> list[str]:
    """a.b.c → a.b.c, a.b, a."""
    parts = setting.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
