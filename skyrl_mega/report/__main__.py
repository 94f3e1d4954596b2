"""`python -m skyrl_mega.report trajectories RUN_OR_FILE…`: what the policy wrote, as text or as a page.

`python -m skyrl_mega.report run RUN…`: how a run went, or how several compare, as a page.

`python -m skyrl_mega.report timeline RUN`: what engines, environments and policy did when, as text or as a trace.
"""

import sys

from skyrl_mega.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
