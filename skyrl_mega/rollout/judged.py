"""What an environment's judgement makes of a trajectory."""

from __future__ import annotations

from skyrl_mega.envs.validate import StepOutput
from skyrl_mega.rollout.trajectory import Kind, Status, Step, Trajectory


class EnvironmentFault(Exception):
    """An environment raised, took too long or gave what it may not. Ends its own trajectory only."""

    def __init__(self, status: Status, text: str, at: str | None = None) -> None:
        self.status, self.at = status, at
        super().__init__(text)


def reward(t: Trajectory, step: Step, answer: StepOutput) -> None:
    """Adds what the environment gave for what the policy said in a step."""
    step.reward = (step.reward or 0.0) + answer.reward
    t.reward += answer.reward
    for name, value in answer.rewards.items():
        t.rewards[name] = t.rewards.get(name, 0.0) + value


def last_said(t: Trajectory) -> Step | None:
    """The newest step in which the policy said anything."""
    return next((step for step in reversed(t.steps) if step.kind is Kind.RESPONSE and step.end > step.start), None)


def fail(t: Trajectory, fault: EnvironmentFault) -> None:
    """It has no reward, and the reason why."""
    t.status, t.reward, t.rewards, t.metadata = fault.status, 0.0, {}, {"error": str(fault)}
    if fault.at:
        t.metadata["at"] = fault.at
