"""Checks of containers that every remote runtime passes."""

from __future__ import annotations

from skyrl_mega.envs.containers.runtime import Container

ALL_COMMANDS = ["sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null || true"]


def check_programs(box: Container, home: str) -> None:
    """Checks that programs get input, folder and variables, that their output comes back whole, and that they are ended
    at their limits; `home` is the folder of a program that asks for none."""
    data = bytes(range(256)) * 10_000
    words = ["sh", "-c", "cat; pwd >&2; echo $A $OF_THE_IMAGE >&2; exit 3"]
    ran = box.run(words, 60, stdin=data, variables={"A": "'b"})
    assert (ran.status, ran.exit, ran.stderr) == ("failed", 3, f"{home}\n'b kept\n".encode())
    assert ran.stdout == data
    assert box.run(["pwd"], 20, folder="/usr/bin").stdout == b"/usr/bin\n"
    assert box.run(["pwd"], 20, folder="/nowhere").exit == 126
    late = box.run(["sh", "-c", "setsid sleep 98765432 & sleep 98765432"], 1)
    assert (late.status, late.exit) == ("timeout", None)
    assert box.run(["yes"], 20, limit=1001).status == "output"
    assert box.run(["seq", "1000"], 20, limit=10).status == "output"
    assert b"98765432" not in box.run(ALL_COMMANDS, 20).stdout


def check_killed_shell(box: Container) -> None:
    """Checks that the policy fails if it kills the shell of its own program, and that the container goes on."""
    ran = box.run(["sh", "-c", "kill -9 $PPID; sleep 98765432"], 20)
    assert (ran.status, ran.exit) == ("failed", None)
    box.end_processes(20)
    assert b"98765432" not in box.run(ALL_COMMANDS, 20).stdout
