"""A Kubernetes pod for a container: its manifest, and the reason for its state."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

CONTAINER = "box"
"""Name of the container in the pod."""
CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"]
"""Capabilities of root in a container, as with podman."""
NETWORK_LABEL = "skyrl-mega.network"
NO_NETWORK = "skyrl-mega-no-network"
"""Name of the network policy for pods with the label `NETWORK_LABEL=none`."""
PROCESS_1 = "while :; do sleep 3600 & wait $!; done"
"""Process 1 of a container: collects ended processes, and survives the SIGKILL of its children."""
HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"})
"""Reasons for waiting that time does not change."""
PULLING = frozenset({"ErrImagePull", "ImagePullBackOff"})
"""Reasons of a failed pull, which the node repeats."""
MISSING = re.compile(r"not found|manifest unknown|does not exist|unauthorized|denied|invalid reference", re.IGNORECASE)
"""Causes of a failed pull that another try does not change."""
ABOVE_LIMIT = re.compile(r"exceed(?:s|ed) .*limit", re.IGNORECASE)
"""Cause of an eviction by the pod's own limit of disk, not by the state of the node."""


def manifest(name: str, image: str, options: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """Returns the manifest of a new pod, owned by the pod of this process if possible.

    The cluster removes a pod with its owner. The owner must be known from the environment variables `POD_NAME`,
    `POD_UID` and `POD_NAMESPACE`, and be in the namespace of the new pod; otherwise the new pod has no owner.

    Args:
        name: Name of the pod.
        image: Image of the container.
        options: Options of the runtime, with defaults filled in.
        labels: Labels of the pod.
    """
    disk = {"ephemeral-storage": f"{options['disk_gib']}Gi"} if options["disk_gib"] else {}
    memory = {"memory": f"{options['memory_mib']}Mi"} if options["memory_mib"] else {}
    limits = {**disk, **memory, **({"cpu": str(options["cpus"])} if options["cpus"] else {})}
    container = {
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", PROCESS_1],
        "resources": {"requests": limits, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "capabilities": {"drop": ["ALL"], "add": CAPABILITIES},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    spec = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": options["lifetime_s"],
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "nodeSelector": dict(options["node_selector"]),
        "imagePullSecrets": [{"name": secret} for secret in options["pull_secrets"]],
    }
    metadata: dict[str, Any] = {"name": name, "labels": {**labels, NETWORK_LABEL: options["network"]}}
    if owner := _owner_pod(options["namespace"]):
        metadata["ownerReferences"] = [owner]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {**merged(spec, options["pod"]), "containers": [merged(container, options["container"])]},
    }


def no_network() -> dict[str, Any]:
    """Returns the network policy that cuts pods with the label `NETWORK_LABEL=none` off from every network."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": NO_NETWORK, "labels": {"app.kubernetes.io/managed-by": "skyrl-mega"}},
        "spec": {"podSelector": {"matchLabels": {NETWORK_LABEL: "none"}}, "policyTypes": ["Ingress", "Egress"]},
    }


def merged(fields: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `fields` with the entries of `more`; where both have a mapping under a name, the two are merged
    in the same way, else the value of `more` counts."""
    result = dict(fields)
    for name, value in more.items():
        present = result.get(name)
        both = isinstance(value, Mapping) and isinstance(present, Mapping)
        result[name] = merged(present, value) if both else value  # type: ignore[arg-type]
    return result


def waiting_reason(pod: Any) -> tuple[str, bool]:
    """Returns the reason why a pod is not ready, and True if time does not change the reason.

    Args:
        pod: State of the pod, as the parsed JSON of the cluster.
    """
    status = _mapping(_mapping(pod).get("status"))
    phase, state = str(status.get("phase")), _mapping(_container(status).get("state"))
    waiting, ended = _mapping(state.get("waiting")), _mapping(state.get("terminated"))
    if phase in ("Failed", "Succeeded"):
        return f"{phase}: {_reason(ended or status)}", True
    if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        reason, message = str(waiting["reason"]), str(waiting.get("message"))
        missing = reason in PULLING and MISSING.search(message) is not None
        return _reason(waiting), reason in HOPELESS or missing
    for condition in status.get("conditions") or ():
        if _mapping(condition).get("type") == "PodScheduled" and condition.get("status") == "False":
            return _reason(condition), False
    return _reason(waiting) if waiting else f"phase {phase}", False


def end_by_policy(pod: Any) -> str | None:
    """Returns the reason why the processes in the container have ended the container, by too much memory or disk; None
    if the container runs, or ended for any other reason.

    Args:
        pod: State of the pod, as the parsed JSON of the cluster.
    """
    status = _mapping(_mapping(pod).get("status"))
    ended = _mapping(_mapping(_container(status).get("state")).get("terminated"))
    if ended.get("reason") == "OOMKilled":
        return "the container ended: its processes used too much memory"
    if status.get("reason") == "Evicted" and ABOVE_LIMIT.search(str(status.get("message"))):
        return "the container ended: its processes used too much disk"
    return None


def runs(pod: Any) -> bool:
    """Returns True if the container of the pod runs, as far as the cluster knows."""
    pod = _mapping(pod)
    deleted = _mapping(pod.get("metadata")).get("deletionTimestamp") is not None
    state = _mapping(_container(_mapping(pod.get("status"))).get("state"))
    return not deleted and "running" in state


def _owner_pod(namespace: str | None) -> dict[str, Any] | None:
    """Returns the reference to the pod of this process, at whose end the cluster removes the pods; None outside of a
    pod that gives name, uid and namespace in environment variables."""
    name, uid, own = (os.environ.get(variable) for variable in ("POD_NAME", "POD_UID", "POD_NAMESPACE"))
    if not (name and uid and own) or own != (namespace or own):  # the owner must be in the same namespace
        return None
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid, "blockOwnerDeletion": False}


def _container(status: Mapping[str, Any]) -> Mapping[str, Any]:
    statuses = status.get("containerStatuses") or [{}]
    return next((found for found in statuses if _mapping(found).get("name") == CONTAINER), {})


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _reason(fields: Mapping[str, Any]) -> str:
    parts = [str(fields[name]) for name in ("reason", "message") if fields.get(name)]
    return ": ".join(parts)[:500] or "no reason given"
