"""Groups generated ahead or in flight when an asynchronous run ends and is resumed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.engines.base import Request
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.rollout import journal
from skyrl_mega.rollout.routing.router import Router
from skyrl_mega.rollout.service import Done, Ticket
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer import asynchronous
from skyrl_mega.trainer.asynchronous import Asynchronous
from skyrl_mega.trainer.step import Step
from skyrl_mega.trajectories.trajectory import Group, Status
from tests.support.rollouts_ahead import PROMPTS, live, names, smaller
from tests.support.virtual_rollouts import Player


@pytest.mark.parametrize(
    ("versions", "taken"), [([1, 1, 1, 1, 0, 0, 0, 0], [4, 5, 6, 7]), ([1, 1, 1, 0, 0, 1, 0, 1], [0, 3, 4, 6])]
)
def test_a_step_takes_the_oldest_groups(versions: list[int], taken: list[int]) -> None:
    """Chooses among groups of two versions: a resumed run generates groups with low numbers again under new weights.
    Groups of version 0 would be too old for the next step; a step orders its groups by number."""
    config = Config()
    config.asynchrony.max_staleness, config.data.prompts_per_step = 1, 4
    service: Any = SimpleNamespace(under_way={}, submit=lambda tickets, prompts: None)
    stream = PromptStream(1, batch=1)
    stream.take(1)
    rollouts = Asynchronous(config, [], stream, service, look=lambda: None, refill=lambda: None)
    rollouts.versions.recent = [0, 1]
    for number in reversed(range(8)):
        group = Group(Prompt(number, [], "mine", {}), [])
        rollouts.done[number] = Done(Ticket(number, number, versions[number], ()), group)
    chosen = rollouts._choose()
    assert chosen is not None and [one.ticket.number for one in chosen] == taken
    assert sorted(rollouts.done) == [number for number in range(8) if number not in taken]


def fresher(config: Config) -> None:
    config.asynchrony.max_staleness = 0


def one_step(config: Config) -> None:
    config.asynchrony.mode = "one_step"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (smaller, "data.prompts_per_step"),
        (fresher, "asynchrony.max_staleness"),
        (one_step, "asynchrony.mode"),
    ],
)
def test_other_settings_draw_the_prompts_again(
    tmp_path: Path, change: Any, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resumes with fewer prompts per step or less staleness; keeping the saved groups would make the run wait for a
    free place forever."""
    rollouts, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        step = Step(1, Console())
        groups = rollouts.next_groups(step)
        learned = {group.prompt.uid for group in groups}
        rollouts.save(tmp_path, 1)
        before = names([*groups, *(one.group for one in rollouts.done.values())])
    again, loop, stream = live(tmp_path, change)
    prefix = "discarded 4 groups generated ahead or unfinished; their prompts are sampled again first; "
    assert capsys.readouterr().out.splitlines()[-1] == f"{prefix}settings unlike the checkpoint's: {key}"
    with loop:
        assert stream.remaining == PROMPTS - len(learned)
        groups = again.next_groups(Step(2, Console()))
        uids = {group.prompt.uid for group in groups}
        assert uids and not uids & learned
        assert before and not before & names(groups), "each has a random stream of its own"


def test_a_step_without_a_signal_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives up after drawing `max_rounds` times the groups of a step, long before the data is used up."""

    def sampled(config: Config) -> None:
        config.algorithm.dynamic_sampling.enabled, config.algorithm.dynamic_sampling.max_rounds = True, 2

    monkeypatch.setattr(asynchronous, "with_signal", lambda groups, algorithm: [])
    rollouts, loop, stream = live(tmp_path, sampled, prompts=400)
    with loop:
        step = Step(1, Console())
        assert rollouts.next_groups(step) == []
        assert 8 <= step.metrics["rollout/groups_left_out"] <= 16 and stream.remaining >= 384
        assert step.metrics["rollout/rounds"] == 2 and step.metrics["rollout/groups_missing"] == 4


def test_what_was_played_of_groups_under_way_is_not_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resumes groups in flight: finished samples keep their tokens, other samples their finished turns, and groups
    their age."""
    first, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        first.next_groups(Step(1, Console()))
        first.synced(1)
        first.save(tmp_path, 1)
        under_way = first.service.so_far()
    before = {t.metadata["name"]: t.tokens.tolist() for ticket in under_way for t in ticket.played.values()}
    written = {one.request: one for turns in journal.read_all(tmp_path).values() for one in turns}
    versions_by_request = {request: [v for v, _ in one.completion.versions] for request, one in written.items()}
    assert before and versions_by_request and any(ticket.left for ticket in under_way)
    asked: list[str] = []
    answer = Router._answer

    async def told(self: Router, request: Request) -> Any:
        asked.append(request.id)
        return await answer(self, request)

    monkeypatch.setattr(Router, "_answer", told)
    capsys.readouterr()
    again, loop, _ = live(tmp_path, lambda config: None)
    done, begun = len(again.done), len(again.interrupted)
    assert capsys.readouterr().out.strip() == (
        f"restored {done} group{'s' * (done != 1)} generated ahead, and {begun} unfinished ones "
        f"({len(before)} finished trajectories, "
        f"{len(versions_by_request)} recorded turns)"
    )
    with loop:
        known = {ticket.number: ticket.version for ticket in again.interrupted if ticket.played or ticket.recorded}
        assert known.items() <= {ticket.number: ticket.version for ticket in under_way}.items() and len(known) > 1
        again._request()
        assert known == {n: t.version for n, t in again.service.under_way.items() if n in known}, "as old as they were"
        drawn = [t for step in (2, 3) for group in again.next_groups(Step(step, Console())) for t in group.trajectories]
    assert not versions_by_request.keys() & set(asked) and not before.keys() & {
        name.rpartition("/")[0] for name in asked
    }
    by_name = {t.metadata["name"]: t for t in drawn}
    assert {name: by_name[name].tokens.tolist() for name in before if name in by_name} == before
    for name in {request.rpartition("/")[0] for request in versions_by_request} & by_name.keys():
        versions = [v for request, of in versions_by_request.items() if request.rpartition("/")[0] == name for v in of]
        assert [version for version, _ in by_name[name].versions][: len(versions)] == versions


def test_all_groups_that_were_under_way_are_asked_for_however_few_steps_are_left(tmp_path: Path) -> None:
    """Requests saved groups even beyond the steps left: they are older than finished groups, and a step takes the
    oldest."""

    def fewer(config: Config) -> None:
        config.run.steps = 1

    first, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        first.next_groups(Step(1, Console()))
        first.save(tmp_path, 1)
        numbers = {*first.service.under_way}
    again, loop, _ = live(tmp_path, fewer)
    with loop:
        again._request()
        assert numbers and numbers <= again.service.under_way.keys()


def test_what_a_service_under_an_environment_has_ended_is_played_again(tmp_path: Path) -> None:
    first, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        first.next_groups(Step(1, Console()))
        (ticket, sample), *_ = [(t, s) for t in first.service.so_far() for s in t.played]
        first.service._played[ticket.number][sample].status = Status.ERROR_INFRASTRUCTURE
        (now,) = [t for t in first.service.so_far() if t.number == ticket.number]
        assert sample in now.left and sample not in ticket.left


def test_a_checkpoint_of_another_form_has_its_prompts_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        learned = {group.prompt.uid for group in rollouts.next_groups(Step(1, Console()))}
        with pytest.MonkeyPatch.context() as older:
            older.setattr(asynchronous.saved_rollouts, "FORMAT", 1)
            rollouts.save(tmp_path, 1)
    again, loop, stream = live(tmp_path, lambda config: None)
    with loop:
        assert again.interrupted == [] and again.done == {} and stream.remaining == PROMPTS - len(learned)
    assert capsys.readouterr().out.strip().endswith("; another version of the program saved them")


def test_other_prompts_in_the_place_of_those_that_were_played_are_drawn(tmp_path: Path) -> None:
    """Draws again if the prompts were replaced: otherwise a group's samples would answer two questions."""
    rollouts, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        learned = {group.prompt.uid for group in rollouts.next_groups(Step(1, Console()))}
        rollouts.save(tmp_path, 1)
    for question, groups in (("hello", 0), (None, None)):
        again, loop, stream = live(tmp_path, lambda config: None)
        with loop:
            again.interrupted, again.done = [], {}
            if question is not None:
                for prompt in again.prompts:
                    prompt.messages.append({"role": "user", "content": question})
            again.restore(tmp_path)
            kept = len(again.interrupted) + len(again.done)
            assert kept == groups if groups is not None else kept > 0
            assert groups is None or stream.remaining == PROMPTS - len(learned)


def test_an_environment_that_opens_slowly_holds_up_its_own_group_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = Player.open

    async def opens(self: Player, prompt: Prompt) -> None:
        if prompt.uid == 0:
            await asyncio.sleep(10_000)
        await at_once(self, prompt)

    monkeypatch.setattr(Player, "open", opens)
    rollouts, loop, _ = live(tmp_path, lambda config: None)
    with loop:
        groups = rollouts.next_groups(Step(1, Console()))
        assert loop.now < 1000 and len(groups) == 4 and 0 not in {group.prompt.uid for group in groups}


def test_groups_without_a_signal_are_in_a_checkpoint_until_a_step_has_told_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampled(config: Config) -> None:
        config.algorithm.dynamic_sampling.enabled = True

    monkeypatch.setattr(asynchronous, "with_signal", lambda groups, _: [g for g in groups if g.prompt.uid % 2])
    rollouts, loop, _ = live(tmp_path, sampled)
    with loop:
        step = Step(1, Console())
        rollouts.next_groups(step)
        reported = {t.prompt.uid for t in step.trajectories}
        rollouts.synced(1)
        while not rollouts.left_out:  # groups of the next step
            rollouts.collect(1.0)
        rollouts.save(tmp_path, 1)
        left_out = {one.group.prompt.uid for one in rollouts.left_out}
    again, loop, _ = live(tmp_path, sampled)
    with loop:
        step = Step(2, Console())
        again.next_groups(step)
        reported_later = {t.prompt.uid for t in step.trajectories}
        assert left_out and left_out <= reported_later and not reported_later & reported
        assert step.metrics["rollout/groups_left_out"] >= len(left_out)


def test_groups_that_failed_are_played_again_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plays failed groups again after a resume; otherwise a run that ended for failures would end again for the same
    failures."""

    def sampled(config: Config) -> None:
        config.algorithm.dynamic_sampling.enabled = True

    monkeypatch.setattr(asynchronous, "with_signal", lambda groups, _: [g for g in groups if g.prompt.uid % 2])
    rollouts, loop, _ = live(tmp_path, sampled)
    with loop:
        rollouts.next_groups(Step(1, Console()))
        rollouts.synced(1)
        while not rollouts.left_out:
            rollouts.collect(1.0)
        broken = rollouts.left_out[0]
        broken.group.trajectories[0].status = Status.ERROR_ENV
        rollouts.save(tmp_path, 1)
    again, loop, _ = live(tmp_path, sampled)
    number = broken.ticket.number
    assert number in {ticket.number for ticket in again.interrupted}
    assert number not in {one.ticket.number for one in again.left_out}
    with loop:
        again.next_groups(Step(2, Console()))
        assert number not in {ticket.number for ticket in again.interrupted}, "it was asked for"
