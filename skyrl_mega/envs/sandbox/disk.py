"""Private in-memory file system of a session, invisible to every other process of the machine; run as a script.

Usage: `python -I -S disk.py FOLDER BYTES INODES`. The script enters a new mount namespace (and a user namespace, for a
plain user), mounts a tmpfs over FOLDER there, prints `ready`, and waits for the end of stdin. Meanwhile the parent
opens the namespaces and the folder through /proc. Both live as long as those descriptors, and vanish when the owner
dies for any reason. Standard library only.
"""

from __future__ import annotations

import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import kernel


def main(folder: str, size: str, inodes: str) -> None:
    """Mounts a temporary file system in a namespace of its own, prints `ready`, and waits until standard input ends;
    prints the error instead if mounting fails.

    Args:
        folder: Folder to mount at.
        size: Maximum size, as for tmpfs.
        inodes: Maximum number of files, folders and links.
    """
    try:
        kernel.unshare_as_any_user(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        options = f"size={size},nr_inodes={inodes},mode=700"
        kernel.mount("session", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    except OSError as error:
        print(error, flush=True)
        return
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
