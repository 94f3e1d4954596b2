"""Trajectories of one's own: generators over engines and environments (docs/generators.md)."""

from skyrl_mega.rollout.generators.base import TrajectoryGenerator
from skyrl_mega.rollout.generators.branch import Branch
from skyrl_mega.rollout.generators.group_state import GroupRequest
from skyrl_mega.rollout.generators.service import GeneratorService

__all__ = ["Branch", "GeneratorService", "GroupRequest", "TrajectoryGenerator"]
