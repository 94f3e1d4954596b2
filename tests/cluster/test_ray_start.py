"""A private Ray cluster with a late node, or without a start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray

from skyrl_mega.cluster import ray_session
from skyrl_mega.cluster.errors import ClusterError

LATE = "The current node timed out during startup.\nThis could happen because some of the raylet failed to startup"


class Starts:
    """A stand-in for `ray.init` that fails `failures` times, like Ray if its node is not up in 30 s."""

    def __init__(self, failures: int) -> None:
        self.failures, self.tries = failures, 0

    def __call__(self, *, _temp_dir: str, **_: Any) -> None:
        assert not os.path.exists(_temp_dir), "what an earlier try has left is gone"
        os.mkdir(_temp_dir)
        self.tries += 1
        if self.tries <= self.failures:
            raise Exception(LATE)


def start(folder: Path, monkeypatch: pytest.MonkeyPatch, failures: int, timeout_s: float) -> tuple[Starts, list[str]]:
    starts, messages = Starts(failures), list[str]()
    monkeypatch.setattr(ray, "init", starts)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    try:
        ray_session._start(folder, {}, actors=1, gpus=0, timeout_s=timeout_s, say=messages.append)
    except ClusterError as error:
        messages.append(f"fault: {error}")
    return starts, messages


def test_a_node_that_is_late_is_started_again_within_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session, "TRY_S", 0.0)
    starts, messages = start(tmp_path, monkeypatch, failures=2, timeout_s=600.0)
    assert starts.tries == 3 and len(messages) == 2
    starts, messages = start(tmp_path / "r", monkeypatch, failures=9, timeout_s=-1.0)
    assert starts.tries == 1
    assert messages == [
        "fault: Ray did not start on this machine within cluster.start_timeout_s = -1: The current node timed out "
        "during startup."
    ]


def test_what_fails_at_once_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, messages = start(tmp_path, monkeypatch, failures=9, timeout_s=600.0)
    assert starts.tries == 1 and messages == [
        "fault: Ray did not start on this machine: The current node timed out during startup."
    ]
