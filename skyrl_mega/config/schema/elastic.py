"""Settings of engines that join and leave a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from skyrl_mega.config.schema.fields import Refusals, at_least, between

LARGEST = 1024
"""Largest number of joined engines."""
RESOURCE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""Allowed names of Ray resources."""
TAKEN = ("CPU", "GPU", "memory", "object_store_memory")
"""Ray resources of every node."""


@dataclass
class ElasticConfig:
    """Engines that join and leave the run while it trains (docs/elastic.md)."""

    most: int = between(0, LARGEST, 0)
    """Largest number of joined engines at once, in addition to `rollout.engines`; 0 accepts none. Engines join by
    `python -m skyrl_mega.engines add`, and from nodes with `resource`."""
    resource: Optional[str] = None
    """Ray resource of nodes with engines for the run. Each unit of a node, such as `ray start --resources
    '{"rollout": 2}'`, starts an engine there once the node has joined the cluster; an engine leaves with its node.
    null: engines join only by the command."""
    autoscale: bool = False
    """Asks Ray's autoscaler for nodes with `most` units of `resource`, until the end of the run."""
    grace_s: float = at_least(0, 120.0)
    """Seconds for the requests of a leaving engine to finish; unfinished requests then move to other engines."""

    def refusals(self) -> Refusals:
        """Yields refusals of a resource without engines that may join, of an unusable name, and of an autoscaler
        without a resource."""
        if self.resource is not None:
            if not RESOURCE.fullmatch(self.resource) or self.resource in TAKEN:
                yield (
                    "rollout.elastic.resource",
                    "allowed is a name of letters, digits, ., - and _, other than Ray's own CPU, GPU and memory; give "
                    "rollout",
                )
            if not self.most:
                yield "rollout.elastic.resource", "no engine may join", "give rollout.elastic.most as well"
        elif self.autoscale:
            yield "rollout.elastic.autoscale", "needs rollout.elastic.resource, the resource to ask for"
