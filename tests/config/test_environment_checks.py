"""Errors for impossible processes and slots of environments, each in a line with the fix."""

from __future__ import annotations

from typing import Any

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.devices import check_environment
from skyrl_mega.config.containers import environment_slots
from skyrl_mega.config.derived import on_driver_node, share_of
from skyrl_mega.config.schema import Config, EnvironmentConfig, RetrieverConfig, RolloutConfig, RunConfig
from skyrl_mega.envs.containers import pool


def refused(deterministic: bool = False, **settings: int) -> str:
    config = Config(run=RunConfig(deterministic=deterministic), environment=EnvironmentConfig(**settings))
    with pytest.raises(UserError) as caught:
        check_environment(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_each_process_needs_a_slot_and_a_thread() -> None:
    assert refused(processes=4, slots=3).startswith("environment.processes = 4: ")
    assert "environment.slots=4" in refused(processes=4, slots=3)
    assert "environment.workers=4" in refused(processes=4, workers=3)
    check_environment(Config(environment=EnvironmentConfig(processes=3, slots=3, workers=3)))


def test_waves_are_of_one_process_and_of_all_that_are_open() -> None:
    assert "run.deterministic=false" in refused(deterministic=True, processes=1)
    assert refused(deterministic=True, slots=64).startswith("environment.slots = 64: ")
    check_environment(Config(run=RunConfig(deterministic=True)))


def open_at_once(processes: int = 0, slots: int | None = None, **options: Any) -> int | None:
    return environment_slots(EnvironmentConfig(processes=processes, slots=slots, options=options))


def test_no_more_environments_are_open_than_there_are_containers() -> None:
    swe = {"session": "podman", "session_options": {"containers": 5}}
    assert open_at_once(swe=swe) == 5
    assert open_at_once(swe=swe, processes=3) == 15
    assert open_at_once(swe=swe, slots=4) == 4
    assert open_at_once(swe={"session": "podman"}) == pool.OPTIONS["containers"].default
    assert open_at_once(harness={"container": "podman", "container_options": {"containers": 3}}, swe=swe) == 3
    assert open_at_once(harness={"reward": "swe", "reward_options": swe}) == 5
    assert open_at_once(swe={"session": "local"}) is None
    assert open_at_once(swe={"session": "mine:Session"}, slots=9) == 9
    config = Config(run=RunConfig(deterministic=True), environment=EnvironmentConfig(options={"swe": swe}))
    with pytest.raises(UserError, match=r"containers at once are limited; give run.deterministic=false"):
        check_environment(config)


def test_a_container_outlives_its_trajectory() -> None:
    environment = EnvironmentConfig(options={"swe": {"session": "podman", "session_options": {"lifetime_s": 600}}})
    with pytest.raises(UserError, match=r"swe.session_options.lifetime_s = 600: .* is 600; give 2400"):
        check_environment(Config(environment=environment, rollout=RolloutConfig(trajectory_timeout_s=600)))
    check_environment(Config(environment=environment, rollout=RolloutConfig(trajectory_timeout_s=599)))


@pytest.mark.parametrize(("total", "among"), [(64, 2), (64, 3), (7, 4), (2, 5)])
def test_shares_add_up_and_none_is_empty(total: int, among: int) -> None:
    shares = [share_of(total, among, place) for place in range(among)]
    assert sum(shares) == max(total, among) and min(shares) >= 1 and max(shares) - min(shares) <= 1


def test_a_service_on_loopback_keeps_them_beside_the_driver() -> None:
    def beside(**retriever: str) -> bool:
        return on_driver_node(EnvironmentConfig(retriever=RetrieverConfig(**retriever)))

    assert beside(index="folder") and beside(index="folder", url="http://127.0.0.1:8000")
    assert beside(url="http://localhost:8000/retrieve")
    assert not beside() and not beside(url="http://10.0.0.7:8000") and not beside(index="x", url="http://search:80")
