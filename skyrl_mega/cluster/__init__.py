"""Ray clusters: start or connect, placement, and groups of actors with a time limit for every call."""

import os

# A private cluster must listen on the loopback interface only. Ray replaces 127.0.0.1 by the host's address unless this
# variable, set before the import of Ray, says that the machine is not part of a cluster.
if not os.environ.get("RAY_ADDRESS"):
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

# Without this, any Ray call outside `session` would start another cluster, on all interfaces.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
