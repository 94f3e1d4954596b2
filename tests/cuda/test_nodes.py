"""Tests of ranks and engine workers on nodes of 8 GPUs, under Ray and Slurm: devices, CPUs, environment.

No GPU is present: Ray assigns numbers, NVML is simulated, and the actors only report environment and CPUs.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_mega.cluster.actor_process import Location, library_settings
from skyrl_mega.cluster.placement import Placement, by_gpu, on_gpus_of
from skyrl_mega.cluster.ray_session import ENVIRONMENT, session
from skyrl_mega.cluster.run_placement import actual_placement, plan_placement
from skyrl_mega.config.compose import compose
from skyrl_mega.config.derived import policy_ranks
from skyrl_mega.config.schema import Config
from skyrl_mega.trainer import placement as seats
from skyrl_mega.trainer import start_actors
from skyrl_mega.weights.plan.topology import Links, Topology
from skyrl_mega.weights.transports.ipc import device_owners
from tests.cuda.nodes import PYNVML, ROOT, SOCKETS, Teller
from tests.weights.grids import MODELS

ADDRESSES = ("127.0.0.8", "127.0.0.10")
"""Two nodes on this machine's loopback network, with addresses in different numerical and textual order."""

Device = tuple[str, str]
"""A node's address and a GPU of the node."""


def recipe(file: str, *settings: str) -> Config:
    return compose(ROOT / "configs" / f"{file}.yaml", [*settings, "algorithm.kl.coefficient=0"])


def one_process_a_device(ranks: list[Device], workers: list[Device], config: Config) -> None:
    """Compares the devices of the transfer plan with the existing devices. No two processes of NCCL's group may share a
    device; a process outside the group must share the owner's device."""
    shared, placement = config.cluster.shared, plan_placement(config)
    planned = Topology.from_placement(placement, Links.from_config(config.cluster))
    host_of = device_owners(planned, len(ranks))
    sits = dict(enumerate([*ranks, *workers]))
    group = [sits[process] for process, host in host_of.items() if process == host]
    assert len(group) == len(set(group)) == len(set(sits.values()))
    assert all(sits[process] == sits[host] for process, host in host_of.items())
    assert len(group) == len(ranks) + (0 if shared else len(workers))
    nodes = list(dict.fromkeys(node for node, _ in sits.values()))
    for process, (node, _) in sits.items():
        device = (planned.sources + planned.targets)[process]
        assert placement.node(device) == nodes.index(node)


def known_places(config: Config, ranks: list[Device], workers: list[Device], group: Any, fleet: Any) -> None:
    """Checks that the weight sync knows the real places: same node, same GPU."""
    actual = actual_placement(config, group.where, fleet.group.where)
    devices, sits = [*actual.policy, *actual.engines], [*ranks, *workers]
    assert [device % actual.per_node for device in devices] == [int(gpu) for _, gpu in sits]
    assert len(set(zip(map(actual.node, devices), (node for node, _ in sits), strict=True))) == 2


# ---- on Ray ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Starts a Ray cluster of two nodes with 8 GPUs, and a simulated NVML in all processes."""
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("nvml")
    (folder / "pynvml.py").write_text(PYNVML)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
        patch.setenv("NCCL_SOCKET_IFNAME", "ib0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
        for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDNN_PATH"):
            patch.delenv(name, raising=False)
        size = {"num_cpus": 10, "num_gpus": 8, "include_dashboard": False}
        cluster = Cluster(True, head_node_args={**size, "node_ip_address": ADDRESSES[1]})
        try:
            cluster.add_node(**size, node_ip_address=ADDRESSES[0])
            patch.setenv("RAY_ADDRESS", cluster.address)
            with session(actors=0, nodes=2, timeout_s=120):
                yield
        finally:
            cluster.shutdown()


def without_model(_: Any, group: Any, *__: Any) -> Any:
    """Returns a group of actors without building the model."""
    return SimpleNamespace(group=group, load=lambda *_: None)


def dealt(placement: Placement | None, seed: int) -> Placement | None:
    """Returns the placement as if Ray had assigned GPUs and nodes in another order."""
    if placement is None:
        return None
    slots = list(placement.slots)
    random.Random(seed).shuffle(slots)
    return replace(placement, slots=tuple(slots))


def told(group: Any) -> list[tuple[dict[str, str], set[int]]]:
    return list(group.call_all("tell", timeout=120))


def test_two_nodes_shared(two_nodes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts `dapo`: 16 policy ranks, and two engines of 8 workers on the same GPUs."""
    config = recipe("dapo")
    assert (policy_ranks(config), config.rollout.engines, config.rollout.tensor) == (16, 2, 8)
    monkeypatch.setattr(start_actors, "MegatronActor", Teller)
    monkeypatch.setattr(start_actors, "VllmEngine", Teller)
    monkeypatch.setattr(start_actors, "build_model", without_model)
    monkeypatch.setattr(start_actors, "architecture", lambda _: SimpleNamespace(check_layout=lambda *_: None))
    reserved = seats.reserve_run(config, "cuda")
    reserved = replace(reserved, policy=dealt(reserved.policy, 1))
    with ExitStack() as stack:
        policy, _, _, fleet = start_actors.start_actors(
            start_actors.Setup(config, {}, tmp_path, device="cuda", folder=tmp_path, stack=stack, say=print), reserved
        )
        where, ranks = policy.group.where, told(policy.group)
        engines = told(fleet.group)

        devices = [(at.address, env["CUDA_VISIBLE_DEVICES"]) for at, (env, _) in zip(where, ranks, strict=True)]
        assert devices == [(node, str(gpu)) for node in ADDRESSES for gpu in range(8)]
        assert policy.group.ranks_by_node == f"{ADDRESSES[0]}: 0-7, {ADDRESSES[1]}: 8-15"
        every = ",".join(map(str, range(8)))
        assert [
            (at.address, env["CUDA_VISIBLE_DEVICES"]) for at, (env, _) in zip(fleet.group.where, engines, strict=True)
        ] == [(node, every) for node in ADDRESSES]
        workers = [(at.address, gpu) for at in fleet.group.where for gpu in every.split(",")]
        one_process_a_device(devices, workers, config)
        known_places(config, devices, workers, policy.group, fleet)
        assert actual_placement(config, where, fleet.group.where) == plan_placement(config)

        for rank, (env, cpus) in enumerate(ranks):
            assert cpus == {*SOCKETS[rank % 8 // 4]}, rank
            assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
            log = (tmp_path / "logs" / f"policy-{rank}.log").read_text()
            assert f"policy-{rank}: on CPUs" in log and f"nearest to GPU {rank % 8}" in log
        for env, cpus in engines:
            assert cpus == {*SOCKETS[0], *SOCKETS[1]}  # the engine's workers use both sockets
            assert "CUDA_DEVICE_MAX_CONNECTIONS" not in env and env["VLLM_HOST_IP"] == "127.0.0.1"
        for env, _ in ranks + engines:
            assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
            assert (env["NCCL_DEBUG"], env["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,NET")
            assert env["NCCL_SOCKET_IFNAME"] == "ib0"

        # A restarted rank gets the same GPU again.
        policy.group.replace(5, 120)
        env, cpus = policy.group.call_one(5, "tell", timeout=120)
        assert (policy.group.where[5].address, env["CUDA_VISIBLE_DEVICES"]) == (ADDRESSES[0], "5")


def test_two_nodes_apart(two_nodes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts 4 policy ranks and three engines of 4 workers, all on separate GPUs."""
    sizes = ["cluster.shared=false", "cluster.nodes=2", "cluster.gpus_per_node=8", "policy.ranks=4"]
    config = recipe("gsm8k", *sizes, "rollout.engines=3", "rollout.tensor=4")
    monkeypatch.setattr(start_actors, "MegatronActor", Teller)
    monkeypatch.setattr(start_actors, "VllmEngine", Teller)
    monkeypatch.setattr(start_actors, "build_model", without_model)
    monkeypatch.setattr(start_actors, "architecture", lambda _: SimpleNamespace(check_layout=lambda *_: None))
    reserved = seats.reserve_run(config, "cuda")
    reserved = replace(reserved, policy=dealt(reserved.policy, 2), engines=dealt(reserved.engines, 3))
    with ExitStack() as stack:
        policy, _, _, fleet = start_actors.start_actors(
            start_actors.Setup(config, {}, tmp_path, device="cuda", folder=tmp_path, stack=stack, say=print), reserved
        )
        ranks = [(at.address, gpu) for at in policy.group.where for gpu in at.gpus]
        workers = [(at.address, gpu) for at in fleet.group.where for gpu in at.gpus]
        assert len(ranks) == 4 and len({node for node, _ in ranks}) == 1
        assert [gpu for _, gpu in ranks] == sorted(gpu for _, gpu in ranks)
        assert len(workers) == 12 and len({*ranks, *workers}) == 16
        known_places(config, ranks, workers, policy.group, fleet)
        for at, (env, cpus) in zip(fleet.group.where, told(fleet.group), strict=True):
            gpus = list(map(int, at.gpus))
            assert env["CUDA_VISIBLE_DEVICES"] == ",".join(at.gpus) and gpus == sorted(gpus)
            assert cpus == {cpu for gpu in gpus for cpu in SOCKETS[gpu // 4]}


# ---- any shape ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("nodes, gpus, tensor", [(1, 4, 1), (1, 4, 4), (1, 8, 2), (2, 8, 8), (4, 8, 8), (4, 8, 4)])
def test_every_shape(nodes: int, gpus: int, tensor: int, shared: bool) -> None:
    """Checks that, for any assignment by Ray, rank r is on GPU r mod 8 and engine workers are at the planned GPUs."""
    addresses = [f"10.0.0.{9 + node}" for node in range(nodes)]
    sizes = [
        f"cluster.nodes={nodes * (1 if shared else 2)}",
        f"cluster.gpus_per_node={gpus}",
        f"rollout.tensor={tensor}",
    ]
    counts = [f"policy.ranks={nodes * gpus}", f"rollout.engines={nodes * gpus // tensor}"]
    config = recipe("dapo", f"cluster.shared={shared}", *sizes, *counts)
    for seed in range(20):
        deal = random.Random(seed)
        places = [
            Location("m", 1, node, f"{number:056x}", (str(gpu),))
            for number, node in enumerate(addresses, 1)
            for gpu in range(gpus)
        ]
        deal.shuffle(places)
        where = [places[i] for i in by_gpu(places)]
        ranks = [(at.address, at.gpus[0]) for at in where]
        assert ranks == [(node, str(gpu)) for node in addresses for gpu in range(gpus)]
        if shared:
            engines = on_gpus_of(where, nodes * gpus // tensor, gpus=tensor)
            workers = []
            for engine, slot in enumerate(engines.slots):
                node = addresses[int(slot.strategy.node_id, 16) - 1]
                visible = slot.env["CUDA_VISIBLE_DEVICES"].split(",")
                assert slot.env["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0" and slot.resources == {}
                workers += [(node, gpu) for gpu in visible]
                assert workers[-tensor:] == ranks[engine * tensor : (engine + 1) * tensor]
        else:
            engine_addresses = [f"10.0.1.{9 + node}" for node in range(nodes)]
            cuts = [[str(gpu) for gpu in range(first, first + tensor)] for first in range(0, gpus, tensor)]
            groups = [Location("m", 1, node, node, tuple(cut)) for node in engine_addresses for cut in cuts]
            deal.shuffle(groups)
            workers = [(groups[i].address, gpu) for i in by_gpu(groups) for gpu in groups[i].gpus]
        one_process_a_device(ranks, workers, config)


def test_what_the_user_says_goes_first() -> None:
    mine = {"NCCL_DEBUG": "WARN", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDNN_PATH": "/opt/cudnn"}
    assert library_settings(mine) == {}
    assert library_settings({"NCCL_DEBUG_SUBSYS": "ALL", "CUDNN_PATH": "/x"}) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_DEBUG": "INFO",
    }


def test_one_cudnn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares Transformer Engine's path of cuDNN with torch's, for a cuDNN installed as a package."""
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert "CUDNN_PATH" not in library_settings({})
    (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    assert library_settings({})["CUDNN_PATH"] == str(tmp_path / "nvidia" / "cudnn")


def test_an_engines_worker_stays_near_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Binds worker 6 of an engine on GPUs 0-7; a worker on a CPU is not bound."""
    import torch
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    from skyrl_mega.engines.vllm import transfer

    bound: list[list[str]] = []
    monkeypatch.setattr(transfer.numa, "bind", bound.append)
    monkeypatch.setattr(transfer, "LoadTimeParameters", lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    for device in map(torch.device, ("cuda:6", "cpu")):
        loading = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
        attributes = {"model": None, "device": device, "vllm_config": loading}
        attributes["model_config"] = SimpleNamespace(
            model="", dtype=None, hf_config=SimpleNamespace(to_dict=lambda: MODELS["qwen3"])
        )
        monkeypatch.setattr(
            WeightTransferEngine, "__init__", lambda self, attributes=attributes: vars(self).update(attributes)
        )
        transfer.ShardTransferEngine()
    assert bound == [["6"]]


# ---- on Slurm ----------------------------------------------------------------------------------------------------

SRUN = """
i=0
for node in ${SKYRL_MEGA_NODES//,/ }; do
    for ((at = 1; at <= $#; at++)); do [[ ${!at} == */python* ]] && break; done
    SLURM_PROCID=$i SLURMD_NODENAME=$node "$PYTHON" -m tests.cuda.nodes "${@:at}" >>"$TOLD"
    i=$((i + 1))
done
for word in "$@"; do [[ $word == */runs/slurm/* ]] && echo -n 0 >"$word/code"; done
exit 0
"""
SCONTROL = 'for ((i = 1; i <= SLURM_JOB_NUM_NODES; i++)); do echo "node$i"; done'


@pytest.mark.parametrize("nodes, gpus", [(1, 4), (1, 8), (2, 8), (4, 8)])
def test_a_slurm_job(nodes: int, gpus: int, tmp_path: Path) -> None:
    """Compares every node's GPUs in Ray, environment and NCCL settings with the Slurm job."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    python = tmp_path / ".venv-cuda" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(ROOT / ".venv" / "bin" / "python"),
        "PYTHONPATH": str(ROOT),
        "TOLD": str(tmp_path / "told"),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
        "SLURM_CPUS_ON_NODE": "96",
        "SLURM_GPUS_ON_NODE": str(gpus),
        "SKYRL_MEGA_INTERFACE": "lo",
        "NCCL_IB_HCA": "mlx5",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
    }
    command = ["bash", "-c", f'source {ROOT}/launch/slurm.sh; run "$@"', "batch", "--config=x"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [t["job"]["node"] for t in reports] == [f"node{i + 1}" for i in range(nodes)]
    for rank, t in enumerate(reports):
        assert t["python"] == str(python)
        assert (t["job"]["rank"], t["job"]["gpus"], t["job"]["cpus"]) == (rank, gpus, 96)
        assert {f"--num-gpus={gpus}", "--num-cpus=96", "--node-ip-address=127.0.0.1"} <= {*t["ray"]}
        assert ("--head" in t["ray"]) == (rank == 0)
        assert t["env"]["NCCL_SOCKET_IFNAME"] == "lo" and t["env"]["NCCL_IB_HCA"] == "mlx5"
        assert t["env"]["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0" and "RAY_ADDRESS" not in t["env"]
        assert t["env"]["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, range(gpus)))
