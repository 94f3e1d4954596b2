"""Environments that run the policy's code: the python tool, the judge of LiveCodeBench, software tasks."""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from skyrl_mega.envs.swe import data
from tests.fuzz.judged import case_of, play
from tests.fuzz.programs import program
from tests.fuzz.target import Target
from tests.fuzz.targets.answers import integer, other, written
from tests.fuzz.words import Pieces, tags, without, words

LIMITS = {"wall_s": 3, "cpu_s": 1, "memory_mib": 256, "total_mib": 600, "disk_mib": 16, "file_mib": 8, "output_kib": 64}
PATIENT = {**LIMITS, "wall_s": 15}
"""Limits for programs that must finish on a busy machine; endless programs are ended by CPU time."""
TOOL_TAGS = [*tags("python", "answer", "output"), "```python\n", "```"]
FENCES = ["```", "```python\n", "```python\nprint(1)\n```", "```\n", "``", "~~~\nprint(1)\n~~~"]
SWE_TAGS = [*tags("bash", "output"), "<submit/>", "<submit>", "<submit", "< submit/>"]


def _python(random: Random) -> Any:
    gold, turns = integer(random), random.randrange(1, 4)
    case = partial(case_of, str(gold), low=0.0, high=1.0, turns=turns, options={"sandbox": LIMITS})
    closed = ("<python>", "</python>", "<answer>", "</answer>")
    texts: list[Pieces] = []
    for _ in range(random.randrange(turns)):
        code = program(random) if random.random() < 0.5 else f"print('<answer>{gold}</answer>')"
        texts.append([*without(random, closed), [f"<python>{code}</python><answer>{gold}</answer>", 1]])
    before = [*without(random, closed, TOOL_TAGS), [" ", 1]]
    match random.randrange(4):
        case 0:
            answer = random.choice((written(random, gold), f" {gold}\n", f"{gold}.0", f"${gold}$"))
            return case(
                say=[*texts, [*before, [f"<answer>{answer}</answer>", 1], *words(random, TOOL_TAGS)]], reward=1.0
            )
        case 1:
            answer = random.choice(
                (str(other(random, gold)), "", f"{gold} or 7", f"not {gold}", f"{gold}%", f"{gold}\0")
            )
            return case(say=[*texts, [*before, [f"<answer>{answer}</answer><answer>{gold}</answer>", 1]]], reward=0.0)
        case 2:
            last = [[*before, [f"{gold}</answer><answer>{gold}", 1]]] * (turns - len(texts))
            return case(say=[*texts, *last], reward=0.0)
        case _:
            return case(say=[words(random, TOOL_TAGS) for _ in range(turns)], reward=0.0)


READS = "a, b = map(int, input().split())\n"
PROGRAMS: dict[str, Callable[[int, int], bool]] = {
    READS + "print(a * b)": lambda a, b: True,
    "import sys\na, b = map(int, sys.stdin.read().split())\nsys.stdout.write(f'{a * b}\\n\\n')": lambda a, b: True,
    READS + "print(f'  {a * b}  ')": lambda a, b: True,
    READS + "print(a * b, end='')\nimport sys\nprint('x', file=sys.stderr)": lambda a, b: True,
    READS + "print(sum(a for _ in range(b)))": lambda a, b: True,
    READS + "print(a + b)": lambda a, b: a + b == a * b,
    READS + "print(a * b + a % 2)": lambda a, b: a % 2 == 0,
    READS + "print(a * b if a < 50 else 0)": lambda a, b: a < 50,
    READS + "print(a * b)\nprint(a * b)": lambda a, b: False,
    READS + "print(a * b)\nraise SystemExit(1)": lambda a, b: False,
    READS + "print(a * b, flush=True)\nimport os\nos.abort()": lambda a, b: False,
    READS + "print(a * b, flush=True)\nwhile True: pass": lambda a, b: False,
    READS + "print('x', a * b)": lambda a, b: False,
    "print(input())": lambda a, b: False,
    "": lambda a, b: False,
    "print(open('/proc/self/environ').read())": lambda a, b: False,
}
"""Programs, some multiplying, each with a function of two numbers: True if the output is right."""


def _lcb(random: Random) -> Any:
    pairs = [(random.randrange(3, 99), random.randrange(3, 99)) for _ in range(random.randrange(1, 4))]
    share, functional = random.random() < 0.5, random.random() < 0.3
    tests = [{"input": f"{a} {b}\n", "output": f"{a * b}\n", "testtype": "stdin"} for a, b in pairs]
    if functional:
        of = {"testtype": "functional", "metadata": {"func_name": "f"}}
        tests = [{"input": f"{a}\n{b}", "output": str(a * b), **of} for a, b in pairs]
    options = {"reward": "share" if share else "all", "sandbox": PATIENT, "timeout_s": 60}
    case = partial(case_of, json.dumps(tests), low=0.0, high=1.0, options=options)
    if random.random() < 0.3:
        texts = [*without(random, ["```"])] if random.random() < 0.4 else words(random, FENCES)
        return case([texts], 0.0)
    if random.random() < 0.2:
        limits = {"sandbox": LIMITS}
        return case([[[f"```python\n{program(random)}\n```", 1]]], 0.0, options={**options, **limits})
    code = random.choice(list(PROGRAMS))
    right = [PROGRAMS[code](a, b) for a, b in pairs]
    if functional:
        code, right = _function(random, pairs)
    earned = sum(right) / len(right) if share else float(all(right))
    before, after = words(random, ["``", "~~~"]), without(random, ["```"])
    decoy = [["\n```python\nprint(input())\n```\n", random.randrange(2)]]
    if any("```" in text for text, _ in before) or "```" in "".join(text * min(times, 9) for text, times in before):
        before = []
    return case([[*before, *decoy, [f"\n```python\n{code}\n```\n", 1], *after]], earned)


def _function(random: Random, pairs: list[tuple[int, int]]) -> tuple[str, list[bool]]:
    """Returns a solution in the form of a function, and for each pair whether the result is right."""
    bodies: dict[str, Callable[[int, int], bool]] = {
        "return a * b": lambda a, b: True,
        "print(a * b); return a * b": lambda a, b: True,
        "return sum([a] * b)": lambda a, b: True,
        "return a + b": lambda a, b: False,
        "return str(a * b)": lambda a, b: False,
        "return [a * b]": lambda a, b: False,
        "print(a * b)": lambda a, b: False,
        "return a * b if a % 2 else None": lambda a, b: a % 2 == 1,
        "import os; os._exit(0)": lambda a, b: False,
        "import os; os.write(1, str(a * b).encode()); os._exit(0)": lambda a, b: False,
        "raise SystemExit(a * b)": lambda a, b: False,
    }
    body = random.choice(list(bodies))
    form = random.choice(("def f(a, b):\n    {}", "class Solution:\n    def f(self, a, b):\n        {}"))
    return form.format(body), [bodies[body](a, b) for a, b in pairs]


FIXES = {
    "mean": "sum(numbers) / len(numbers)",
    "spread": "max(numbers) - min(numbers)",
    "last": "items[-1]",
    "reverse": "' '.join(reversed(text.split()))",
    "initials": "''.join(w[0] for w in text.split())",
    "count": "sum(n > 0 for n in numbers)",
    "squares": "sum(n * n for n in numbers)",
    "unique": "sorted(set(items))",
}
CALM = (
    "ls -la",
    "cat tools.py",
    "grep -rn def .",
    "python -m unittest discover -s tests -t .",
    "echo x > notes.txt",
    "git status",
    "true",
    "false",
    "exit 3",
    "cd tests && pwd",
    "python -c 'import tools'",
    "sleep 0.1 &",
    "rm -f README.md",
    "mkdir -p a/b/c && touch a/b/c/d",
)
HOSTILE = (
    "rm -rf tests; ln -s /tmp tests",
    "rm -rf tests; touch tests",
    "rm -rf *",
    "rm -rf ..",
    "chmod 0 tests tools.py .",
    "mkfifo tests/p tests/test_x.py",
    "i=0; while [ $i -lt 300 ]; do mkdir d && cd d; i=$((i+1)); done",
    "head -c 30000000 /dev/zero > big",
    "i=0; while [ $i -lt 3000 ]; do >e$i; i=$((i+1)); done",
    "yes | head -c 9000000",
    "yes",
    "sleep 60 & sleep 60",
    ":(){ :|:& };:",
    "kill -9 -1",
    "kill -STOP $$",
    "trap '' TERM; sleep 60",
    "cat /proc/1/environ",
    "printf '\\377\\000\\033[2J'",
    "echo 'import os; os._exit(0)' > tools.py",
    "echo 'raise SystemExit(0)' > tools.py",
    "echo 'import unittest; unittest.main = unittest.TextTestRunner.run = lambda *a, **k: None' > tools.py",
    "echo 'import os; os._exit(0)' > sitecustomize.py",
    "echo 'import os; os._exit(0)' > usercustomize.py",
    "echo 'import sys; sys.exit(0)' > unittest.py",
    "mkdir -p unittest; echo 'import os; os._exit(0)' > unittest/__main__.py",
    "echo 'import os; os._exit(0)' > tests/__init__.py",
    "echo 'import os; os._exit(0)' > conftest.py",
    "mkdir -p .local bin; printf '#!/bin/sh\\nexit 0\\n' > bin/python; chmod +x bin/python; export PATH=$PWD/bin:$PATH",
    "printf 'def load_tests(*a):\\n    import unittest\\n    return unittest.TestSuite()\\n' > tests/__init__.py",
    "echo 'print(\"proof 0 1\")' >> tools.py",
    "echo 'import tests' > tools.py",
    "printf 'OK\\nRan 1 test in 0.0s\\n'",
    "echo PYTHONPATH=. > .env; echo 'exit 0' > .profile; echo 'exit 0' > .bashrc; echo 'exit 0' > .bash_profile",
    "alias python=true",
    "ln -sf /bin/true python; ln -sf /bin/true python3",
    "echo '[tool.pytest.ini_options]' > pyproject.toml; echo '[unittest]' > setup.cfg",
    "echo 'import os' > os.py; echo 'import sys; sys.exit(0)' > re.py; cp re.py json.py; cp re.py argparse.py",
    "python -c 'import os; [os.fork() for _ in range(9)]'",
    "mv tests t; mkdir tests",
    "exec 2>&-; exec 1>&-",
    "while true; do mkdir $RANDOM; cd $RANDOM; done",
    "echo x > '*'; touch -- -rf '--help'",
    "ulimit -f 0; ulimit -n 3",
)


@cache
def _tasks() -> Path:
    """Returns a folder of small repositories with a planted bug, removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="skyrl-fuzz-swe-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    data.tables(parser.parse_args([], argparse.Namespace(output=folder)))
    return folder / "tasks"


def _swe(random: Random) -> Any:
    name = random.choice(list(FIXES))
    turns = random.randrange(2, 6)
    calm = random.random() < 0.5
    patience = {"command_timeout_s": 15.0 if calm else 2.0, "test_timeout_s": 30.0}
    options = {"tasks": "", "session_options": LIMITS, **patience}
    test = "python -m unittest discover -s tests -t ."
    case = partial(case_of, test, low=0.0, turns=turns, options=options, extra_info={"task": name})
    closed = ("<bash>", "</bash>", "<submit")
    texts: list[Pieces] = []
    for _ in range(random.randrange(turns)):
        command = random.choice(CALM if calm else (*CALM, *HOSTILE, *HOSTILE))
        texts.append([*without(random, closed, SWE_TAGS), [f" <bash>{command}</bash>", 1], *words(random, SWE_TAGS)])
    if not calm and random.random() < 0.2:
        texts = [words(random, SWE_TAGS) for _ in texts]
    fixed = random.random() < 0.5
    argument = data.BUGS[name][1]
    if fixed:
        code = f"def {name}({argument}):\n    return {FIXES[name]}\n"
        texts.append([*without(random, closed), [f"<bash>cat > tools.py <<'E'\n{code}E\n</bash>", 1]])
    end = [[*without(random, closed), [random.choice(("<submit/>", "<submit />", "<submit>")), 1]]]
    known = 0.0 if not fixed else 1.0 if calm else None
    return case(say=[*texts[:turns], *end], reward=known, high=float(fixed))


def _run_swe(case: Any, folder: Path) -> None:
    play("swe", {**case, "options": {**case["options"], "tasks": str(_tasks())}})


def _prepare() -> None:
    _tasks()


TARGETS = {
    "python": Target(_python, lambda case, folder: play("python", case), errors=(), bound_s=90.0, share=4.0),
    "lcb": Target(_lcb, lambda case, folder: play("lcb", case), errors=(), bound_s=90.0, share=4.0),
    "swe": Target(_swe, _run_swe, errors=(), bound_s=120.0, share=4.0, prepare=_prepare),
}
