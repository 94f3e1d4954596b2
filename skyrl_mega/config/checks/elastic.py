"""Rules of engines that join and leave a run."""

from __future__ import annotations

from skyrl_mega.config.refusals import raising
from skyrl_mega.config.residency import ENGINE, kept
from skyrl_mega.config.schema import Config
from skyrl_mega.config.schema.fields import Refusals


@raising
def check_elastic(c: Config) -> Refusals:
    """Raises a UserError for engines that may join a run with colocated, sleeping or repeatable engines, and for
    settings refused by `ElasticConfig.refusals`."""
    yield from c.rollout.elastic.refusals()
    if not c.rollout.elastic.most:
        return
    key, fix = "rollout.elastic.most", "give 0"
    if c.cluster.shared:
        yield key, "colocated engines (cluster.shared) cannot join or leave", f"{fix}, or cluster.shared=false"
    elif not kept(c.residency.keep).issuperset(ENGINE):
        yield key, "engines with parts that sleep (residency.keep) cannot join", f"{fix}, or residency.keep=null"
    if c.run.deterministic:
        yield (
            key,
            "the clock decides when an engine joins, so no run repeats another",
            f"{fix}, or run.deterministic=false",
        )
