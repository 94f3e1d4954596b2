"""The check of answers without the project: a copy of the folder under another name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from skyrl_mega.envs.math import check

PROGRAM = r"""
import sys
from mathcheck.answer import extract
from mathcheck.check import same

gold = r"\sqrt{8}"
print(same(gold, extract(r"So \boxed{2\sqrt{2}}.", "either"), 60.0), same(gold, "2.83", 60.0))
print([name for name in sys.modules if name.startswith("skyrl_mega")])
"""


def test_a_copy_of_the_folder_works_under_another_name(tmp_path: Path) -> None:
    folder = Path(check.__file__).parent
    shutil.copytree(folder, tmp_path / "mathcheck", ignore=shutil.ignore_patterns("env.py", "data.py", "__pycache__"))
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.stdout.splitlines() == ["True False", "[]"], ran.stderr
