"""Settings of torch's CUDA allocator in the policy's processes; those of engines are vLLM's own.

Rows differ in length from one micro-batch to the next, and blocks of fixed segments are then too small for the next row
and too large to lie idle: several GiB are cached and fit nothing. A segment that expands maps pages where they are
needed and leaves no such gaps. The memory of vLLM's sleep mode cannot lie in them (`engines/vllm/sleep.py`), so engines
have none; vLLM turns off those of a user while it allocates there.
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch looks for settings; the first that is there counts."""
SETTINGS = "expandable_segments:True"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for a policy process that has those of `environ`; the user's own settings stand."""
    return {} if any(environ.get(name) for name in VARIABLES) else {VARIABLES[1]: SETTINGS}


def expandable(environ: Mapping[str, str]) -> bool:
    """Whether segments expand in a policy process that has those of `environ`."""
    settings = next((environ[name] for name in VARIABLES if environ.get(name)), SETTINGS)
    name = SETTINGS.partition(":")[0]
    said = [one for one in settings.lower().replace(" ", "").split(",") if one.startswith(f"{name}:")]
    return bool(said) and said[-1] == SETTINGS.lower()  # of two, torch takes the last
