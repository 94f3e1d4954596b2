"""An error with a pointer to a log includes the error from the log."""

from __future__ import annotations

from pathlib import Path

from skyrl_mega.cluster.log_errors import with_cause

POINTER = "EngineCore encountered an issue. See stack trace (above) for the root cause."
LOG = f"""INFO 11-22 starting
(EngineCore pid=7) ERROR 11-22 10:00:00 [core.py:1] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-22 10:00:00 [core.py:1]   raise ValueError("x: Error: y")
(EngineCore pid=7) ERROR 11-22 10:00:00 [core.py:1] RuntimeError: Unsupported CPU attention configuration: head_dim=16
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
vllm.v1.engine.exceptions.EngineDeadError: {POINTER}
"""


def test_the_cause_stands_in_the_place_of_the_pointer(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text(LOG)
    text = f"EngineDied: vLLM's process died: {POINTER}"
    cause = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
    assert with_cause(text, str(log)) == f"EngineDied: vLLM's process died: {cause}"
    assert with_cause("ValueError: what it is", str(log)) == "ValueError: what it is"
    log.write_text("killed\n")
    assert with_cause(text, str(log)) == with_cause(text, str(tmp_path / "gone")) == with_cause(text, None) == text
