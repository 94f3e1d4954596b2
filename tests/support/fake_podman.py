#!/usr/bin/env -S python3 -I -S
"""A client with the subcommands of podman that the project uses. It keeps containers and images as files, and runs
programs of a container as plain processes.

    fake_podman.py --root=FOLDER run --name=c1 … IMAGE …

    FOLDER/log                  arguments of all calls, a JSON list per line
    FOLDER/containers/NAME      state of a container, as printed by `inspect`
    FOLDER/images/NAME          id and size of an image
    FOLDER/answers/SUBCOMMAND   JSON list of answers {"exit", "stdout", "stderr"}: each is given once, before the usual
                                answer
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote


def prepared(folder: Path, subcommand: str) -> dict | None:
    """Takes the next prepared answer of a subcommand."""
    path = folder / "answers" / subcommand
    answers = json.loads(path.read_text()) if path.exists() else []
    if answers:
        path.write_text(json.dumps(answers[1:]))
        return answers[0]
    return None


def value(words: list[str], name: str) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")


def main(folder: Path, subcommand: str, words: list[str]) -> int:
    for name in ("containers", "images", "answers"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    with open(folder / "log", "a") as log:
        log.write(json.dumps([subcommand, *words]) + "\n")
    answer = prepared(folder, subcommand)
    if answer is not None:
        time.sleep(answer.get("seconds", 0))
        sys.stdout.write(answer.get("stdout", ""))
        sys.stderr.write(answer.get("stderr", ""))
        if answer.get("exit") is not None:
            return answer["exit"]
    containers = folder / "containers"
    if subcommand == "info":
        print("{}")
    elif subcommand == "run":
        (containers / value(words, "--name")).write_text("true false 0")
        (containers / f".{value(words, '--name')}").write_text(value(words, "--label"))
    elif subcommand == "ps":
        label = words[words.index("--filter") + 1].removeprefix("label=")
        for entry in containers.glob(".*"):
            if entry.read_text().startswith(label):
                print(entry.name[1:])
    elif subcommand == "rm":
        for name in words:
            for path in (containers / name, containers / f".{name}"):
                path.unlink(missing_ok=True)
    elif subcommand in ("container", "exec"):
        return in_container(containers, subcommand, words)
    elif subcommand in ("image", "pull", "rmi"):
        return image(folder / "images" / quote(words[-1], safe=""), subcommand)
    return 0


def in_container(containers: Path, subcommand: str, words: list[str]) -> int:
    if words[0] == "prune":
        return 0
    place = next(number for number, word in enumerate(words) if word.startswith("skyrl-mega-"))
    path = containers / words[place]
    if not path.exists():
        sys.stderr.write(f"Error: no such container {path.name}\n")
        return 125
    if subcommand == "container":
        print(path.read_text())
        return 0
    if not path.read_text().startswith("true"):
        sys.stderr.write("Error: can only create exec sessions on running containers: container state improper\n")
        return 255
    if words[-1] == "kill -9 -1":
        return 0
    return subprocess.run(words[place + 1 :], check=False).returncode


def image(path: Path, subcommand: str) -> int:
    if subcommand == "pull":
        path.write_text(f"id-{path.name} 1000")
    elif not path.exists():
        sys.stderr.write("Error: no such image\n")
        return 125
    elif subcommand == "rmi":
        path.unlink()
    else:
        print(path.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1].removeprefix("--root=")), sys.argv[2], sys.argv[3:]))
