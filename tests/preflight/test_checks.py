"""Versions, folders, model files, network and the report: on facts, real folders and real sockets."""

from __future__ import annotations

import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from skyrl_mega.cli.preflight import main
from skyrl_mega.cli.train import main as launch
from skyrl_mega.config.schema import BuildConfig, CheckpointConfig, ClusterConfig, Config, ModelConfig
from skyrl_mega.config.schema.cluster import TopologyConfig
from skyrl_mega.config.schema.pools import PoolConfig, PoolsConfig
from skyrl_mega.models.tiny import build
from skyrl_mega.preflight import fabric, model, network, paths, preflight, versions
from skyrl_mega.preflight.finding import NodeProblem, main_group, most_common
from skyrl_mega.preflight.network import ExpectedRate, Listener, PairRate
from skyrl_mega.preflight.preflight import ClusterNode, _missing_nodes, needed_nodes
from skyrl_mega.preflight.probe import Probe, ProbeSettings, bounded
from skyrl_mega.preflight.report import PreflightReport

CONFIGS = Path(__file__).parents[2] / "configs"

MEANT = ExpectedRate(50.0, True)


def texts(found: list[NodeProblem]) -> list[tuple[str, str]]:
    return [(f.node, f.text) for f in found]


def test_versions_of_this_environment_and_of_odd_ones() -> None:
    import torch

    here = versions.gather()
    assert here["torch"] == torch.__version__ and here["transformer-engine"] is None
    assert versions.check({"a": here, "b": dict(here)}) == []
    odd = {**here, "torch": "2.12.0", "ray": None}
    assert texts(versions.check({"a": odd, "b": here, "c": here})) == [
        ("a", f"torch 2.12.0, 2 of 3 nodes have {torch.__version__}; install the same"),
        ("a", f"ray is absent, 2 of 3 nodes have {here['ray']}; install the same"),
    ]
    assert most_common({"a": 1, "b": 2}) == 1  # of two, the first


def test_a_folder_that_all_share_and_one_that_one_node_has_for_itself(tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    private.mkdir()
    places = {"a": shared, "b": private, "c": shared}
    facts = {name: paths.gather(place, "t", name) for name, place in places.items()}
    blind = {name: paths.unseen(place, "t", list(places), wait_s=0) for name, place in places.items()}
    assert blind == {"a": ["b"], "b": ["a", "c"], "c": ["b"]}
    assert texts(paths.check_shared(facts, blind, shared)) == [
        ("b", f"{shared} is not the folder that a, c see; mount the same file system on all nodes")
    ]
    paths.remove(shared, "t")
    assert list(shared.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    facts = {"a": paths.gather(tmp_path, "t", "a"), "b": paths.gather(tmp_path / "no", "t", "b")}
    assert texts(paths.check_shared(facts, {"a": []}, tmp_path)) == [
        ("b", f"{tmp_path / 'no'}: No such file or directory")
    ]


def test_room_on_the_disks() -> None:
    facts = paths.PathFacts((), 3 << 30, {"/tmp": 1 << 30, "/dev/shm": 2 << 30})
    assert [(f.status, f.text) for f in paths.check_room({"a": facts}, Path("/r"), 4 << 30)] == [
        ("bad", "/r has 3.0 GiB, checkpoints need about 4.0 GiB; make room, or lower checkpoint.keep"),
        ("warn", "/tmp has 1.0 GiB free, 5.0 GiB are advised"),
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_room_is_for_master_weights_and_two_moments(dtype: str, tmp_path: Path) -> None:
    """Computes disk space in float32 for any dtype of the weights: kept checkpoints, plus the one in progress."""
    build(BuildConfig(), tmp_path / "model")
    elements = sum(weight.numel() for weight in load_file(tmp_path / "model" / "model.safetensors").values())
    config = Config(model=ModelConfig(dtype=dtype), checkpoint=CheckpointConfig(every=1, keep=2))
    assert preflight.checkpoint_bytes(config, tmp_path / "model") == 3 * elements * (4 + 4 + 4)


def test_a_model_that_the_run_builds_is_not_looked_for(tmp_path: Path) -> None:
    build(BuildConfig(), tmp_path / "built")
    config = Config(model=ModelConfig(path=str(tmp_path / "later"), build=BuildConfig()))
    assert (
        preflight.checkpoint_bytes(config, tmp_path / "later")
        == preflight.checkpoint_bytes(config, tmp_path / "built")
        > 0
    )
    looked = Probe(ProbeSettings(tmp_path, None, "token", "cpu", 20.0), "node", "127.0.0.1").gather()
    assert set(looked) == {"versions", "paths"}


@pytest.mark.parametrize("unprepared", [[], ["data.prepare=null", "warmup.steps=1", "warmup.files=[w.parquet]"]])
def test_what_is_missing_is_named_as_by_the_launcher(
    unprepared: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs a fresh checkout without model and data: launcher and preflight print the same line before any start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SKYRL_MEGA_DATA", raising=False)
    arguments = ["--config", str(CONFIGS / "dapo.yaml"), "cluster.device=cuda", *unprepared]
    errors = []
    for command in (launch, main):
        assert command(arguments) == 2
        errors.append(capsys.readouterr().err)
    assert errors[0] == errors[1] and errors[0].count("\n") == 1
    assert "model.path: models/Qwen3-30B-A3B-Base is not there; `hf download Qwen/Qwen3-30B-A3B-Base" in errors[0]
    for part in ("data.train: data/dapo/train.parquet does", "data.eval: data/dapo/test", "warmup.files: w.parquet"):
        assert (part in errors[0]) == bool(unprepared)
    assert list(tmp_path.iterdir()) == []


def test_model_files(tmp_path: Path) -> None:
    build(BuildConfig(), tmp_path / "a")
    for name in ("b", "cut", "other"):
        shutil.copytree(tmp_path / "a", tmp_path / name)
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "other" / "generation_config.json").write_text("{}")
    facts = {name: model.gather(tmp_path / name) for name in ("a", "b", "cut", "other")}
    problems = model.check(facts, Path("/m"))
    assert [f.node for f in problems] == ["cut", "other"]
    assert "model.safetensors" in problems[0].text and "cut off" in problems[0].text
    assert "names, sizes or configuration differ from 2 of 3 nodes" in problems[1].text


def test_doors() -> None:
    door, deaf = Listener("127.0.0.1"), Listener("127.0.0.1")
    stranger = network.NodeAddress("127.0.0.1", door.endpoint.port, "0" * 16)
    deaf.close()
    answers = network.connect({"a": door.endpoint, "b": deaf.endpoint, "c": stranger}, timeout_s=60)
    door.close()
    assert answers == {"b": "Connection refused", "c": "another program answers at its address"}
    assert network.interface("127.0.0.1") == "lo"


def test_who_is_apart_is_named_and_not_the_others() -> None:
    refused = "Connection refused"
    assert network.check_reach(["a", "b"], {"a": {}, "b": {}}) == []
    problems = network.check_reach(list("abc"), {"a": {"b": refused}, "b": {}, "c": {"b": refused}})
    assert texts(problems) == [("b", "a does not reach b: Connection refused (and 1 more)")]
    problems = network.check_reach(list("abc"), {"a": {"b": refused}, "b": {"a": refused}, "c": {}})
    assert [f.node for f in problems] == ["a", "b"]  # c reaches both


@given(st.integers(0, 17))
def test_pairs_are_a_ring_in_at_most_three_rounds(count: int) -> None:
    nodes = [str(i) for i in range(count)]
    rounds = network.pairs(nodes)
    for part in rounds:
        busy = [node for pair in part for node in pair]
        assert len(busy) == len(set(busy))
    ring = {frozenset(p) for p in [*pairwise(nodes), *([(nodes[-1], nodes[0])] if count > 1 else [])]}
    pairs = [frozenset(pair) for part in rounds for pair in part]
    assert set(pairs) == ring and len(pairs) == len(ring)
    assert len(rounds) <= 3


def test_slow_and_broken_links() -> None:
    def ring(*rates: float | None) -> list[PairRate]:
        names = "abcdef"[: len(rates)]
        return [
            PairRate(n, names[(i + 1) % len(rates)], rate, "no answer")
            for i, (n, rate) in enumerate(zip(names, rates, strict=True))
        ]

    assert network.check_rates(ring(40, 41, 39, 40), MEANT) == []
    assert texts(network.check_rates(ring(40, 5, 6, 40, 40), None)) == [("c", "b ⇄ c: 5.00 GB/s, the median is 40.00")]
    assert texts(network.check_rates(ring(40, None, None, 40), None)) == [("c", "b ⇄ c: no answer")]
    assert [f.node for f in network.check_rates(ring(40, 40, 5, 40), None)] == ["c", "d"]  # the link in this case
    assert {f.status for f in network.check_rates(ring(20, 20, 20), MEANT)} == {"warn"}
    assert [f.node for f in network.check_rates([PairRate("a", "b", None, "NCCL error")], None)] == ["a", "b"]


def test_nccl_over_tcp_stops_a_run() -> None:
    """Gives all links an Ethernet rate: a run 30 times slower than planned must not start silently."""
    findings = network.check_rates([PairRate("a", "b", 3.1), PairRate("b", "c", 3.0), PairRate("c", "a", 3.2)], MEANT)
    assert {(f.node, f.status) for f in findings} == {("a", "bad"), ("b", "bad"), ("c", "bad")}
    assert (
        "3.1 GB/s between nodes, cluster.topology.nic_gb_s is 50" in findings[0].text
        and "NCCL_DEBUG" in findings[0].text
    )
    assert {f.status for f in network.check_rates([PairRate("a", "b", 6.0)], MEANT)} == {"warn"}
    assert network.check_rates([PairRate("a", "b", 0.2)], None) == []  # gloo on CPUs: no expected rate


def test_plain_ethernet_stops_no_run_that_never_said_otherwise() -> None:
    """Gives a pair 10 GbE, 1.2 GB/s: below a tenth of the default, InfiniBand's rate."""
    pair, nobody = [PairRate("a", "b", 1.1)], {"a": fabric.FabricFacts((), 0), "b": fabric.FabricFacts((), 0)}
    some = nobody | {"b": fabric.FabricFacts(("mlx5_0",), 0)}

    def found(adapters: dict[str, fabric.FabricFacts], **topology: float) -> list[NodeProblem]:
        config = Config(cluster=ClusterConfig(topology=TopologyConfig(**topology)))
        return network.check_rates(pair, preflight._expected_rate(config, adapters))

    assert [f.status for f in found(nobody)] == ["warn", "warn"]
    assert "1.1 GB/s between nodes, cluster.topology.nic_gb_s is 50, its default" in found(nobody)[0].text
    assert {f.status for f in found(some)} == {"bad"}  # F6: adapters, and NCCL over TCP
    assert {f.status for f in found(nobody, nic_gb_s=25)} == {"bad"}
    assert found(nobody, nic_gb_s=1.25) == []


def test_adapters_that_nccl_would_not_find(tmp_path: Path) -> None:
    assert fabric.check({"a": fabric.gather(tmp_path / "no")}) == []  # no adapters, no finding
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name).mkdir()

    def absent(name: str) -> Any:
        assert name == "libibverbs.so.1"
        raise OSError("libibverbs.so.1: cannot open shared object file")

    [finding] = fabric.check({"a": fabric.gather(tmp_path, absent)})
    assert (
        finding.status == "warn"
        and "libibverbs cannot be loaded" in finding.text
        and "ibverbs-providers" in finding.text
    )

    class Verbs:
        """A stand-in for the verbs library with `count` adapters; an adapter without a provider does not count."""

        def __init__(self, count: int) -> None:
            self.freed = False

            def listed(pointer: Any) -> int:
                pointer._obj.value = count
                return 4096

            self.ibv_get_device_list = listed
            self.ibv_free_device_list = lambda _: setattr(self, "freed", True)

    for count, texts_ in ((2, []), (0, ["mlx5_0, mlx5_1: libibverbs opens 0 of 2, so NCCL talks over TCP"])):
        verbs = Verbs(count)
        facts = fabric.gather(tmp_path, lambda _, verbs=verbs: verbs)  # type: ignore[misc]
        assert verbs.freed and facts.usable == count
        assert [f.text.partition(";")[0] for f in fabric.check({"a": facts})] == texts_


def test_the_largest_group() -> None:
    links = {frozenset(p) for p in ("ab", "cd", "de")}
    assert main_group("abcde", lambda a, b: frozenset((a, b)) in links) == {"c", "d", "e"}
    assert main_group("ab", lambda a, b: False) == {"a"}


def test_one_question_that_hangs_does_not_hide_the_others() -> None:
    hung = socket.socketpair()

    def broken() -> None:
        raise OSError(116, "Stale file handle")

    answers = bounded({"quick": lambda: 1, "hangs": lambda: hung[0].recv(1), "fails": broken}, 0.5)
    assert answers["quick"] == 1
    assert isinstance(answers["hangs"], TimeoutError) and "0.5 s" in str(answers["hangs"])
    assert isinstance(answers["fails"], OSError)
    hung[1].close()


def test_the_report() -> None:
    findings = (
        NodeProblem("10.0.0.1", "disk", "warn", "/tmp is small"),
        NodeProblem("10.0.0.12", "gpus", "bad", "GPU 3: 1 uncorrected ECC errors"),
        NodeProblem("10.0.0.13", "answers", "bad", "no answer within 60 s"),
    )
    report = PreflightReport(
        ("10.0.0.1", "10.0.0.12", "10.0.0.13"), ("answers", "gpus", "disk"), findings, 1.25, (39.0, 41.0)
    )
    assert report.table() == (
        "node       answers   gpus      disk\n"
        "10.0.0.1   ok        ok        warn\n"
        "10.0.0.12  ok        BAD       ok\n"
        "10.0.0.13  BAD       –         –\n"
        "\n"
        "bad: 10.0.0.12: GPU 3: 1 uncorrected ECC errors\n"
        "bad: 10.0.0.13: no answer within 60 s\n"
        "warn: 10.0.0.1: /tmp is small"
    )
    assert report.summary() == (
        "preflight of 3 nodes: not fit: 10.0.0.12, 10.0.0.13, 39.00 to 41.00 GB/s between them; 1.2 s"
    )
    values: Any = json.loads(json.dumps(report.values()))
    assert values["bad"] == ["10.0.0.12", "10.0.0.13"] and not values["fit"]
    assert values["nodes"]["10.0.0.12"] == {"answers": "ok", "gpus": "bad", "disk": "ok"}


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["--config", "no.yaml"], "no.yaml"),
        ([], "--config"),
        (["--config", "CONFIG", "cluster.preflight=x"], "auto, always"),
    ],
)
def test_wrong_input(arguments: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("run: {name: r}\n")
    assert main([str(tmp_path / "c.yaml") if a == "CONFIG" else a for a in arguments]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and part in err


def test_an_exchange_and_one_that_nobody_answers() -> None:
    """Runs an exchange of two processes on loopback, then a leader without a partner."""
    listening = network.exchange_socket("127.0.0.1")
    place = ("127.0.0.1", int(listening.getsockname()[1]))
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(network.exchange, place, "127.0.0.1", "cpu", 1, 100.0, end) for end in (listening, None)]
        assert all(0 < end.result() < 1000 for end in ends)
    alone = network.exchange_socket("127.0.0.1")
    with pytest.raises(TimeoutError, match="no answer within 1 s"):
        network.exchange(("127.0.0.1", int(alone.getsockname()[1])), "127.0.0.1", "cpu", 1, 1.0, alone)
    assert alone.fileno() == -1


def test_an_exchange_that_ends_without_a_figure_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the exchange early with any exit status: a library that ends the process chooses the status."""
    monkeypatch.setattr(network.sys, "executable", "true")
    with pytest.raises(RuntimeError, match="exit code 0"):
        network.exchange(("127.0.0.1", 1), "127.0.0.1", "cpu", 1, 1.0, None)


def test_nodes_without_gpus_need_none_where_there_are_enough_others() -> None:
    nodes = [ClusterNode("a", "a", "a"), ClusterNode("b", "b", "b"), ClusterNode("c", "c", "c", gpus=False)]
    config = Config(cluster=ClusterConfig(nodes=2))
    assert needed_nodes(nodes, config, "cuda") == {"a", "b"}
    assert needed_nodes(nodes, config, "cpu") == {"a", "b", "c"}
    config.cluster.nodes = 3
    assert needed_nodes(nodes, config, "cuda") == {"a", "b", "c"}, "and what is wrong with the third one is found"


def test_a_missing_node_of_the_pool_is_named_although_the_number_is_right() -> None:
    pool = PoolsConfig(engines=PoolConfig(nodes=1, label="pool=engines"))
    config = Config(cluster=ClusterConfig(nodes=1, pools=pool))
    policy, engines = ClusterNode("a", "a", "a"), ClusterNode("b", "b", "b", labels={"pool": "engines"})
    assert "0 of 1 with the label pool=engines" in _missing_nodes([policy, policy], config)
    assert "0 of 1 without the label pool=engines" in _missing_nodes([engines, engines], config)
    assert _missing_nodes([policy], config).startswith("Ray has 1 nodes") and not _missing_nodes(
        [policy, engines], config
    )
