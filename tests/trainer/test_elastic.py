"""Engines that join and leave by the command and with their nodes; hostile files in the run's folder."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.cli.engines import main
from skyrl_mega.cluster.actor_process import Location
from skyrl_mega.cluster.group import NOWHERE, ActorSpec
from skyrl_mega.cluster.supervised_group import State
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import BuildConfig
from skyrl_mega.config.schema.elastic import ElasticConfig
from skyrl_mega.models.tiny import hf_config
from skyrl_mega.trainer.elastic import (
    FAILED_STARTS,
    ElasticEngines,
    ListedNode,
    ask_autoscaler,
    endpoint_spec,
    listed_nodes,
    refuse_private_cluster,
)
from skyrl_mega.trainer.engine_requests import ANSWERS, FOLDER, FORMAT, MOST_BYTES, MOST_FILES, Inbox, read_state

A, B = "a" * 56, "b" * 56
"""Ids of nodes."""


class Fleet:
    """A fleet whose engines start and leave at once."""

    def __init__(self) -> None:
        self.states, self.joined, self.left_with = [State.UP], set[int](), dict[int, float]()
        self.group = SimpleNamespace(name="engine", where=[Location("m", 1, "10.0.0.1", "own", ())])
        self.specs: list[ActorSpec] = []

    @property
    def serving(self) -> list[int]:
        return self.ranks(State.UP)

    def ranks(self, *states: State) -> list[int]:
        return [rank for rank, state in enumerate(self.states) if state in states]

    def finish_joins(self) -> None:
        """Lets all engines come up."""
        self.states = [State.UP if state is State.JOINING else state for state in self.states]

    def add(self, spec: ActorSpec) -> int:
        rank = len(self.states)
        self.states.append(State.JOINING)
        self.joined.add(rank)
        strategy: Any = spec.slot and spec.slot.strategy
        node = getattr(strategy, "node_id", "")
        self.group.where.append(Location("m", 1, f"address of {node}", node, ()) if node else NOWHERE)
        self.specs.append(spec)
        return rank

    def check_leave(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank >= len(self.states):
                raise UserError("there is no such engine", key="engine", value=rank)

    def leave(self, rank: int, cause: str, grace_s: float) -> None:
        self.states[rank], self.left_with[rank] = State.GONE, grace_s


class Case:
    """Elastic engines with a fake fleet and fake nodes."""

    def __init__(self, folder: Path, labels: Mapping[str, str] | None = None, **settings: Any) -> None:
        self.fleet, self.lines, self.nodes = Fleet(), list[str](), dict[str, ListedNode]()
        self.nodes["own"] = ListedNode("10.0.0.1", 0)
        any_fleet: Any = self.fleet
        self.folder = folder
        self.engines = ElasticEngines(
            any_fleet,
            ElasticConfig(**{"most": 3, **settings}),
            Inbox(folder, self.lines.append),
            lambda slot: ActorSpec(dict, {}, slot),
            2,
            nodes=lambda: self.nodes,
            labels=labels,
            endpoint_at=self.endpoint_at,
            say=self.lines.append,
        )
        self.look()

    def endpoint_at(self, entry: Mapping[str, str]) -> ActorSpec:
        """Accepts a server of https only."""
        if not entry["url"].startswith("https://"):
            raise UserError("allowed is https", key="url", value=entry["url"])
        return ActorSpec(list, {"spec": entry})

    def look(self) -> None:
        self.engines._look()

    def command(self, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
        """Runs the command while the driver looks once."""
        codes: list[int] = []
        line = [str(words[0]), str(self.folder), *map(str, words[1:]), "--wait", "20"]
        asking = threading.Thread(target=lambda: codes.append(main(line)))
        asking.start()
        while asking.is_alive():
            self.look()
            asking.join(0.05)
        captured = capsys.readouterr()
        return codes[0], captured.out + captured.err


def test_the_command_adds_removes_and_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path)
    code, text = case.command(capsys, "add", "--count", 2)
    assert code == 0 and text == "engine-1, engine-2 starts, and serves after the next weight sync\n"
    assert case.fleet.specs[0].slot is not None and case.fleet.specs[0].slot.options()["num_gpus"] == 2
    code, text = case.command(capsys, "add", "--count", 2)
    assert code == 2 and "2 engines have joined; allowed are 3 (rollout.elastic.most)" in text
    code, text = case.command(capsys, "add", "--node", "10.0.0.9")
    assert code == 2 and "allowed is one of 10.0.0.1" in text
    code, text = case.command(capsys, "add", "--endpoint", "http://127.0.0.1:1")
    assert code == 2 and "url = http://127.0.0.1:1: allowed is https" in text
    code, text = case.command(capsys, "add", "--kind", "sglang")
    assert code == 2 and "kind, sync and token_env belong to a server" in text
    code, text = case.command(capsys, "add", "--endpoint", "https://a", "--count", 2)
    assert code == 2 and "allowed is to add a server without count and node" in text
    code, text = case.command(capsys, "remove", 1, "--grace", 7)
    assert code == 0 and text == "engine-1 gets no more requests\n"
    assert case.fleet.left_with == {1: 7.0}
    code, text = case.command(capsys, "remove", 9)
    assert code == 2 and "there is no such engine" in text
    code, text = case.command(capsys, "remove", 2, 9)
    assert code == 2 and "there is no such engine" in text and case.fleet.left_with == {1: 7.0}, "all or none"
    case.look()
    assert main(["list", str(tmp_path)]) == 0
    out = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert out[1:] == [["0", "serving", "10.0.0.1", "start"], ["1", "gone", "joined"], ["2", "serving", "joined"]]
    assert sorted(os.listdir(tmp_path / FOLDER)) == ["state.json"], "requests are gone"


def test_the_engines_of_an_ended_run_are_not_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path)
    assert main(["list", str(tmp_path)]) == 0 and "serving" in capsys.readouterr().out
    state = tmp_path / FOLDER / "state.json"
    running = json.loads(state.read_text())
    state.write_text(json.dumps({**running, "driver": {**running["driver"], "pid": 2**22 + 1}}))  # above Linux's limit
    assert main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "the run has ended, and its engines with it\n", "it was killed"
    state.write_text(json.dumps(running))
    case.engines.close()
    assert main(["list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "the run has ended, and its engines with it\n"


def test_a_server_joins_with_its_key_and_its_way_of_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path)
    words = ["--endpoint", "https://a", "--kind", "sglang", "--sync", "directory", "--token-env", "KEY"]
    assert case.command(capsys, "add", *words)[0] == 0
    entry = {"url": "https://a", "kind": "sglang", "sync": "directory", "token_env": "KEY"}
    assert case.fleet.specs[-1].arguments == {"spec": entry}
    assert case.command(capsys, "add", "--endpoint", "https://b")[0] == 0
    assert case.fleet.specs[-1].arguments == {"spec": {"url": "https://b"}}


def test_a_server_by_the_command_is_checked_like_an_entry_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(None, ["model.path=x", "data.train=[x.parquet]", "cluster.device=cpu"])
    setup: Any = SimpleNamespace(config=config, hf=hf_config(BuildConfig()))
    url = {"url": "http://127.0.0.1:1"}
    for entry, error in (
        ({"url": "ftp://a"}, "rollout.endpoints.0.url = ftp://a"),
        ({**url, "kind": "vlm"}, "allowed is vllm, sglang"),
        ({**url, "kind": "sglang", "sync": "group"}, "kind=sglang takes weights by directory"),
        ({**url, "token_env": "NO_SUCH_KEY"}, "the environment variable has no API key"),
        ({**url, "kind": "mine.py:Server"}, "or a class that rollout.endpoints of the run names"),
    ):
        with pytest.raises(UserError) as refused:
            endpoint_spec(setup, entry)
        assert error in str(refused.value)
    monkeypatch.setenv("A_KEY", "secret")
    spec = endpoint_spec(setup, {**url, "kind": "sglang", "token_env": "A_KEY"}).arguments["spec"]
    assert (spec.kind, spec.sync, spec.address.token) == ("sglang", "directory", "secret")
    config.rollout.endpoints = [{"url": "http://b:1", "kind": "mine.py:Server"}]
    assert endpoint_spec(setup, {**url, "kind": "mine.py:Server"}).arguments["spec"].kind == "mine.py:Server"


def test_an_unexpected_error_refuses_its_own_request_only(tmp_path: Path) -> None:
    case, name = Case(tmp_path), "request-{:016x}.json".format
    good = {"format": FORMAT, "action": "add"}
    for number, more in enumerate(({"node": "10.0.0.1"}, {})):
        request = {**good, **more, "id": f"{number:016x}"}
        (tmp_path / FOLDER / name(number)).write_text(json.dumps(request))
    case.engines._node_at = lambda address: str(1 // 0)  # type: ignore[method-assign]
    case.look()
    answers = case.engines.inbox.answers
    assert [answer["ok"] for answer in answers.values()] == [False, True]
    assert "ZeroDivisionError" in answers[f"{0:016x}"]["text"] and case.fleet.states == [State.UP, State.JOINING]


def test_a_request_left_by_an_earlier_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    for number in range(MOST_FILES + 1):
        request = {"format": FORMAT, "id": f"{number:016x}", "action": "remove", "engines": [0]}
        (tmp_path / FOLDER / f"request-{number:016x}.json").write_text(json.dumps(request))
    case = Case(tmp_path)
    assert case.fleet.states == [State.UP] and os.listdir(tmp_path / FOLDER) == ["state.json"]
    answers = read_state(tmp_path)["answers"].values()
    assert len(answers) == ANSWERS and all("older than this start" in answer["text"] for answer in answers)


def test_without_an_answer_the_request_is_withdrawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path / "nothing")]) == 2
    assert "the folder does not exist" in capsys.readouterr().err
    assert main(["add", str(tmp_path)]) == 2
    assert "rollout.elastic.most above 0" in capsys.readouterr().err
    case = Case(tmp_path)
    assert main(["add", str(tmp_path), "--wait", "0.3"]) == 2
    assert "no answer within 0.3 s, so the request is withdrawn" in capsys.readouterr().err
    case.look()
    assert case.fleet.states == [State.UP]


def test_files_that_are_no_requests_stay_and_are_named_once(tmp_path: Path) -> None:
    case, inbox, name = Case(tmp_path), tmp_path / FOLDER, "request-{:016x}.json".format
    good = {"format": FORMAT, "id": f"{9:016x}", "action": "add"}
    outside = tmp_path / "outside"
    outside.write_text(json.dumps(good))
    (inbox / name(9)).symlink_to(outside)
    os.mkfifo(inbox / name(1))
    (inbox / name(2)).mkdir()
    (inbox / name(3)).write_text("{" * (MOST_BYTES + 1))
    (inbox / name(4)).write_text(json.dumps({**good, "id": f"{4:016x}", "shell": "rm"}))
    (inbox / name(5)).write_text(json.dumps({**good, "id": f"{5:016x}", "count": 10**9}))
    (inbox / name(6)).write_text(json.dumps({**good, "id": f"{6:016x}", "node": "\x1b[2J"}))
    (inbox / name(7)).write_text(json.dumps({**good, "id": f"{8:016x}"}))
    (inbox / name(10)).write_text(json.dumps({**good, "id": f"{10:016x}", "engines": {"a": 1}}))
    (inbox / name(11)).write_text(json.dumps({**good, "id": f"{11:016x}", "engines": 3}))
    (inbox / "request-.json").write_text("x")
    before = sorted(os.listdir(inbox))
    for _ in range(3):
        case.look()
    assert sorted(os.listdir(inbox)) == before and case.fleet.states == [State.UP]
    assert len(case.lines) == 10 and all("is no request for engines, and stays" in line for line in case.lines)
    (inbox / name(12)).write_text(json.dumps({**good, "id": f"{12:016x}"}))
    case.look()
    assert case.fleet.states == [State.UP, State.JOINING] and not (inbox / name(12)).exists()


def test_engines_come_and_go_with_their_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path, resource="spot")
    case.nodes[A] = ListedNode("10.0.0.2", 2)
    case.look()
    case.look()
    slots = [spec.slot.options() for spec in case.fleet.specs if spec.slot]
    assert [slot["resources"] for slot in slots] == [{"spot": 1.0}] * 2
    assert all(slot["scheduling_strategy"].node_id == A and not slot["scheduling_strategy"].soft for slot in slots)
    case.nodes[B] = ListedNode("10.0.0.3", 2)
    case.look()
    assert len(case.fleet.specs) == 3, "at most rollout.elastic.most"
    del case.nodes[A]
    case.look()
    assert case.fleet.left_with == {1: 0.0, 2: 0.0}, "at once, with the node"
    case.look()
    assert case.fleet.ranks(State.UP, State.JOINING) == [0, 3, 4]
    assert case.command(capsys, "remove", 4)[0] == 0
    for _ in range(3):
        case.look()
    assert len(case.fleet.specs) == 4, "a removed engine is not replaced"


def test_engines_join_on_nodes_of_their_pool_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {"pool": "engines"}
    case = Case(tmp_path, labels, resource="spot")
    listed = [
        {"NodeID": name, "NodeManagerAddress": address, "Alive": True, "Resources": {"spot": 1.0}, "Labels": own}
        for name, address, own in ((A, "10.0.0.2", {**labels, "x": "y"}), (B, "10.0.0.3", {"pool": "policy"}))
    ]
    monkeypatch.setattr("ray.nodes", lambda: listed)
    case.nodes |= listed_nodes("spot", labels)
    case.nodes["own"] = ListedNode("10.0.0.1", 0, allowed=False)
    case.look()
    case.look()
    (joined,) = case.fleet.specs
    assert joined.slot and joined.slot.strategy.node_id == A
    lines = [line for line in case.lines if "no engine starts on" in line]
    assert lines == ["no engine starts on 10.0.0.3: it is no node with the label pool=engines of cluster.pools.engines"]
    code, text = case.command(capsys, "add", "--node", "10.0.0.3")
    assert code == 2 and "no such node with the label pool=engines of cluster.pools.engines" in text
    assert "allowed is one of 10.0.0.2" in text
    assert case.command(capsys, "add")[0] == 0
    assert case.fleet.specs[-1].slot and case.fleet.specs[-1].slot.options()["label_selector"] == labels
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", lambda **request: asked.append(request))
    ask_autoscaler("spot", 2, 4, labels)
    assert asked == [{"bundles": [{"spot": 1.0, "GPU": 4}] * 2, "bundle_label_selectors": [labels] * 2}]


def test_a_node_whose_engines_fail_is_left_alone(tmp_path: Path) -> None:
    case = Case(tmp_path, resource="spot")
    case.nodes[A] = ListedNode("10.0.0.2", 1)
    for _ in range(FAILED_STARTS + 3):
        case.look()
        case.fleet.states[1:] = [State.GONE] * len(case.fleet.states[1:])
    assert len(case.fleet.specs) == FAILED_STARTS
    assert case.lines == [f"no further engine starts on 10.0.0.2: {FAILED_STARTS} engines failed there"]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (["rollout.elastic.resource=spot"], "rollout.elastic.resource = spot: no engine may join"),
        (["rollout.elastic.most=1", "rollout.elastic.resource=GPU"], "allowed is a name of letters"),
        (["rollout.elastic.most=1", "rollout.elastic.autoscale=true"], "needs rollout.elastic.resource"),
        (["rollout.elastic.most=1", "run.deterministic=true"], "the clock decides"),
        (["rollout.elastic.most=1", "cluster.shared=true"], "colocated engines"),
        (["rollout.elastic.most=1", "residency.keep=[kv_cache]"], "parts that sleep"),
    ],
)
def test_refused_settings(settings: list[str], error: str) -> None:
    config = compose(None, ["model.path=x", "data.train=[x.parquet]", "cluster.device=cpu", *settings])
    with pytest.raises(UserError) as raised:
        check(config)
    assert error in str(raised.value)


def test_a_private_cluster_takes_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    refuse_private_cluster(ElasticConfig(most=1))
    with pytest.raises(UserError, match="no node can join"):
        refuse_private_cluster(ElasticConfig(most=1, resource="spot"))
