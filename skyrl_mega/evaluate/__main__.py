"""`python -m skyrl_mega.evaluate --config FILE [group.key=value …] [--set NAME=FILE …] [--endpoint URL …]`."""

import sys

from skyrl_mega.cluster import driver
from skyrl_mega.evaluate import GOES_ON

if __name__ == "__main__":
    driver.start(GOES_ON)
    from skyrl_mega.evaluate.cli import main  # only the driver needs what it imports

    sys.exit(main())
