"""A test command that is run so that its end can be believed.

An exit code of 0 is no proof: a module under test may end the process, a file in the repository may take the place of
the runner or tell it to collect only. So the command gets a home and a path that the policy could not prepare, and the
runner's own list of its tests, and of those that passed, comes back beside a key used once (`witness.py`).
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import secrets
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_mega.config.errors import UserError

WITNESS = Path(__file__).with_name("witness.py")
STARTS = {
    "g?make": ("Makefile", "GNUmakefile", "*.mk"),
    "nox": ("noxfile.py",),
    "npm|npx|yarn|pnpm|bun": ("package.json",),
    "just": ("justfile",),
}
"""Tool → the files that tell it what to do. What tox and pytest read is always protected."""
NAMED = ("FAIL_TO_PASS", "PASS_TO_PASS")
"""Of a row: the tests that must pass, as SWE-bench calls them."""

PRELUDE = """\
proof=$(mktemp -d "${{TMPDIR:-/tmp}}/.proof.XXXXXX") && cat > "$proof/sitecustomize.py" <<'{end}' || exit 97
{witness}
{end}
export HOME="$proof" PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
unset PYTHONSTARTUP PYTHONHOME PYTHONINSPECT PYTHONUSERBASE PYTHONWARNINGS ENV BASH_ENV
"""
"""Before every test command."""
WITNESSED = """\
key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
printf 'proof-key %s\\n' "$key"
printf '%s' "$key" > "$proof/key"
exec 8< "$proof/key" 9>&1
rm "$proof/key"
unset key
export PYTHONPATH="$proof" SKYRL_MEGA_WITNESS={repository}
"""
"""Before one that has a witness. The key is made there, so that it is in no argument, variable or file."""


@dataclass(frozen=True)
class Verdict:
    """What the runners of one test command showed."""

    passed: int | None
    """Tests that passed; None where no runner came to its end."""
    why: str | None
    """Why that proves nothing; None where it does."""
    skipped: frozenset[str] = frozenset()
    """Where `why` is these alone: tests that were skipped or expected to fail."""


@dataclass(frozen=True)
class Run:
    """What one runner's run came to."""

    process: str
    had: int
    """Tests."""
    intact: bool
    passed: frozenset[str]
    skipped: frozenset[str]
    """Of the others, those that the runner skipped or expected to fail."""


@dataclass(frozen=True)
class Proof:
    """How one test command is run, and what shows that it passed."""

    command: str
    """For the shell."""
    mode: str
    """`runner`: a runner must prove its end; `begun`: one that begins must; `exit`: the exit code is enough."""
    names: frozenset[str] = frozenset()
    """Tests that must pass; empty: all that the runners have."""

    @classmethod
    def of(cls, test: str, mode: str, names: Collection[str] = (), untouched: bool = False) -> Proof:
        """For a task's test command.

        Args:
            test: The command.
            mode: `runner`, `exit`, or `auto`: `runner` where the command names a runner, else `begun`.
            names: Tests that must pass, as the runner names them.
            untouched: To learn what is skipped in the repository as the task has it; what fails there stops nothing.
        """
        named = re.search(r"\b(unittest|pytest|py\.test)\b", test)
        if mode == "auto":
            alone = re.search(r"python[\d.]*\s+(?:-\S+\s+)*-\w*[EIS]", test)  # it looks for no witness on a path
            mode = "exit" if alone and not names else "runner" if named else "begun"
        end = f"end-{secrets.token_hex(8)}"
        prelude = PRELUDE.format(end=end, witness=WITNESS.read_text(encoding="utf-8"))
        if mode != "exit":
            prelude += WITNESSED.format(repository="untouched" if untouched else "worked_on")
            test = re.sub(r"\bPYTHONPATH=", 'PYTHONPATH="$proof":', test)
        return cls(prelude + test, mode, frozenset(names))

    def verdict(self, output: str, known: Collection[str] = ()) -> Verdict:
        """What the runners told.

        Args:
            output: Of the command.
            known: Tests that are skipped, or expected to fail, in the untouched repository too.
        """
        begun, runs = _told(output)
        passed = sum(len(run.passed) for run in runs) if runs else None
        if self.mode == "exit" or (self.mode == "begun" and not begun):
            return Verdict(passed, None)
        if not runs or begun != {run.process for run in runs}:
            return Verdict(passed, "no runner came to its end" if not runs else "a runner did not come to its end")
        if not all(run.intact for run in runs):
            return Verdict(passed, "the runner or a test was changed while it ran")
        if self.names:
            right = {name for run in runs for name in run.passed}
            missing = sorted(name for name in self.names if right.isdisjoint(_spellings(name)))
            return Verdict(passed, f"{len(missing)} named tests did not pass: {missing[0]}" if missing else None)
        if not passed:
            return Verdict(passed, "no test passed")
        some = next((run for run in runs if run.had != len(run.passed | run.skipped)), None)
        if some is not None:
            return Verdict(passed, f"{some.had} tests, {len(some.passed)} passed")
        skipped = frozenset(name for run in runs for name in run.skipped).difference(known)
        if not skipped:
            return Verdict(passed, None)
        why = f"{len(skipped)} tests are skipped that the untouched repository does not skip: {min(skipped)}"
        return Verdict(passed, why, skipped)

    @staticmethod
    def skipped(output: str) -> frozenset[str]:
        """The tests that a run skipped or expected to fail."""
        return frozenset(name for run in _told(output)[1] for name in run.skipped)

    @staticmethod
    def shown(output: str) -> str:
        """What the command printed, without the proof."""
        return re.sub(r"\n?^proof(-key)? [0-9a-f]{32}( .*)?$\n?", "", output, flags=re.MULTILINE)


def started(test: str, mode: str) -> list[str]:
    """Patterns of the files in a repository that a test command starts, and that so decide what is tested.

    Shell scripts, and the files of the tools in `STARTS`. A program that is started otherwise (`python main.py`,
    `./main`) may be the work itself; where `mode` is `runner`, it is what starts a runner.
    Where it is `exit`, nothing, as a Makefile may be the work too.
    """
    if mode == "exit":
        return []
    names = re.findall(r"(?:^|[\s;&|(])(?:\.|source|(?:ba|da|z|k)?sh)\s+(?:-\S+\s+)*([\w./-]+)", test)
    names += re.findall(r"[\w./-]*\.(?:sh|bash)\b", test)
    if mode == "runner":
        names += re.findall(r"(?:^|[\s;&|(])python[\d.]*\s+([\w./][\w./-]*)", test)
        names += re.findall(r"(?:^|[;&|(])\s*(\.\.?/[\w./-]+)", test)
    names += [file for tool, files in STARTS.items() if re.search(rf"\b(?:{tool})\b", test) for file in files]
    plain = {re.sub(r"^(\.{0,2}/)+", "", posixpath.normpath(name)) for name in names} - {"", ".", ".."}
    return sorted(pattern for name in plain for pattern in (name, f"*/{name}"))


def _told(output: str) -> tuple[set[str], list[Run]]:
    """The processes in which a runner began, and the runs that ended.

    Only lines beside the key count; the first line that names one is printed before anything of the repository is run.
    """
    key = re.search(r"^proof-key ([0-9a-f]{32})$", output, re.MULTILINE)
    begun, runs, packed = set[str](), list[Run](), {"passed": "", "skipped": ""}
    for line in re.findall(rf"^proof {key.group(1)} (.*)$", output, re.MULTILINE) if key else ():
        what, *rest = line.split()
        if what == "began":
            begun.add(rest[0])
        elif what == "ended":
            names = {word: _unpacked(text) for word, text in packed.items()}
            runs.append(Run(rest[0], int(rest[1]), rest[2] == "intact", **names))
            packed = dict.fromkeys(packed, "")
        else:
            packed[what] += "".join(rest)
    return begun, runs


def _unpacked(text: str) -> frozenset[str]:
    return frozenset(zlib.decompress(base64.b64decode(text)).decode().split("\n") if text else ())


def _spellings(name: str) -> set[str]:
    """Of a test's name: unittest prints `test (module.Class)`, since Python 3.11 `test (module.Class.test)`."""
    match = re.fullmatch(r"(\w+) \(([\w.]+)\)", name)
    return {name, f"{match[2]}.{match[1]}", match[2]} if match else {name}


def named(known: Mapping[str, Any]) -> list[str]:
    """The tests that a row says must pass.

    Args:
        known: Its lists by `NAMED`, which SWE-bench writes as JSON text.

    Raises:
        UserError: They are something else.
    """
    names = []
    for key in NAMED:
        given = known.get(key)
        try:
            given = json.loads(given) if isinstance(given, str) else list(given if given is not None else ())
        except (ValueError, TypeError):
            given = None
        if not isinstance(given, list) or not all(isinstance(name, str) and name for name in given):
            raise UserError(f"{key}: {known[key]!r}; allowed: a list of the names of tests")
        names += given
    return names
