"""A `kubectl` without a cluster: pods are processes in namespaces of their own, errors are those of the real client.

`--kubeconfig=FOLDER` names the folder of the pods. An image names a fault: `missing` cannot be pulled, `huge` finds no
node, `quota` is refused, `slow` is ready later. Files in the folder: `denied` (rights that are missing), `cut` (the
next reply loses its end), `policy.json` (the last applied object).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import boxes  # beside this file

folder = Path()


def fail(text: str, code: int = 1) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(code)


def load(name: str) -> dict[str, Any]:
    name = name.removeprefix("pod/")
    try:
        return json.loads((folder / f"{name}.pod").read_text())  # type: ignore[no-any-return]
    except FileNotFoundError:
        fail(f'Error from server (NotFound): pods "{name}" not found')


def create() -> None:
    wanted = json.load(sys.stdin)
    name, spec = wanted["metadata"]["name"], wanted["spec"]
    box = spec["containers"][0]
    if box["image"] == "quota":
        fail(f'Error from server (Forbidden): error when creating "STDIN": pods "{name}" is forbidden: exceeded quota')
    pid = 0
    if box["image"] not in ("missing", "huge"):
        pid = boxes.start(box["command"])
    (folder / f"{name}.pod").write_text(json.dumps({**wanted, "pid": pid, "made": time.time()}))
    print(f"pod/{name} created")


def is_ready(pod: dict[str, Any]) -> bool:
    image = pod["spec"]["containers"][0]["image"]
    return bool(pod["pid"]) and time.time() - pod["made"] > (2 if image == "slow" else 0)


def wait(name: str, timeout_s: float) -> None:
    deadline = time.monotonic() + min(timeout_s, 3)
    while not is_ready(load(name)):
        if time.monotonic() > deadline:
            fail(f"error: timed out waiting for the condition on pods/{name.removeprefix('pod/')}")
        time.sleep(0.1)


def status(pod: dict[str, Any]) -> dict[str, Any]:
    box = pod["spec"]["containers"][0]
    if box["image"] == "huge":
        text = "0/3 nodes are available: 3 Insufficient memory."
        return {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}],
        }
    state: dict[str, Any] = {"running": {"startedAt": "now"}}
    phase, more = "Running", {}
    if box["image"] == "missing":
        cause = 'rpc error: code = NotFound desc = failed to pull and unpack image "missing": not found'
        phase, state = "Pending", {"waiting": {"reason": "ErrImagePull", "message": cause}}
    elif boxes.first_process(pod["pid"]) is None:
        phase = "Failed"
        state = {"terminated": {"reason": pod.get("end", "Error"), "exitCode": 137}}
        more = {"reason": pod["evicted"][0], "message": pod["evicted"][1]} if "evicted" in pod else {}
    return {"phase": phase, "containerStatuses": [{"name": box["name"], "state": state}], **more}


def execute(words: list[str], interactive: bool) -> None:
    name, command = words[0], words[words.index("--") + 1 :]
    first = boxes.first_process(load(name)["pid"])
    if first is None:
        fail('error: Internal error occurred: unable to upgrade connection: container not found ("box")')
    if shutil.which(command[0], path="/usr/bin:/bin") is None:
        fail(
            "error: Internal error occurred: error executing command in container: failed to exec in container: failed "
            'to start exec "c0": OCI runtime exec failed: exec failed: unable to start container process: exec: '
            f'"{command[0]}": executable file not found in $PATH: unknown'
        )
    stdin = None if interactive else subprocess.DEVNULL
    ran = subprocess.run([*boxes.inside(first, {}), *command], stdin=stdin, capture_output=True)
    cut = folder / "cut"
    out = ran.stdout[: len(ran.stdout) // 2] if cut.exists() and interactive else ran.stdout
    cut.unlink(missing_ok=True)
    sys.stdout.buffer.write(out)
    sys.stderr.buffer.write(ran.stderr)
    if ran.returncode:
        code = ran.returncode if ran.returncode > 0 else 128 - ran.returncode
        sys.stdout.flush()
        fail(f"command terminated with exit code {code}", code)


def delete(names: list[str]) -> None:
    for name in names:
        file = folder / f"{name.removeprefix('pod/')}.pod"
        if file.exists():
            pid = json.loads(file.read_text())["pid"]
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            file.unlink()
            print(f'pod "{name}" deleted')


def main() -> None:
    global folder
    words = sys.argv[1:]
    options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--") and word != "--")
    cut = words.index("--") if "--" in words else len(words)
    plain = [word for word in words[:cut] if not word.startswith("-")]
    folder = Path(options["kubeconfig"])
    with (folder / "log").open("a") as log:
        print(json.dumps(words), file=log)
    verb, *rest = plain
    if verb == "auth":
        denied = (folder / "denied").read_text() if (folder / "denied").exists() else ""
        right = " ".join([*rest[1:], *([options["subresource"]] if "subresource" in options else [])])
        print("no" if right == denied else "yes")
        sys.exit(int(right == denied))
    elif verb == "apply":
        (folder / "policy.json").write_text(sys.stdin.read())
    elif verb == "create":
        create()
    elif verb == "wait":
        wait(rest[0], float(options["timeout"].removesuffix("s")))
    elif verb == "get" and rest[0] == "pods":
        label, _, value = options["selector"].partition("=")
        for file in folder.glob("*.pod"):
            if json.loads(file.read_text())["metadata"]["labels"].get(label) == value:
                print(f"pod/{file.stem}")
    elif verb == "get":
        found = load(rest[1])
        print(json.dumps({**found, "status": status(found)}))
    elif verb == "exec":
        execute([*rest, *words[cut:]], "stdin" in options)
    elif verb == "delete":
        delete(rest)
    else:
        fail(f"error: unknown command {verb}")
