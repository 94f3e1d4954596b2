"""`python -m skyrl_mega.launch --config FILE [group.key=value …] [--dry-run] [--json]`."""

import sys

from skyrl_mega.cluster import driver
from skyrl_mega.launch import GOES_ON

if __name__ == "__main__":
    driver.start(GOES_ON)
    from skyrl_mega.launch.cli import main  # only the driver needs what it imports

    sys.exit(main())
