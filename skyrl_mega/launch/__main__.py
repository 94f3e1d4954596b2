"""`python -m skyrl_mega.launch --config FILE [group.key=value …] [--dry-run] [--json]`."""

import signal
import sys
import tempfile

from skyrl_mega.cluster import driver
from skyrl_mega.launch import GOES_ON


def sandboxes_left() -> None:
    """Removes the folders of sandboxed programs left by a killed driver in the system's temporary folder; folders of
    running processes stay."""
    from skyrl_mega.envs.sandbox import folders

    folders.sweep(tempfile.gettempdir())


if __name__ == "__main__":
    if any(word.partition("=")[0] == "--suggest" for word in sys.argv[1:]):
        # A search starts no process to supervise, and is ended by Ctrl-C itself (`cli.suggest_progress`).
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from skyrl_mega.cluster import user

        user.set_user_variables()
    else:
        driver.start(GOES_ON, sandboxes_left)
    from skyrl_mega.cli.train import main  # slow to import, and needed only in the driver

    driver.run(main)
