"""`run.deterministic`: the effect on the parts of a run, and the errors."""

from __future__ import annotations

import pytest

from skyrl_mega.common.errors import UserError
from skyrl_mega.config.checks.devices import check_deterministic
from skyrl_mega.config.derived import policy_settings
from skyrl_mega.config.schema import Config, RolloutConfig
from skyrl_mega.engines.vllm.spec import EngineSpec, environment
from skyrl_mega.trainer.start_actors import rank_environment


def settings(deterministic: bool = True) -> Config:
    config = Config()
    config.run.deterministic = deterministic
    config.policy.options = {"bias_dropout_fusion": False}
    return config


def test_megatron_and_gpu_processes_are_told() -> None:
    deterministic, others = settings(), settings(deterministic=False)
    assert policy_settings(deterministic).options == {"bias_dropout_fusion": False, "deterministic_mode": True}
    assert policy_settings(others).options == deterministic.policy.options == {"bias_dropout_fusion": False}
    assert {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"} <= rank_environment(deterministic, "cuda").keys()
    assert rank_environment(others, "cuda").keys() == {"CUDA_DEVICE_MAX_CONNECTIONS"}
    assert rank_environment(deterministic, "cpu").keys() == {"OMP_NUM_THREADS"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_engines_on_gpus_take_kernels_that_do_not_depend_on_the_batch(device: str, deterministic: bool) -> None:
    spec = EngineSpec("m", "bfloat16", device, RolloutConfig(), 128, deterministic=deterministic)
    assert environment(spec).get("VLLM_BATCH_INVARIANT") == ("1" if deterministic and device == "cuda" else None)


def test_what_the_clock_decides_is_refused() -> None:
    config = settings()
    check_deterministic(config)
    config.rollout.trajectory_timeout_s = 60.0
    with pytest.raises(UserError, match=r"^rollout\.trajectory_timeout_s = 60: .*allows null only; leave it out"):
        check_deterministic(config)
    config.run.deterministic = False
    check_deterministic(config)
    config = settings()
    config.policy.options["deterministic_mode"] = False
    with pytest.raises(UserError, match=r"^policy\.options\.deterministic_mode = False: .*allows true only"):
        check_deterministic(config)
