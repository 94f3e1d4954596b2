"""`python -m skyrl_mega.evaluate --config FILE [group.key=value …] [--set NAME=FILE …] [--endpoint URL …]`."""

import tempfile

from skyrl_mega.cluster import driver
from skyrl_mega.evaluate import GOES_ON


def sandboxes_left() -> None:
    """Removes sandbox folders left by a killed driver."""
    from skyrl_mega.envs.sandbox import folders

    folders.sweep(tempfile.gettempdir())


if __name__ == "__main__":
    driver.start(GOES_ON, sandboxes_left)
    from skyrl_mega.cli.evaluate import main  # deferred: only the driver needs the imports

    driver.run(main)
