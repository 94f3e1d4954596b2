"""Tests of Transformer Engine's Adam: moments in bfloat16, and an optimizer in host memory.

Python of Transformer Engine and megatron-core is real (`te`), kernels are plain torch (`te_adam`). The results are
compared with megatron-core without Transformer Engine, as on a CPU, and with Adam in float64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_mega.config.schema import BuildConfig, OptimizerConfig
from skyrl_mega.models.tiny import hf_config
from tests.cuda import programs, te
from tests.cuda.te_adam import Answer, Case, go_all
from tests.support.ranks import MEGATRON_SERVER, run_ranks

SETTINGS = OptimizerConfig(lr=1e-2, beta1=0.8, beta2=0.95, weight_decay=0.1, clip_grad=0.0)
SMALL = replace(SETTINGS, moments="bfloat16")
KINDS = {
    "float32": SETTINGS,
    "float32 streamed": replace(SETTINGS, streamed=True),
    "bfloat16": SMALL,
    "bfloat16 streamed": replace(SMALL, streamed=True),
    "bfloat16 streamed clipped": replace(SMALL, streamed=True, clip_grad=0.5),
    "bfloat16 clipped": replace(SMALL, clip_grad=0.5),
}


@pytest.fixture(scope="module", params=[True, False], ids=["transformer_engine", "torch"])
def answers(request: pytest.FixtureRequest) -> dict[str, Answer]:
    if request.param and (reason := te.absent()):
        pytest.skip(reason)
    cases = [Case(hf_config(BuildConfig()), optimizer, request.param) for optimizer in KINDS.values()]
    server = programs.server({}) if request.param else MEGATRON_SERVER
    (answers,) = run_ranks(1, go_all, cases, server=server)
    by_kind: dict[str, Answer] = dict(zip(KINDS, answers, strict=True))
    assert {a.adam for name, a in by_kind.items() if "bfloat16" in name} == {
        "FusedAdam" if request.param else "AdamWithBfloat16Moments"
    }
    return by_kind


def same(a: Answer, b: Answer) -> bool:
    return all(
        np.array_equal(mine, theirs[name])
        for mine_of, theirs in ((a.masters, b.masters), (a.weights, b.weights))
        for name, mine in mine_of.items()
    ) and all(np.array_equal(values, b.moments[n][k]) for n, kinds in a.moments.items() for k, values in kinds.items())


def test_streaming_changes_no_bit(answers: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        if "streamed" in name:
            beside = answers[name.replace(" streamed", "")]
            assert same(answer, beside), name
            assert not beside.away
            item = 2 if "bfloat16" in name else 4
            assert answer.away == sum(master.size * (4 + 2 * item) for master in answer.masters.values())


def test_moments_have_the_type_that_is_asked_for(answers: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        assert answer.types == {"torch.bfloat16" if "bfloat16" in name else "torch.float32"}, name


def test_steps_are_adams_with_moments_that_are_rounded(answers: dict[str, Answer]) -> None:
    """Compares with Adam in float64 and moments rounded to bfloat16. A value halfway between two bfloat16 numbers may
    round either way, with an effect of at most half a step's 2^-8."""
    for kind, off in (("float32", 1e-5), ("bfloat16", 2**-7)):
        answer = answers[kind]
        for name, master in answer.masters.items():
            gradients = [step[name].reshape(-1) for step in answer.gradients]
            wanted, moments = adam(answer.start[name], gradients, kind)
            np.testing.assert_allclose(master, wanted, rtol=0, atol=1e-6 + (3e-2 * off), err_msg=f"{kind} {name}")
            wrong = np.abs(master - wanted) > 1e-6
            assert wrong.mean() < (1e-3 if kind == "bfloat16" else 1e-9), f"{kind} {name}: {wrong.mean()}"
            for moment, values in moments.items():
                np.testing.assert_allclose(answer.moments[name][moment], values, rtol=off, atol=1e-6)


def adam(start: Any, gradients: list[Any], kind: str) -> tuple[Any, dict[str, Any]]:
    """Returns masters and moments after steps with these gradients (arXiv:1711.05101, algorithm 2).

    All parameters decay: the schedule exempts norms, and this test has no schedule.
    """
    p, m, v = start.astype(np.float64), np.zeros(start.shape), np.zeros(start.shape)
    for step, g in enumerate(gradients, start=1):
        g = g.astype(np.float64)
        m = SETTINGS.beta1 * m + (1 - SETTINGS.beta1) * g
        v = SETTINGS.beta2 * v + (1 - SETTINGS.beta2) * g * g
        hat_m, hat_v = m / (1 - SETTINGS.beta1**step), v / (1 - SETTINGS.beta2**step)
        p = p - SETTINGS.lr * (hat_m / (np.sqrt(hat_v) + SETTINGS.eps) + SETTINGS.weight_decay * p)
        if kind == "bfloat16":
            m, v = (torch.from_numpy(t).bfloat16().double().numpy() for t in (m, v))
    return p, {"exp_avg": m, "exp_avg_sq": v}
