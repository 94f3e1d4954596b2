"""`python -m skyrl_mega.report trajectories RUN_OR_FILE…`: the policy's trajectories, as text or as a page.

`python -m skyrl_mega.report run RUN…`: the course of a run, or a comparison of several, as a page.

`python -m skyrl_mega.report timeline RUN`: the activity of engines, environments and policy over time, as text or as a
trace.
"""

import sys

from skyrl_mega.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
