"""`python -m skyrl_mega.evaluate --config FILE [group.key=value …] [--set NAME=FILE …] [--endpoint URL …]`."""

import tempfile

from skyrl_mega.cluster import driver
from skyrl_mega.evaluate import RESUME_HINT


def remove_leftover_sandboxes() -> None:
    """Removes sandbox folders of this user's dead processes from the system's temporary folder; those of running
    processes stay."""
    from skyrl_mega.envs.sandbox import folders

    folders.sweep(tempfile.gettempdir())


if __name__ == "__main__":
    driver.start(RESUME_HINT, remove_leftover_sandboxes)
    from skyrl_mega.cli.evaluate import main  # deferred: only the driver needs the imports

    driver.run(main)
