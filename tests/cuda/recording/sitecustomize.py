"""Starts the recorder in every process of a recorded run, because Python imports this module first; see
`tests.cuda.entered`."""

import os
from pathlib import Path

from tests.cuda.entered import FOLDER, install

if FOLDER in os.environ:
    install(Path(os.environ[FOLDER]))
