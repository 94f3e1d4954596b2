"""An `apptainer` whose instances are processes in namespaces of their own; errors are those of the real client.

`APPTAINER_CONFIGDIR` names the folder of the instances. The file `no-cgroups` there refuses limits. The image `missing`
cannot be pulled, `slow` takes time, and a file with the text `broken` does not start.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import boxes  # beside this file

folder = Path(os.environ["APPTAINER_CONFIGDIR"])


def fatal(text: str) -> NoReturn:
    print(f"\x1b[31mFATAL:  \x1b[0m {text}", file=sys.stderr)
    sys.exit(255)


def found(pattern: str) -> list[Path]:
    """Returns the files of the instances with a name."""
    return [file for file in sorted(folder.glob("*.instance")) if fnmatch.fnmatch(file.stem, pattern)]


def pull(file: Path, address: str) -> None:
    image = address.removeprefix("docker://")
    if image == "missing":
        fatal(
            "While making image from oci registry: error fetching image: while building SIF from layers: conveyor "
            "failed to get: while checking OCI image: reading manifest latest in library/missing: manifest unknown"
        )
    with (folder / "pulls").open("a") as pulls:
        print(image, file=pulls)
    file.write_text(image)
    if image == "slow":
        time.sleep(1)


def start(words: list[str]) -> None:
    *options, image, name = words
    if not Path(image).is_file() or Path(image).read_text() == "broken":
        fatal(f"could not open image {image}: image format not recognized")
    if (folder / "no-cgroups").exists() and any(word.startswith(("--memory", "--cpus", "--pids")) for word in options):
        fatal("while applying cgroups config: rootless cgroups require a D-Bus session")
    pid = boxes.start(["sh", "-c", "while :; do sleep 3600 & wait $!; done"])
    (folder / f"{name}.instance").write_text(json.dumps({"pid": pid, "options": options}))


def execute(words: list[str]) -> None:
    place = next(number for number, word in enumerate(words) if word.startswith("instance://"))
    name, command = words[place].removeprefix("instance://"), words[place + 1 :]
    files = found(name)
    first = boxes.first_process(json.loads(files[0].read_text())["pid"]) if files else None
    if first is None:
        fatal(f"no instance found with name {name}")
    if shutil.which(command[0], path="/usr/bin:/bin") is None:
        fatal(f'"{command[0]}": executable file not found in $PATH')
    prefix = "APPTAINERENV_"
    given = {key.removeprefix(prefix): value for key, value in os.environ.items() if key.startswith(prefix)}
    program = [*boxes.inside(first, given), *command]
    os.execvp(program[0], program)


def main() -> None:
    words = sys.argv[1:]
    with (folder / "log").open("a") as log:
        print(json.dumps(words), file=log)
    if words == ["--version"]:
        print("apptainer version 1.4.0")
    elif words[0] == "pull":
        pull(Path(words[-2]), words[-1])
    elif words[:2] == ["overlay", "create"]:
        Path(words[-1]).write_text("overlay")
    elif words[:2] == ["instance", "start"]:
        start(words[2:])
    elif words[:2] == ["instance", "list"]:
        print("INSTANCE NAME    PID    IP    IMAGE")
        for file in found(words[2]):
            print(f"{file.stem}    {json.loads(file.read_text())['pid']}        /images/a.sif")
    elif words[:2] == ["instance", "stop"]:
        if not (files := found(words[-1])):
            fatal("no instance found")
        for file in files:
            os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)
            file.unlink()
    elif words[0] == "exec":
        execute(words[1:])
    else:
        fatal(f"unknown command {words[0]}")
