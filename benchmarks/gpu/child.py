"""The process of a proof: `python -m benchmarks.gpu.child ENTRY EVENTS FOLDER full|tiny`.

The last line of EVENTS records how the proof ended.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

from benchmarks.gpu.proof import Bench

TAIL = 4000
"""Characters kept of a traceback."""


def main(entry: str, events: str, folder: str, size: str) -> int:
    module, function = entry.split(":")
    end: dict[str, str] = {"end": "done"}
    try:
        getattr(importlib.import_module(module), function)(Bench(Path(events), Path(folder), tiny=size == "tiny"))
    except Exception:
        traceback.print_exc()
        end = {"end": "error", "traceback": traceback.format_exc()[-TAIL:]}
    with Path(events).open("a") as file:
        file.write(json.dumps(end) + "\n")
    return 0 if end["end"] == "done" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
