"""Python runs this first in every process of a recorded run; see `tests.cuda.entered`."""

import os
from pathlib import Path

from tests.cuda.entered import FOLDER, install

if FOLDER in os.environ:
    install(Path(os.environ[FOLDER]))
