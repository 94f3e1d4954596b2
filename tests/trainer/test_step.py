"""Spans of a step in a trace: the phases, and the moves before them."""

from __future__ import annotations

import time
from collections.abc import Mapping

from skyrl_mega.telemetry.console import Console
from skyrl_mega.trainer.step import Step


def test_moves_have_spans_of_their_own_before_their_phase() -> None:
    on_phase_end: list[str] = []

    def prepare(phase: str) -> Mapping[str, float]:
        if phase == "logprobs":
            return {}  # everything needed is resident
        time.sleep(0.02)
        return {"time/residency": 0.02, "residency/bytes_in": 7.0}

    step = Step(1, Console(), prepare=prepare, on_phase_end=on_phase_end.append)
    for phase in ("generate", "logprobs", "train"):
        with step.phase(phase):
            time.sleep(0.01)
    names = ["residency", "generate", "logprobs", "residency", "train"]
    assert [span.name for span in step.spans] == on_phase_end == names
    assert [span.about.get("for") for span in step.spans if span.name == "residency"] == ["generate", "train"]
    assert all(span.end - span.start >= 0.02 for span in step.spans if span.name == "residency")
    assert all(one.end <= other.start + 1e-3 for one, other in zip(step.spans, step.spans[1:], strict=False))
    assert step.spans[3].about["residency/bytes_in"] == 7.0
    assert step.metrics["time/residency"] == 0.04
