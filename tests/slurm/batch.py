"""Stand-ins for Slurm's commands around `launch/slurm.sh`: they record their calls and arguments."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

from tests.slurm.cluster import ROOT

ADDRESS, TOKEN = "http://10.77.0.9:4711", "a-token-of-the-service"

SRUN = """
[[ " $* " == *" true "* ]] && { [[ ${*: -2:1} != ${DEAD:-none} ]]; exit; }
if [[ " $* " == *" skyrl_mega.retriever "* ]]; then
    for word in "$@"; do printf '%s\\n' "$word" >>"$CALLS/service"; done
    while [[ $1 != --address-file ]]; do shift; done
    [[ ${SERVICE_CODE:-} ]] && exit "$SERVICE_CODE"
    printf '%s\\n' "$ADDRESS" "$TOKEN" >"$2"
    [[ ${SERVICE_ENDS:-} ]] && /bin/sleep 1 && exit 0
    exec /bin/sleep 60
fi
for word in "$@"; do printf '%s\\n' "$word" >>"$CALLS/srun"; done
env | grep -E '^(RAY_AUTH|NCCL_SOCKET|SKYRL_MEGA_|WANDB|HF_)' | sort >"$CALLS/env"
for word in "$@"; do
    if [[ $word == */runs/slurm/7-* ]]; then
        [[ ${SERVICE_ENDS:-} ]] && until [[ -e $word/stop ]]; do /bin/sleep 0.05; done
        echo -n "$CODE" >"$word/code"
    fi
done
exit "$SRUN_CODE"
"""
SCONTROL = """
echo "$*" >>"$CALLS/scontrol"
case "$*" in
    "show hostnames"*) printf 'node1\\nnode2\\nnode3\\n' ;;
    *"show job"*) echo "JobId=7 ExcNodeList=${EXCLUDED:-(null)} NodeList=node[1-3]" ;;
esac
"""
SQUEUE = """
echo "$*" >>"$CALLS/squeue"
(($(wc -l <"$CALLS/squeue") > ${SQUEUE_FAILS:-0})) || { echo "${SQUEUE_ERROR:-}" >&2; exit 1; }
echo "${QUEUE:-}"
"""
PROGRAMS = {
    "srun": SRUN,
    "scontrol": SCONTROL,
    "squeue": SQUEUE,
    "sleep": "exec /bin/sleep 0.05",
}


class Batch:
    """The surroundings of a batch script."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.calls.mkdir()
        for name, text in PROGRAMS.items():
            file = folder / "bin" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"#!/bin/bash\n{text}\n")
            file.chmod(file.stat().st_mode | stat.S_IXUSR)
        self.environment(".venv")

    def environment(self, name: str) -> Path:
        """Creates a virtual environment's interpreter and returns the path."""
        python = self.folder / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\n")
        python.chmod(0o755)
        return python

    def run(
        self, *arguments: str, code: int = 0, srun: int | None = None, script: str | None = None, **env: str
    ) -> tuple[int, str]:
        """Returns exit code and output of a batch script.

        Args:
            arguments: Arguments of the launcher.
            code: Exit code of the launcher.
            srun: Exit code of srun; None takes `code`.
            script: A file of `slurm/`; None calls `run` of `launch/slurm.sh` alone.
            env: Further environment variables.
        """
        around = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "CODE": str(code),
            "SRUN_CODE": str(code if srun is None else srun),
            "ADDRESS": ADDRESS,
            "TOKEN": TOKEN,
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_JOB_NODELIST": "node[1-3]",
            "SLURM_CPUS_ON_NODE": "96",
        }
        command = ["-c", f'source {ROOT}/launch/slurm.sh; run "$@"', "batch"]
        if script:
            launch = self.folder / "launch"
            if not launch.exists():
                launch.symlink_to(ROOT / "launch")
            command = [str(ROOT / "slurm" / script)]
        done = subprocess.run(
            ["bash", *command, *arguments], env=around | env, capture_output=True, text=True, timeout=240
        )
        return done.returncode, done.stdout + done.stderr

    def called(self, program: str) -> list[str]:
        """Returns the recorded lines of a program: words of srun (`srun`, `service`), calls of the others, or `env`."""
        file = self.calls / program
        return file.read_text().splitlines() if file.exists() else []
