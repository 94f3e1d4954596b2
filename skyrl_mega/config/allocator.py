"""Settings of torch's CUDA allocator in the policy's processes; engines are configured by vLLM.

Rows differ in length between micro-batches. With fixed segments, cached blocks are then too small for the next row but
too large to waste: several GiB stay cached and fit nothing. Expandable segments map pages on demand and leave no such
gaps. vLLM's sleep mode cannot use expandable segments (`engines/vllm/sleep.py`), so engines do not set them; vLLM
disables a user's setting while allocating for sleep mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with torch's settings; torch reads the first non-empty variable."""
SETTINGS = "expandable_segments:True"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables for a policy process on top of `environ`: `PYTORCH_CUDA_ALLOC_CONF` with the value
    `SETTINGS`; {} if the user configured the allocator by one of `VARIABLES`."""
    return {} if any(environ.get(name) for name in VARIABLES) else {VARIABLES[1]: SETTINGS}


def expandable(environ: Mapping[str, str]) -> bool:
    """Returns True if segments are expandable in a policy process started with these environment variables.

    Without a setting by the user, the run's default applies, and the result is True.
    """
    return _expandable(next((environ[name] for name in VARIABLES if environ.get(name)), SETTINGS))


@cache
def _expandable(settings: str) -> bool:
    name = SETTINGS.partition(":")[0]
    values = [option for option in settings.lower().replace(" ", "").split(",") if option.startswith(f"{name}:")]
    return bool(values) and values[-1] == SETTINGS.lower()  # torch uses the last of several
