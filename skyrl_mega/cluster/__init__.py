"""Ray: start or connect, placement, groups of actors with bounded calls."""

import os

# A private cluster listens on the loopback interface alone. Ray replaces 127.0.0.1 by the host's address unless it is
# told, before its import, that this machine is no part of a cluster.
if not os.environ.get("RAY_ADDRESS"):
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

# Ray would start a cluster of its own, on all interfaces, for whoever calls it outside `session`.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
