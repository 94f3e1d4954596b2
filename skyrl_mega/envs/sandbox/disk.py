"""A file system of a session's own, in memory, that no other process of the machine sees: a script and no more.

Run as `python -I -S disk.py FOLDER BYTES INODES`. It enters a mount namespace of its own (and a user namespace, for a
plain user), mounts a tmpfs over FOLDER there, prints `ready`, and waits until its stdin ends. Meanwhile who started it
opens the namespaces and the folder in /proc: they live as long as those descriptors and vanish with their owner,
however that one dies. Standard library only.
"""

from __future__ import annotations

import os
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import kernel


def main(folder: str, size: str, inodes: str) -> None:
    """Says `ready`, or why not."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        if uid == 0:
            kernel.unshare(kernel.CLONE_NEWNS)
        else:
            kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWUSER)
            kernel.map_own_user(kernel.INSIDE_UID, uid, gid)
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
