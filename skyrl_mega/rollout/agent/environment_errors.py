"""Rewards and faults of an environment, applied to a trajectory."""

from __future__ import annotations

from skyrl_mega.envs.validate import StepOutput
from skyrl_mega.trajectories.trajectory import Kind, Status, Step, Trajectory


class EnvironmentFault(Exception):
    """An environment raised an exception, exceeded the time limit or broke the contract. Only the trajectory of this
    environment ends."""

    def __init__(self, status: Status, text: str, at: str | None = None) -> None:
        self.status, self.at = status, at
        super().__init__(text)


def add_reward(t: Trajectory, step: Step, answer: StepOutput) -> None:
    """Adds the environment's reward for the policy's answer in a step."""
    step.reward = (step.reward or 0.0) + answer.reward
    t.reward += answer.reward
    for name, value in answer.rewards.items():
        t.rewards[name] = t.rewards.get(name, 0.0) + value


def last_response(t: Trajectory) -> Step | None:
    """Returns the latest step in which the policy produced tokens, or None."""
    return next((step for step in reversed(t.steps) if step.kind is Kind.RESPONSE and step.end > step.start), None)


def fail(t: Trajectory, fault: EnvironmentFault) -> None:
    """Ends a trajectory with zero reward and stores the error in the metadata."""
    t.status, t.reward, t.rewards, t.metadata = fault.status, 0.0, {}, {"error": str(fault)}
    if fault.at:
        t.metadata["at"] = fault.at
