"""Runs whose environments all fail end; a single working environment keeps a run going."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.schema import Config
from skyrl_mega.data.order import PromptStream
from skyrl_mega.envs.prompt import Prompt
from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.evaluation import Evaluator
from skyrl_mega.trainer.health.failures import failures_event, refuse_broken
from skyrl_mega.trainer.rollout_source import RolloutSource
from skyrl_mega.trainer.run import Step, rollout_metrics
from skyrl_mega.trajectories.trajectory import Group, Status, Trajectory


def ended(status: Status) -> Trajectory:
    error = {"error": "MyEnv.step raised NameError(\"name 're' is not defined\")"} if status.failed else {}
    arrays = array("i"), array("b"), array("f")
    return Trajectory(Prompt(0, [], "mine", {}), 0, *arrays, 0, 0.0, status, 1, metadata=error)


def test_all_failed_is_one_line_with_the_first_cause() -> None:
    with pytest.raises(
        UserError, match=r"environment mine: all 2 .*name 're' is not defined.*environment\.classes\.mine"
    ):
        refuse_broken([ended(Status.ERROR_ENV), ended(Status.ERROR_ENV_TIMEOUT)])


def test_one_that_works_is_enough() -> None:
    refuse_broken([ended(Status.ERROR_ENV), ended(Status.TRUNCATED_TURNS)])
    refuse_broken([])


def test_failures_of_a_step_are_recorded_by_kind() -> None:
    def failed(text: str, status: Status = Status.ERROR_ENV) -> Trajectory:
        return replace(ended(status), metadata={"error": text, "at": "m.py, line 9"})

    errors = [f"raised {KeyError(text)!r}" for text in ("0", "it's", 'it\'s "quoted"')]
    trajectories = [*map(failed, errors), ended(Status.COMPLETED)]
    trajectories.append(failed("took longer than 14.5 s", Status.ERROR_ENV_TIMEOUT))
    event = failures_event(7, trajectories)
    assert event is not None and (event.kind, event.facts["step"], event.facts["of"]) == ("failures", 7, 5)
    assert [(k["status"], k["count"], k["error"], k["example"]) for k in event.facts["kinds"]] == [
        ("error_env", 3, "raised KeyError(…)", "raised KeyError('0') (at m.py, line 9)"),
        ("error_env_timeout", 1, "took longer than … s", "took longer than 14.5 s (at m.py, line 9)"),
    ]
    assert failures_event(7, [ended(Status.COMPLETED)]) is None


class Plays:
    """A generator with a status for each round; counts the rounds."""

    def __init__(self, *rounds: Status) -> None:
        self.rounds, self.played = rounds, 0

    def generate(self, prompts: list[Prompt], samples: int, **_: object) -> list[Group]:
        status = self.rounds[min(self.played, len(self.rounds) - 1)]
        self.played += 1
        return [Group(prompt, [ended(status) for _ in range(samples)]) for prompt in prompts]


@pytest.mark.parametrize(
    ("rounds", "played"),
    [
        ((Status.ERROR_ENV,), 1),  # no environment works: further rounds are pointless
        ((Status.ERROR_ENV_TIMEOUT,), 1),
        ((Status.COMPLETED, Status.ERROR_ENV), 4),  # the environment works: another round may succeed
        ((Status.COMPLETED,), 4),
    ],
)
def test_dynamic_sampling_draws_no_more_where_every_environment_fails(rounds: tuple[Status, ...], played: int) -> None:
    config = Config()
    config.data.prompts_per_step, config.data.samples_per_prompt = 2, 2
    config.algorithm.dynamic_sampling.enabled, config.algorithm.dynamic_sampling.max_rounds = True, 4
    generator: Any = Plays(*rounds)
    prompts = [Prompt(i, [], "mine", {}) for i in range(8)]
    step = Step(1, Console())
    assert RolloutSource(config, prompts, PromptStream(8, batch=2), generator).next_groups(step) == []
    assert generator.played == played == step.metrics["rollout/rounds"]
    if played == 1:
        with pytest.raises(UserError, match="all 4 trajectories failed"):
            refuse_broken(step.trajectories)


def test_a_failed_environment_gives_a_group_no_signal() -> None:
    """Draws again a group whose judged samples all earn the same: failed samples give no signal."""
    config = Config()
    config.data.prompts_per_step, config.data.samples_per_prompt = 2, 3
    config.algorithm.dynamic_sampling.enabled, config.algorithm.dynamic_sampling.max_rounds = True, 1

    class Solves:
        def generate(self, prompts: list[Prompt], samples: int, **_: object) -> list[Group]:
            groups = [Group(p, [ended(Status.COMPLETED) for _ in range(samples)]) for p in prompts]
            for group in groups:
                for t in group.trajectories:
                    t.reward = 1.0
                group.trajectories[0] = ended(Status.ERROR_ENV_TIMEOUT)
            groups[1].trajectories[1].reward = 0.5
            return groups

    prompts, generator, step = [Prompt(i, [], "mine", {}) for i in range(2)], Solves(), Step(1, Console())
    source = RolloutSource(config, prompts, PromptStream(2, batch=2, shuffle=False), generator)  # type: ignore[arg-type]
    assert [group.prompt.uid for group in source.next_groups(step)] == [1]
    assert step.metrics["rollout/groups_left_out"] == 1


def test_rewards_are_those_of_environments_that_did_not_fail() -> None:
    solved, wrong, failed = ended(Status.COMPLETED), ended(Status.COMPLETED), ended(Status.ERROR_ENV)
    solved.reward = 1.0
    metrics = rollout_metrics([solved, wrong, failed, failed])
    assert (metrics["reward/mean"], metrics["reward/std"]) == (0.5, 0.5)
    assert metrics["rollout/failed_fraction"] == 0.5
    assert "reward/mean" not in rollout_metrics([failed])


def test_an_evaluation_says_where_a_set_has_no_figures() -> None:
    def of(source: str) -> Prompt:
        return Prompt(len(source), [], "mine", {"data_source": source})

    class Sets(Plays):
        def generate(self, prompts: list[Prompt], samples: int, **_: object) -> list[Group]:
            groups = [super(Sets, self).generate([prompt], samples)[0] for prompt in prompts]
            for group in groups:
                for t in group.trajectories:
                    t.prompt = group.prompt
            return groups

    lines: list[str] = []
    generator: Any = Sets(Status.COMPLETED, Status.ERROR_ENV)
    progress: Any = None
    scores = Evaluator(Config(), [of("a"), of("hard")], generator, lines.append).evaluate(3, progress)
    assert scores["eval/a/mean"] == 0.0 and scores["eval/hard/failed"] == 1.0 and "eval/hard/mean" not in scores
    assert lines[1:] == ["evaluation after step 3: all samples of hard failed; there is no mean over all sets"]
    lines.clear()
    generator = Sets(Status.COMPLETED)
    assert Evaluator(Config(), [of("a"), of("hard")], generator, lines.append).evaluate(3, progress) and not lines


def test_a_share_that_may_fail_ends_the_run_when_it_is_passed() -> None:
    """Ends a run above `environment.max_failed`; the error names the failed environments, their counts and the most
    frequent cause."""
    failed = [ended(Status.ERROR_ENV_TIMEOUT), *(ended(Status.ERROR_INFRASTRUCTURE) for _ in range(2))]
    failed[0].metadata["error"] = "took too long"
    failed[2].prompt = Prompt(0, [], "other", {})
    step = [*failed, *(ended(Status.COMPLETED) for _ in range(5))]
    refuse_broken(step, 3 / 8)
    refuse_broken([], 0.0)
    refuse_broken(step[3:], 0.0)
    match = r"environment\.max_failed = 0\.25: 3 of 8 .*\(mine 2, other 1\).* 2 times: .*name 're' is not defined"
    with pytest.raises(UserError, match=match):
        refuse_broken(step, 0.25)


def test_a_step_is_not_trained_on_where_most_have_failed_though_no_setting_says_so() -> None:
    """Refuses 2 working trajectories of 256 with default settings; earlier such a step was trained on."""
    most = Config().environment.max_failed
    refuse_broken([ended(Status.ERROR_ENV), ended(Status.COMPLETED)], most)
    with pytest.raises(UserError, match=r"environment\.max_failed = 0\.5: 254 of 256 .* 254 times"):
        refuse_broken([ended(Status.ERROR_ENV)] * 254 + [ended(Status.COMPLETED)] * 2, most)


def test_waiting_for_a_slot_and_playing_again_are_measured() -> None:
    first, second = ended(Status.COMPLETED), ended(Status.COMPLETED)
    assert "environment/slot_wait_s" not in rollout_metrics([first, second])
    first.seconds["slot"], second.seconds["slot"], second.retries = 1.0, 3.0, 2
    metrics = rollout_metrics([first, second])
    assert (metrics["environment/slot_wait_s"], metrics["rollout/played_again"]) == (2.0, 2.0)
