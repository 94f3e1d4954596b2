"""Tests of short CUDA-only branches outside the larger rehearsals."""

from __future__ import annotations

import inspect
import subprocess
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from skyrl_mega.cli.prepare import _check_packages
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks import check
from skyrl_mega.config.compose import compose
from skyrl_mega.config.schema import Config
from skyrl_mega.hf_checkpoint import box_files
from skyrl_mega.megatron import cpu
from skyrl_mega.parallel.box import Box
from tests.cuda import as_cpu
from tests.preflight import nvml

ROOT = Path(__file__).parents[2]


def test_the_mapping_of_devices_is_taken_back_as_often_as_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    originals = {name: inspect.unwrap(getattr(torch, name)) for name in cpu._FACTORIES}
    for name, make in originals.items():
        monkeypatch.setattr(torch, name, cpu._on_cpu(make))
    for _ in range(2):
        as_cpu.unmapped()
        assert {name: getattr(torch, name) for name in originals} == originals


def dapo(*settings: str) -> Config:
    return compose(ROOT / "configs" / "dapo.yaml", list(settings))


def test_transformer_engine_is_allowed_on_cuda_and_refused_on_a_cpu_by_the_settings_alone() -> None:
    config = dapo("policy.spec=te")
    check(config, planned=True)
    _check_packages(config)  # a driver without a GPU accepts; the ranks check
    with pytest.raises(UserError, match=r"^policy\.spec = te: .*cluster\.device is cpu"):
        check(compose(ROOT / "configs" / "quickstart.yaml", ["policy.spec=te"]))


def test_a_checkpoint_of_a_gpus_memory_goes_through_pinned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []
    empty = torch.empty

    def recorded(*size: Any, pin_memory: bool = False, **options: Any) -> Any:
        pinned.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", recorded)
    box = Box((0, 0), (4, 8))
    with FakeTensorMode():
        box_files._Buffers([box], [torch.zeros(4, 8, device="cuda")])
    assert pinned.count(True) == box_files.THREADS


def test_a_policy_rank_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl_mega.megatron.actor import MegatronActor

    called: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append(1))
    MegatronActor.empty_cache(object.__new__(MegatronActor))
    assert called == [1]


def test_an_evaluations_engines_have_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from skyrl_mega.evaluate import engines

    told: dict[str, Any] = {}

    @contextmanager
    def session(**options: Any) -> Any:
        told["session"] = options
        yield

    def start(*arguments: Any, **_: Any) -> Any:
        told["places"] = arguments[1]
        return SimpleNamespace(serve=lambda _: None, ensure_running=lambda: ())

    monkeypatch.setattr(engines, "session", session)
    monkeypatch.setattr(engines, "reserve", lambda count, gpus, label: [gpus] * count)
    monkeypatch.setattr(engines, "start_engines", start)
    monkeypatch.setattr(engines, "Generator", lambda *_, **__: nullcontext())
    console: Any = SimpleNamespace(say=print, phase=lambda _: nullcontext())
    chat: Any = None
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    config = dapo(f"model.path={tmp_path}")
    with engines.own_engines(config, chat, tmp_path, console):
        pass
    workers = config.rollout.engines * config.rollout.tensor
    assert (told["session"]["actors"], told["session"]["gpus"]) == (workers, workers)
    assert told["places"] == [config.rollout.tensor] * config.rollout.engines


def test_an_embedder_is_refused_a_gpu_that_is_not_there_and_takes_one_that_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from skyrl_mega.retriever.embedder import Embedder

    with pytest.raises(UserError, match="--device cuda: torch sees no CUDA device"):
        Embedder(tmp_path, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    embedder = object.__new__(Embedder)
    with pytest.raises(UserError, match=str(tmp_path)):  # the folder has no model
        embedder.__init__(tmp_path, device="auto")  # type: ignore[misc]
    assert embedder.device.type == "cuda"


def test_what_a_preflight_asks_of_a_node_with_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from skyrl_mega.preflight import preflight, probe

    ask = probe.ProbeSettings(tmp_path, tmp_path, "token", "cuda", 20.0)
    assert {"gpus", "fabric"} <= set(probe.Probe(ask, "node", "127.0.0.1").gather())

    made: list[Any] = []
    monkeypatch.setattr("ray.remote", lambda _: SimpleNamespace(options=lambda **options: _Remote(made, options)))
    preflight._Probes([preflight.ClusterNode("ab" * 28, "node", "127.0.0.1")], ask)
    assert made[0]["runtime_env"] == {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}


class _Remote:
    """Actor class that records its options."""

    def __init__(self, made: list[Any], options: dict[str, Any]) -> None:
        made.append(options)

    def remote(self, *_: Any) -> None:
        """Does nothing."""


def test_a_run_on_gpus_has_a_preflight_of_gpus_and_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from skyrl_mega.preflight import preflight

    probes = SimpleNamespace(call=lambda *_: ({}, {}), end=lambda: None)
    monkeypatch.setattr(preflight, "cluster_nodes", lambda: [])
    monkeypatch.setattr(preflight, "_Probes", lambda *_: probes)
    monkeypatch.setattr(preflight, "_network", lambda *_: ([], []))
    monkeypatch.setattr(preflight, "_by_kind", lambda *_: {k: {} for k in preflight.COLUMNS} | {"fabric": {}})
    monkeypatch.setattr(preflight, "checkpoint_bytes", lambda *_: 0)
    limits: list[Any] = []
    monkeypatch.setattr(preflight.network, "check_rates", lambda _, limit: limits.append(limit) or [])
    messages: list[str] = []
    console: Any = SimpleNamespace(say=messages.append, phase=lambda _: nullcontext())
    with pytest.raises(preflight.ClusterError, match=r"cluster\.nodes wants 2"):
        preflight.before_run(dapo(), tmp_path, tmp_path, console)
    [promised] = limits
    assert (promised.gb_s, promised.is_reliable) == (
        dapo().cluster.topology.nic_gb_s,
        False,
    )  # no node reported network adapters


def test_two_gpus_exchange_though_ray_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl_mega.preflight import network

    seen: dict[str, Any] = {}

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        seen.update(env)
        return subprocess.CompletedProcess(command, 0, '{"gb_s": 40.0}\n', "")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(network.subprocess, "run", run)
    assert network.exchange(("127.0.0.1", 1), "127.0.0.1", "cuda", 1, 5.0, None) == 40.0
    assert seen["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_library_that_breaks_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyrl_mega.cli import preflight as cli
    from skyrl_mega.preflight import gpus

    library = nvml.Nvml()
    monkeypatch.setattr(
        nvml.Nvml, "nvmlSystemGetDriverVersion", lambda self: (_ for _ in ()).throw(nvml.NVMLError("gone"))
    )
    assert gpus.gather(library).error == "NVML does not answer: gone"
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 8.0})
    assert cli._device("auto") == "cuda"
