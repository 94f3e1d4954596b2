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
import os
import sys
import time


def read(path: str) -> str:
    with open(path) as file:
        return file.read()


def write(path: str, text: str, mode: str = "w") -> None:
    with open(path, mode) as file:
        file.write(text)


def prepared(path: str) -> dict | None:
    """Takes the next prepared answer of a subcommand."""
    answers = json.loads(read(path)) if os.path.exists(path) else []
    if answers:
        write(path, json.dumps(answers[1:]))
        return answers[0]
    return None


def value(words: list[str], name: str) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")


def main(folder: str, subcommand: str, words: list[str]) -> int:
    write(f"{folder}/log", json.dumps([subcommand, *words]) + "\n", "a")
    answer = prepared(f"{folder}/answers/{subcommand}")
    if answer is not None:
        time.sleep(answer.get("seconds", 0))
        sys.stdout.write(answer.get("stdout", ""))
        sys.stderr.write(answer.get("stderr", ""))
        if answer.get("exit") is not None:
            return answer["exit"]
    containers = f"{folder}/containers"
    for name in (containers, f"{folder}/images"):
        os.makedirs(name, exist_ok=True)
    if subcommand == "info":
        print("{}")
    elif subcommand == "run":
        write(f"{containers}/{value(words, '--name')}", "true false 0")
        write(f"{containers}/.{value(words, '--name')}", value(words, "--label"))
    elif subcommand == "ps":
        label = words[words.index("--filter") + 1].removeprefix("label=")
        for name in os.listdir(containers):
            if name.startswith(".") and read(f"{containers}/{name}").startswith(label):
                print(name[1:])
    elif subcommand == "rm":
        for name in words:
            for path in (f"{containers}/{name}", f"{containers}/.{name}"):
                if os.path.exists(path):
                    os.unlink(path)
    elif subcommand in ("container", "exec"):
        return in_container(containers, subcommand, words)
    elif subcommand in ("image", "pull", "rmi"):
        return image(f"{folder}/images/{words[-1].replace('/', '%')}", subcommand)
    return 0


def in_container(containers: str, subcommand: str, words: list[str]) -> int:
    if words[0] == "prune":
        return 0
    place = next(number for number, word in enumerate(words) if word.startswith("skyrl-mega-"))
    path = f"{containers}/{words[place]}"
    if not os.path.exists(path):
        sys.stderr.write(f"Error: no such container {words[place]}\n")
        return 125
    if subcommand == "container":
        print(read(path))
        return 0
    if not read(path).startswith("true"):
        sys.stderr.write("Error: can only create exec sessions on running containers: container state improper\n")
        return 255
    if words[-1] == "kill -9 -1":  # never run here: it would kill all processes of this machine
        return 0
    os.execvp(words[place + 1], words[place + 1 :])


def image(path: str, subcommand: str) -> int:
    if subcommand == "pull":
        write(path, f"id-{os.path.basename(path)} 1000")
    elif not os.path.exists(path):
        sys.stderr.write("Error: no such image\n")
        return 125
    elif subcommand == "rmi":
        os.unlink(path)
    else:
        print(read(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].removeprefix("--root="), sys.argv[2], sys.argv[3:]))
