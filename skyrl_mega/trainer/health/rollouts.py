"""Watchers of the policy's texts and rewards. Each returns a finding about a step, or None."""

from __future__ import annotations

from collections import Counter
from statistics import mean, median

from skyrl_mega.batch.signal import rounded_reward
from skyrl_mega.common.terminal import printable
from skyrl_mega.envs.sandbox.budget import memory_warning
from skyrl_mega.trainer.health.failures import failures
from skyrl_mega.trainer.health.step_view import Finding, StepView, example, metric_of, quoted
from skyrl_mega.trajectories.trajectory import Status

MANY_GROUPS = 32
"""Number of groups or turns in a step large enough to rule out a coincidence."""
LONG_STEPS = 3
"""Number of consecutive steps large enough to rule out a coincidence for any number of groups."""
MIN_TRAJECTORIES = 8
"""Smallest number of trajectories for a statement about all."""
NEARLY_ALL = 0.95
TINY = 1e-6
CUT = (Status.TRUNCATED_TOKENS, Status.TRUNCATED_TIME)


def environment_fails(view: StepView) -> Finding | None:
    """Returns a finding if any trajectory's environment failed: raised, exceeded the time limit or broke the contract.
    Else None."""
    text = failures(view.trajectories)
    return Finding("environment_fails", text) if text else None


def close_fails(view: StepView) -> Finding | None:
    """Returns a finding if any environment raised in `close`: the trajectory is complete, but resources may leak. Else
    None."""
    errors = [t.metadata["close_error"] for t in view.trajectories if "close_error" in t.metadata]
    if not errors:
        return None
    return Finding(
        "close_fails", f"{len(errors)} environments could not be closed; the first: {printable(str(errors[0]))}"
    )


def truth_fails(view: StepView) -> Finding | None:
    """Returns a finding if the reference solution of a row fails (metadata `gold_error`): no answer to such a row can
    be right. Else None."""
    wrong = [t for t in view.judged if t.metadata.get("gold_error")]
    if not wrong:
        return None
    rows = len({t.prompt.uid for t in wrong})
    return Finding(
        "truth_fails",
        f"the reference solutions of {rows} of the step's rows fail when they are run, so that none of their "
        f"{len(wrong)} answers can be right; the first, row {wrong[0].prompt.uid} of data.train: "
        f"{printable(str(wrong[0].metadata['gold_error']))}",
    )


def ended_for_memory(view: StepView) -> Finding | None:
    """Returns a finding if sandboxed programs were killed because all programs together exceeded the memory limit:
    other programs may have used the memory, so the rewards say little. Else None."""
    count = view.metric("environment/ended_for_memory")
    return Finding("ended_for_memory", memory_warning(count)) if count else None


def everything_cut(view: StepView) -> Finding | None:
    """Returns a finding if at least the share `NEARLY_ALL` of the step's responses, `MIN_TRAJECTORIES` or more, were
    cut at the limit of tokens or time; else None. The finding is `stuck` if the overlong filter removes all of these,
    or nothing gives a signal."""
    cut = [t for t in view.judged if t.status in CUT]
    if len(view.judged) < MIN_TRAJECTORIES or len(cut) < NEARLY_ALL * len(view.judged):
        return None
    overlong = view.config.algorithm.overlong
    filtered = overlong.filter and all(t.status.filtered(overlong.filter_by) for t in cut)
    rollout = view.config.rollout
    why = "; algorithm.overlong.filter takes all of them out of the loss" if filtered else ""
    timed_out = sum(t.status is Status.TRUNCATED_TIME for t in cut)
    limit = (
        f"rollout.trajectory_timeout_s = {rollout.trajectory_timeout_s}"
        if timed_out > len(cut) / 2
        else (f"a limit of tokens (rollout.sampling.max_tokens = {rollout.sampling.max_tokens})")
    )
    return Finding(
        "everything_cut",
        f"{len(cut)} of {len(view.judged)} responses were cut at {limit}{why}; {example(cut[0])}",
        stuck=filtered or not view.has_signal,
        explains=(
            "nothing_parsed",
            "equal_rewards",
            "rewards_by_prompt",
            "no_advantage",
            "stop_string_never_comes",
            "more_cut",
        ),
    )


def nothing_parsed(view: StepView) -> Finding | None:
    """Returns a finding if the environment seems unable to parse any answer: all rewards are equal, and an entry of the
    metadata is None (or `invalid` is True) for all answers. Else None, also below `MIN_TRAJECTORIES` answers."""
    notes = [t.metadata for t in view.judged]
    if len(notes) < MIN_TRAJECTORIES or len({rounded_reward(t.reward) for t in view.judged}) > 1:
        return None
    keys = [key for key in notes[0] if "error" not in key and all(_is_empty(key, note) for note in notes)]
    if not keys:
        return None
    value = "null" if notes[0][keys[0]] is None else "true"
    return Finding(
        "nothing_parsed",
        f"the environment's metadata is {quoted(keys[0])}: {value} for all {len(notes)} answers: it can parse none of "
        f"them; {example(view.judged[0])}",
        stuck=not view.has_advantage,
        explains=("equal_rewards", "stop_string_never_comes"),
    )


def duplicated_samples(view: StepView) -> Finding | None:
    """Returns a finding if the samples of every prompt are identical, so that there is nothing to compare, in a step
    with many groups or in several steps in a row. None otherwise, and always if advantages do not compare the samples
    of a prompt."""
    if not view.config.algorithm.advantage_traits.compares or not _none_differ(view, "rollout/answers_differ"):
        return None
    return Finding(
        "duplicated_samples",
        f"all samples of a prompt are identical, in each of {len(view.groups)} groups (temperature "
        f"{view.config.rollout.sampling.temperature:g}, top_p {view.config.rollout.sampling.top_p:g}); "
        f"{example(view.groups[0][0])}",
        stuck=True,
        explains=("equal_rewards", "rewards_by_prompt", "nothing_left", "entropy_collapsed"),
    )


def equal_rewards(view: StepView) -> Finding | None:
    """Returns a finding if no group has unequal rewards, in a step with many groups or in several steps in a row: there
    is nothing to learn unless advantages have another source. Else None.

    The finding is named `rewards_by_prompt` if rewards differ between prompts although answers differ within a prompt,
    and `nothing_left` if all answers earn the highest reward of the run, and an earlier mean was lower.
    """
    if not _none_differ(view, "rollout/groups_differ"):
        return None
    rewards = Counter(rounded_reward(t.reward) for group in view.groups for t in group)
    if len(rewards) > 1:
        group = view.groups[0]
        return Finding(
            "rewards_by_prompt",
            f"rewards differ between prompts, but never between the answers to the same prompt, in {len(view.groups)} "
            f"groups, though the answers differ: {_advantages(view)}; {example(group[0])}",
            stuck=not view.has_advantage,
            luck=True,
        )
    [reward] = rewards
    earned = [value for row in (*view.first, *view.past) if (value := row.get("reward/mean")) is not None]
    if earned and max(earned) <= reward + TINY and min(earned) < reward - TINY:
        text = (
            f"all {rewards[reward]} answers earn {reward:g}, the highest reward of this run: nothing is left to learn"
        )
        return Finding("nothing_left", text, explains=("entropy_collapsed", "gradient_vanished"))
    distinct = len(set(view.turns))
    return Finding(
        "equal_rewards",
        f"none of {len(view.groups)} groups has rewards that differ: all {rewards[reward]} are {reward:g}, of "
        f"{distinct} different answers: {_advantages(view)}; {example(view.groups[0][0])}",
        stuck=not view.has_advantage,
        luck=True,
        explains=("gradient_vanished",),
    )


def no_advantage(view: StepView) -> Finding | None:
    """Returns a finding if rewards differ but no token has an advantage, in a step with many groups or in several steps
    in a row: baselines equal each reward, failed, or cancel. Else None."""
    steps = view.steps_in_a_row(
        lambda row: metric_of(row, "policy/advantage_fraction") == 0.0 and bool(metric_of(row, "rollout/groups_differ"))
    )
    if view.has_advantage or not steps or (steps < LONG_STEPS and view.group_count < MANY_GROUPS):
        return None
    name, traits, share = (
        view.config.algorithm.advantage,
        view.config.algorithm.advantage_traits,
        view.metric("rollout/groups_differ"),
    )
    where = f"in {share:.0%} of the groups" if traits.compares else "between answers"
    greedy, without = view.metric("reward/greedy"), view.metric("rollout/groups_without_baseline")
    why = f"; greedy answers earn {greedy:g} in the mean" if greedy is not None else ""
    why += f"; {without:.0f} prompts have no greedy answer that was judged" if without else ""
    why += "; the best answer to a prompt is never the only one" if traits.best_only else ""
    return Finding(
        "no_advantage",
        f"no token has an advantage (algorithm.advantage={name}), though rewards differ {where}{why}; "
        f"{example(view.judged[0])}",
        stuck=not traits.best_only,  # it needs no more than one right answer
        luck=True,
        explains=("gradient_vanished",),
    )


def nothing_sampled(view: StepView) -> Finding | None:
    """Returns a finding if dynamic sampling lacks at least half of the step's groups after all rounds; named
    `groups_missing` if the step has some groups, `nothing_sampled` if it has none. Else None, also without dynamic
    sampling."""
    missing, rounds = view.metric("rollout/groups_missing"), view.metric("rollout/rounds")
    wanted, most = view.config.data.prompts_per_step, view.config.algorithm.dynamic_sampling.max_rounds
    if not missing or rounds != most or missing < wanted / 2:
        return None
    sampled = len(view.trajectories) // view.config.data.samples_per_prompt
    left_out = view.metric("rollout/groups_left_out") or 0.0
    summary = f"dynamic sampling left out {left_out:.0f} of {sampled} groups, which have no signal, in {most} rounds; "
    if missing < wanted:
        return Finding("groups_missing", f"{summary}the step has {wanted - missing:.0f} of {wanted} groups")
    return Finding(
        "nothing_sampled",
        f"{summary}the step has no group and trains nothing; {example(view.trajectories[0])}",
        stuck=True,
        luck=True,
        explains=("equal_rewards",),
    )


def stop_string_never_comes(view: StepView) -> Finding | None:
    """Returns a finding if no turn contains a string of `rollout.sampling.stop`, in many turns or for several steps.
    Else None, also without such strings."""
    steps = view.steps_with_value("rollout/stop_strings", 0.0)
    if not steps or (len(view.turns) < MANY_GROUPS and steps < LONG_STEPS):
        return None
    stop = ", ".join(quoted(text) for text in view.config.rollout.sampling.stop)
    longest = max(view.turns, key=len)
    return Finding(
        "stop_string_never_comes",
        f"none of {len(view.turns)} turns has rollout.sampling.stop ({stop}) in it; e.g. {quoted(longest)}",
    )


def more_cut(view: StepView) -> Finding | None:
    """Returns a finding if at least half of the responses were truncated in each of the last two steps, and at most a
    tenth usually in the steps before; else None, also with fewer than `LONG_STEPS` steps before."""
    name = "rollout/truncated_fraction"
    now, before = view.last(name, 2), view.past[:-1]
    known = [value for row in before if (value := row.get(name)) is not None]
    if len(now) < 2 or min(now) < 0.5 or len(known) < LONG_STEPS or median(known) > 0.1:
        return None
    lengths = mean(t.response_length for t in view.trajectories) if view.trajectories else 0
    return Finding(
        "more_cut",
        f"{now[0]:.0%} of the responses are cut short, {median(known):.0%} were before; mean length {lengths:.0f}",
    )


def _advantages(view: StepView) -> str:
    """Returns a phrase about the learning signal left with equal rewards."""
    share = view.metric("policy/advantage_fraction")
    return f"the advantages of {share:.0%} of the tokens come from elsewhere" if share else "no advantage"


def _none_differ(view: StepView, share: str) -> bool:
    """Returns True if a share of groups is 0 and not by coincidence: in many groups, or for several steps."""
    steps = view.steps_with_value(share, 0.0)
    return bool(view.groups) and (steps >= LONG_STEPS or (steps > 0 and view.group_count >= MANY_GROUPS))


def _is_empty(key: str, note: dict[str, object]) -> bool:
    return key in note and (note[key] is None or (key == "invalid" and note[key] is True))


WATCHERS = (
    environment_fails,
    close_fails,
    truth_fails,
    ended_for_memory,
    everything_cut,
    duplicated_samples,
    nothing_parsed,
    nothing_sampled,
    equal_rewards,
    no_advantage,
    stop_string_never_comes,
    more_cut,
)
