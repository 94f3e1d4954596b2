"""A test command that is run so that its end can be believed.

An exit code of 0 is no proof: a module under test may end the process, a file in the repository may take the place of
the runner or tell it to collect only. So the command gets a home and a path that the policy could not prepare, and the
runner's own count of passed tests comes back beside a number used once (`witness.py`).
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path

WITNESS = Path(__file__).with_name("witness.py")
RUNNERS = ("unittest", "pytest")

PRELUDE = """\
proof=$(mktemp -d "${{TMPDIR:-/tmp}}/.proof.XXXXXX") && cat > "$proof/sitecustomize.py" <<'{end}' || exit 97
{witness}
{end}
exec 9>&1
export HOME="$proof" PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
unset PYTHONSTARTUP PYTHONHOME PYTHONINSPECT PYTHONUSERBASE PYTHONWARNINGS ENV BASH_ENV
"""
"""Before every test command."""
WITNESSED = """\
export PYTHONPATH="$proof" SKYRL_MEGA_PROOF={nonce} SKYRL_MEGA_RUNNERS={runners} {options}
"""


@dataclass(frozen=True)
class Proof:
    """How one test command is run, and what shows that it passed."""

    command: str
    """For the shell."""
    nonce: str | None
    """None where the exit code is all that there is."""

    @classmethod
    def of(cls, test: str, mode: str) -> Proof:
        """For a task's test command.

        Args:
            test: The command.
            mode: `runner`: a runner must prove its end; `exit`: the exit code is enough; `auto`: a runner must where
                the command names one of `RUNNERS`.
        """
        alone = re.search(r"python[\d.]*\s+(?:-\S+\s+)*-\w*[EIS]", test)  # it looks for no proof on a path
        named = [runner for runner in RUNNERS if re.search(rf"\b{runner}\b|\bpy\.test\b", test)]
        nonce = secrets.token_hex(16) if mode == "runner" or (mode == "auto" and named and not alone) else None
        end = f"end-{secrets.token_hex(8)}"
        prelude = PRELUDE.format(end=end, witness=WITNESS.read_text(encoding="utf-8"))
        if nonce is not None:
            runners = named or list(RUNNERS)
            options = 'PYTEST_ADDOPTS="-p sitecustomize"' if "pytest" in runners else ""
            prelude += WITNESSED.format(nonce=nonce, runners=",".join(runners), options=options)
            test = re.sub(r"\bPYTHONPATH=", 'PYTHONPATH="$proof":', test)
        return cls(prelude + test, nonce)

    def passed(self, output: str) -> int | None:
        """Tests that passed, as the runner told; None where it told nothing."""
        match = self.nonce and re.search(rf"^proof {self.nonce} (\d+)$", output, re.MULTILINE)
        return int(match.group(1)) if match else None

    def shown(self, output: str) -> str:
        """What the command printed, without the proof."""
        return re.sub(rf"\n?^proof {self.nonce} \d+$\n?", "", output, flags=re.MULTILINE) if self.nonce else output
