"""Starts mini-swe-agent, unmodified, on a trajectory's task; the interpreter of its installation runs this file."""

import json
import os
import sys
from pathlib import Path

own = Path(os.environ["SKYRL_TASK"]).parent  # not the repository of a software task
with open(os.environ["SKYRL_TASK"]) as file:
    task = json.load(file)
for name, text in ((task.get("extra_info") or {}).get("files") or {}).items():
    if text is not None:  # a table has every file's name in every row
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)

os.environ |= {
    "MSWEA_CONFIGURED": "true",  # it asks no questions
    "MSWEA_SILENT_STARTUP": "true",
    "MSWEA_GLOBAL_CONFIG_DIR": str(own / ".mini"),
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

from minisweagent.run.mini import app  # noqa: E402 # reads these variables when imported

output = own / ".mini" / "trajectory.json"
try:
    app(
        [
            *("--model", f"openai/{os.environ['MODEL_NAME']}", "--task", task["prompt"][-1]["content"]),
            *("--yolo", "--exit-immediately", "--cost-limit", "0", "--output", str(output)),
            *(sys.argv[1:] or ["-c", "mini.yaml"]),
            *("-c", f"agent.step_limit={task['max_turns']}"),
        ],
        standalone_mode=False,
    )
finally:
    if output.exists():
        (own / "answer.txt").write_text(json.loads(output.read_text())["info"]["submission"])
