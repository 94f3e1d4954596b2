"""Every attack of `attacks.py`: as root and as a plain user with namespaces, and as a plain user without.

The table in docs/sandbox.md lists the confinements per setting; `python -m tests.envs.sandbox.test_attacks` prints the
table.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import skyrl_mega
from skyrl_mega.envs.sandbox.run import CONFINEMENTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
SYSTEM = Path("/usr/bin/python3")
DOCUMENT = Path(skyrl_mega.__file__).parents[1] / "docs" / "sandbox.md"
NEEDED = (
    "__init__.py",
    "common",
    "envs/event_loop.py",
    "envs/faults.py",
    "envs/options.py",
    "envs/sandbox",
    "envs/swe",
    "envs/tags.py",
)
NEEDED += ("config/__init__.py", "config/options.py", "config/sandboxes.py")
USER = 65534
SETTINGS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "root": (True, ()),
    "plain user": (False, ()),
    "plain user, no namespaces": (False, ("namespaces",)),
}
"""Root or not, and the disabled confinements, by name of the setting."""


class Settings:
    """All settings under attack in parallel; each in a separate process with a separate user."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        source, package = folder / "source", Path(skyrl_mega.__file__).parent
        for name in NEEDED:
            target = source / "skyrl_mega" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (package / name).is_dir():
                shutil.copytree(package / name, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(package / name, target)
        (source / "skyrl_mega" / "envs" / "__init__.py").touch()
        shutil.copytree(Path(yaml.__file__).parent, source / "yaml", ignore=shutil.ignore_patterns("*.so"))
        shutil.copytree(Path(__file__).parent, folder / "attacks", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        self.running = {name: self._start(folder, *what) for name, what in SETTINGS.items() if why_not(name) is None}

    def _start(self, folder: Path, root: bool, disabled: tuple[str, ...]) -> subprocess.Popen[str]:
        work = Path(tempfile.mkdtemp(dir=folder))
        work.chmod(0o711)
        command = [str(SYSTEM), "-I", str(folder / "attacks" / "attacks.py"), str(folder / "source"), str(work)]
        if not root and os.geteuid() == 0:
            os.chown(work, USER, USER)
            command = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", *command]
        return subprocess.Popen(
            [*command, *disabled], cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    @functools.cache  # noqa: B019  (one object for the whole module)
    def told(self, name: str) -> dict[str, Any]:
        """Returns the active confinements of a setting and the outcome of each attack."""
        output, errors = self.running[name].communicate(timeout=300)
        assert self.running[name].returncode == 0, errors[-3000:]
        results: dict[str, Any] = json.loads(output)
        return results

    def close(self) -> None:
        """Ends the running processes."""
        for process in self.running.values():
            process.kill()
            process.wait()


def why_not(name: str) -> str | None:
    """Returns the reason why this machine cannot try a setting, or None."""
    root, disabled = SETTINGS[name]
    if not SYSTEM.exists():
        return f"no {SYSTEM}, which every user may run"
    if root and os.geteuid() != 0:
        return "not root"
    as_user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"] if os.geteuid() == 0 else []
    if as_user and not root and shutil.which("setpriv") is None:
        return "no setpriv to become a plain user with"
    if not disabled:
        tried = subprocess.run([*([] if root else as_user), "unshare", *([] if root else ["-Ur"]), "-m", "true"])
        return None if tried.returncode == 0 else "no namespaces for this user"
    return None


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    folder = Path(tempfile.mkdtemp())  # pytest's folders lie in a folder closed to other users
    new_settings = Settings(folder)
    yield new_settings
    new_settings.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_attack_is_contained(settings: Settings, name: str) -> None:
    if reason := why_not(name):
        pytest.skip(reason)
    report = settings.told(name)
    broke = {
        f"{family}: {attack}": outcome
        for family, tried in report["results"].items()
        for attack, outcome in tried.items()
        if outcome != "contained"
    }
    missing = [confinement for confinement in CONFINEMENTS if confinement not in report["active"]]
    assert not broke and not missing
    # Landlock alone contains neither if the user is the trainer's; the report names this gap.
    alone = bool({"files", "processes"} & report["without_filter"].keys())
    assert alone == ("namespaces" not in SETTINGS[name][1])
    assert sum(map(len, report["results"].values())) >= 230


def test_the_document_has_the_table(settings: Settings) -> None:
    if missing := [f"{name}: {why_not(name)}" for name in SETTINGS if why_not(name)]:
        pytest.skip("; ".join(missing))
    reports = {name: settings.told(name) for name in SETTINGS}
    if "Landlock" not in reports["plain user"]["active"]["processes"]:
        pytest.skip("a kernel older than 6.12 gives other confinements")
    assert table(reports) in DOCUMENT.read_text(encoding="utf-8")


def table(told: dict[str, dict[str, Any]]) -> str:
    """Returns the table: the means of each confinement per setting, then contained attacks of tried attacks."""
    lines = [["", *told], ["---"] * (len(told) + 1)]
    for confinement in CONFINEMENTS:
        lines.append([f"`{confinement}`", *(", ".join(t["active"].get(confinement, ["–"])) for t in told.values())])
    for family in next(iter(told.values()))["results"]:
        tried = [t["results"][family] for t in told.values()]
        lines.append(
            [f"attacks: {family}", *(f"{list(t.values()).count('contained')} of {len(t)}" for t in tried)],
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        attacked = Settings(Path(place))
        print(table({name: attacked.told(name) for name in attacked.running}))
