"""A trajectory of an agent: the agent asks the policy through an endpoint, in its own order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from skyrl_mega.envs import validate
from skyrl_mega.envs.agent import AgentStopped
from skyrl_mega.rollout.agent import edits
from skyrl_mega.rollout.agent.environment import EnvironmentFault
from skyrl_mega.rollout.agent.limits import TrajectoryLimits
from skyrl_mega.rollout.agent.opened import Opened
from skyrl_mega.rollout.endpoint import to_trajectory
from skyrl_mega.rollout.endpoint.session import AgentSession
from skyrl_mega.trajectories.trajectory import Status

DROPPED = ("after_stop", "client_gone", "after_end", "out_of_time")
"""Reasons of `AgentSession.dropped`."""
Answer = TypeVar("Answer")


async def run_agent(
    opened: Opened, session: AgentSession, limits: TrajectoryLimits, reward_weights: Mapping[str, float]
) -> None:
    """Runs the agent of an opened trajectory to its end, and fills the trajectory with the session's conversations, the
    reward, the status and the metadata. Tokens, rewards and status of a failed agent are set as for any environment.

    Args:
        opened: The trajectory, with messages but without tokens.
        session: Answers the agent's requests.
        limits: Limits of the trajectory.
        reward_weights: `algorithm.reward_weights`.

    Raises:
        Exception: A fault of the run rather than of the agent (`AgentSession.failed`), such as a missing engine.
    """
    t, first = opened.trajectory, opened.trajectory.steps[0]
    env_s, step_s = t.seconds["env"], first.env_s
    answer, fault = None, None
    try:
        try:
            answer = await _until_failed(_run(opened, session, limits, reward_weights), session.failed)
        except EnvironmentFault as error:
            fault = error
        await session.finish()
    except BaseException:
        session.abort()
        raise
    to_trajectory.fill(t, session.tree)
    agent_s = max(0.0, t.seconds["env"] - env_s - session.generating_s)
    t.seconds["env"], first.env_s = env_s + agent_s, step_s
    t.steps[-1].env_s += agent_s
    t.seconds["generate"] += session.generating_s
    _grade(opened, session, answer, fault)
    t.metadata["metrics"] = {**metrics(session), **_numbers(t.metadata.get("metrics"))}


async def _run(
    opened: Opened, session: AgentSession, limits: TrajectoryLimits, reward_weights: Mapping[str, float]
) -> validate.StepOutput:
    """Opens an endpoint, runs the agent, and closes the endpoint."""
    from skyrl_mega.rollout.endpoint.server import server  # an HTTP server, which other environments do without

    endpoint = replace(server().open(session, asyncio.get_running_loop()), seconds=limits.trajectory_timeout_s)
    prompt = list(opened.trajectory.messages)
    try:
        return await opened.env.run(endpoint, prompt, reward_weights, limits.trajectory_timeout_s)
    finally:
        session.end()
        server().close(endpoint)


async def _until_failed(work: Awaitable[Answer], failed: asyncio.Future[None]) -> Answer:
    """Returns the result of `work`. If `failed` comes first, cancels `work`, waits for the end and raises the exception
    of `failed`."""
    task = asyncio.ensure_future(work)
    either: set[asyncio.Future[Any]] = {task, failed}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if not task.done():
        await _cancel(task)
        failed.result()
    return task.result()


async def _cancel(task: asyncio.Future[Answer]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _grade(
    opened: Opened, session: AgentSession, answer: validate.StepOutput | None, fault: EnvironmentFault | None
) -> None:
    """Sets the trajectory's reward, metadata and status.

    An agent that stopped after a refusal by a limit of the run has no fault: it can hardly go on without its policy.
    Other exceptions may be the judge's, and are faults.
    """
    t = opened.trajectory
    if fault is None and not session.tree.exchanges and session.limit is not Status.TRUNCATED_TIME:
        why = f"got no reply: {session.refusal}" if session.refusal else "made no request"
        fault = opened.env.fault(Status.ERROR_ENV, f"the agent {why}")
    if fault is not None:
        cause = fault.__cause__
        stopped = cause if isinstance(cause, AgentStopped) else None
        edits.fail(t, fault.status, {**(stopped.metadata if stopped else {}), **fault.about})
        if stopped and session.refused_by_limit and session.limit is not None:
            t.status = session.limit if t.written or session.limit is Status.TRUNCATED_TIME else fault.status
    elif answer is not None:
        edits.add_reward(t, edits.last_response(t) or t.steps[-1], answer)
        t.metadata = answer.metadata
        t.status = session.limit or Status.COMPLETED


def metrics(session: AgentSession) -> dict[str, float]:
    """Returns the figures of a session by name: `agent_requests`; `agent_branches`, the conversations;
    `agent_dropped_tokens`, the sampled tokens that are not trained on, and `agent_dropped_<reason>` for every reason in
    `DROPPED`, 0 included; `agent_ignored_parameters`, not followed by the run; and `agent_retokenised_messages`, the
    assistant messages rendered as text."""
    return {
        "agent_requests": session.requests,
        "agent_branches": len(session.tree.conversations()),
        "agent_dropped_tokens": session.dropped.total(),
        **{f"agent_dropped_{reason}": session.dropped[reason] for reason in DROPPED},
        "agent_ignored_parameters": session.ignored,
        "agent_retokenised_messages": session.retokenised,
    }


def _numbers(given: object) -> dict[str, object]:
    """Returns the environment's own figures; {} without a mapping."""
    return {str(name): value for name, value in given.items()} if isinstance(given, Mapping) else {}
