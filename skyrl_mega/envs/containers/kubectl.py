"""Containers as Kubernetes pods, by the command line of `kubectl`."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from skyrl_mega.common.errors import UserError
from skyrl_mega.common.safe_read import Malformed, parse_json
from skyrl_mega.envs.containers import owner, pod
from skyrl_mega.envs.containers.inside import KILL_ALL, BrokenReply, RemoteCall
from skyrl_mega.envs.containers.program import COMMAND_S, Client, refuse_missing
from skyrl_mega.envs.containers.runtime import CommandOutput
from skyrl_mega.envs.faults import InfrastructureFault
from skyrl_mega.envs.options import Option, choice, filled, mapping, number, text, texts, whole

GRACE_S = 30.0
"""Seconds for start and reply of a command, beside the command's own time."""
WAIT_S = 10
"""Seconds between two looks at a pod that does not become ready."""
WARN_S = 30.0
"""Seconds after which the reason of a late start is printed."""
SETTLE_S = 15.0
"""Seconds for the cluster to notice the end of a container."""
RIGHTS = (
    *(("create", "pods", ""), ("get", "pods", ""), ("list", "pods", ""), ("watch", "pods", "")),
    *(("delete", "pods", ""), ("create", "pods", "exec")),
)
"""Verb, resource and subresource of the needed rights."""
DELETE = ("delete", "--wait=false", "--ignore-not-found")
"""Beginning of the kubectl command that deletes pods, before the pods' names."""
ENDED = re.compile(rb"command terminated with exit code \d+\s*$")
"""End of standard error after a program that ended with another code than 0."""
NOT_STARTED = re.compile(
    rb"exec failed: .*(?:executable file .*not found|no such file or directory|permission denied|exec format error"
    rb"|resource temporarily unavailable)",
    re.IGNORECASE,
)
"""Error of a program that a running container cannot start."""


class Kubectl:
    """Kubernetes pods, a pod per container. `options` follow `OPTIONS`; options with a default may be missing."""

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        "program": text("kubectl", "path of the client"),
        "global_arguments": texts([], "arguments before the client's subcommand, such as --context=NAME"),
        "namespace": text(None, "namespace of the pods; null for the client's own"),
        "network": choice("none", "pod", doc="none: a network policy cuts the pods off; pod: the cluster's rules"),
        "memory_mib": whole(4096, "memory of a container, requested and at most; 0 for no limit", low=0),
        "cpus": number(2.0, "CPUs of a container, requested and at most; 0 for no limit", low=0, high=4096),
        "disk_gib": whole(20, "a container's own files, requested and at most; 0 for no limit", low=0),
        "lifetime_s": whole(7200, "seconds after which the cluster ends a container", low=10, high=30 * 86400),
        "node_selector": mapping("labels of the nodes for the pods"),
        "pull_secrets": texts([], "secrets with the login of a registry"),
        "pod": mapping("further fields of the pod's `spec`, such as tolerations or runtimeClassName"),
        "container": mapping("further fields of the container, such as securityContext"),
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = filled("kubectl", options, self.OPTIONS)
        space = self.options["namespace"]
        named = [f"--namespace={space}"] if space else []
        self.client = Client((self.options["program"], *self.options["global_arguments"], *named))

    @classmethod
    def check_options(cls, options: Mapping[str, Any], key: str) -> None:
        """Raises UserError for unknown or invalid options, and for fields of pod or container that the runtime sets
        itself.

        Args:
            options: Options of the runtime; options with a default may be missing.
            key: Setting that contains the options, for errors.
        """
        complete = filled(key, options, cls.OPTIONS)
        for group, reserved in (("pod", {"containers", "restartPolicy"}), ("container", {"name", "image", "command"})):
            for field in sorted(reserved & set(complete[group])):
                raise UserError("the runtime sets this field itself", key=f"{key}.{group}.{field}", fix="leave it out")

    def check(self, key: str) -> None:
        """Checks client, cluster and rights, and with `network` none creates the network policy in the cluster.

        Args:
            key: Setting that contains the options, for errors.

        Raises:
            UserError: The client is missing, the cluster does not answer, a right is missing, or the network policy
                cannot be created.
            InfrastructureFault: The client cannot be started.
        """
        refuse_missing(self.client.words[0], f"{key}.program", "install kubectl")
        for verb, resource, subresource in RIGHTS:
            words = ["auth", "can-i", verb, resource, *([f"--subresource={subresource}"] if subresource else [])]
            ran = self.client.command(words)
            if ran.stdout.strip() == b"yes":
                continue
            named = "/".join(filter(None, (resource, subresource)))
            if ran.stdout.strip() == b"no":
                raise UserError(
                    f"the user of {self.client.words[0]} may not {verb} {named}",
                    key=key,
                    fix=f"give a role with the verb {verb} of {named} in this namespace",
                )
            raise UserError(f"`{' '.join([*self.client.words, *words])}` fails: {ran.last_line()}", key=key)
        if self.options["network"] == "none":
            ran = self.client.command(["apply", "--filename=-"], stdin=json.dumps(pod.no_network()).encode())
            if ran.status != "ok":
                raise UserError(
                    f"the network policy {pod.NO_NETWORK} cannot be made: {ran.last_line()}",
                    key=f"{key}.network",
                    value="none",
                    fix=f"have somebody make it, with the right to create networkpolicies, or give {key}.network=pod",
                )

    def pull(self, image: str, timeout_s: float) -> None:
        """Does nothing: the node of a pod pulls the image."""

    def start(self, image: str, timeout_s: float) -> KubectlContainer:
        """Creates a pod for an image, waits until it is ready, including the time in which the cluster finds a node,
        and returns its container. Deletes a pod that fails; logs a warning if the pod is late.

        Raises:
            InfrastructureFault: The pod cannot be created, does not become ready in `timeout_s` seconds, or the reaper
                of pods cannot be started.
        """
        deadline = time.monotonic() + timeout_s
        listing = ["get", "pods", f"--selector={owner.LABEL}={owner.owner()}", "--output=name"]
        owner.start_reaper([*self.client.words, *listing], [*self.client.words, *DELETE])
        container = KubectlContainer(self, f"{owner.PREFIX}-{secrets.token_hex(8)}")
        labels = {owner.LABEL: owner.owner(), f"{owner.PREFIX}.host": owner.host()}
        with contextlib.ExitStack() as undo:
            undo.callback(container.remove, COMMAND_S)
            asked = json.dumps(pod.manifest(container.name, image, self.options, labels)).encode()
            ran = self.client.command(["create", "--filename=-"], min(COMMAND_S, timeout_s), stdin=asked)
            if ran.status != "ok":
                raise InfrastructureFault(f"no pod of {image} can be created: {ran.last_line()}")
            self._wait(container.name, image, deadline)
            undo.pop_all()
        return container

    def _wait(self, name: str, image: str, deadline: float) -> None:
        start, warned = time.monotonic(), False
        while True:
            left = deadline - time.monotonic()
            words = ["wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={max(1, min(WAIT_S, int(left)))}s"]
            if self.client.command(words).status == "ok":
                return
            reason, hopeless = pod.waiting_reason(self.pod(name))
            if hopeless or time.monotonic() >= deadline:
                raise InfrastructureFault(f"the pod of {image} does not start: {reason}")
            if not warned and time.monotonic() - start > WARN_S:
                logging.getLogger(__name__).warning("a pod of %s is not ready: %s", image, reason)
                warned = True

    def pod(self, name: str) -> Any:
        """Returns the state of the pod `name`, as the parsed JSON of the cluster.

        Raises:
            InfrastructureFault: There is no such pod, or the cluster does not answer.
        """
        ran = self.client.command(["get", "pod", name, "--output=json"])
        if ran.status != "ok":
            raise InfrastructureFault(f"the state of the pod {name} cannot be read: {ran.last_line()}")
        try:
            return parse_json(ran.stdout)
        except Malformed as error:
            raise InfrastructureFault(f"the pod {name}: kubectl printed no JSON: {error}") from error


class KubectlContainer:
    """A pod with a running container.

    After the container's end for too much memory or disk, `run` returns the status `failed` without an exit code. After
    any other end (a lost node, an eviction, `lifetime_s`) it raises InfrastructureFault.
    """

    def __init__(self, runtime: Kubectl, name: str) -> None:
        self.runtime, self.name = runtime, name
        self._ended: CommandOutput | None = None
        """Result of all commands after an end of the container caused by the policy."""
        self._clean = True
        """True if no process of a command can be left."""

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        *,
        stdin: bytes = b"",
        folder: str | None = None,
        variables: Mapping[str, str] | None = None,
        limit: int = 2**24,
    ) -> CommandOutput:
        """Runs a program in the container, waits for its end, and returns status, exit code and output. No process of
        the program survives.

        A program that is late has the status `timeout`; after too much output, `output`. A program that cannot be
        started has the status `failed`.

        Args:
            argv: Program and arguments; no shell is involved.
            timeout_s: Time limit in seconds, without the start and the reply (`GRACE_S` seconds more).
            stdin: Standard input.
            folder: Working folder; None for the image's own.
            variables: Environment variables, in addition to the image's.
            limit: Maximum size of standard output, and of standard error, in bytes.

        Raises:
            InfrastructureFault: The container was ended from outside, or the connection was lost.
        """
        if self._ended is not None:
            return self._ended
        call = RemoteCall(argv, timeout_s, limit, len(stdin), folder, variables)
        words, data = call.packed(stdin)
        self._clean = False
        ran = self._exec(words, timeout_s + GRACE_S, stdin=data, limit=2 * limit + 2**16, cancellable=True)
        if ran.status == "output":
            return CommandOutput("failed", None, b"", b"the reply is longer than the output limit")
        if ran.status != "ok":
            return self._explain(ran)
        try:
            reply = call.reply(ran.stdout)
        except BrokenReply as error:
            raise InfrastructureFault(f"the connection to the pod {self.name} was lost: {error}") from error
        if reply.why == "lost":
            raise InfrastructureFault(f"the pod {self.name} received only a part of the input")
        self._clean = True
        return reply.output(reply.stdout, reply.stderr)

    def end_processes(self, timeout_s: float) -> None:
        """Kills all processes in the container except process 1, within `timeout_s` seconds; sends nothing if the last
        `run` has killed them, or the container has ended through the policy's fault.

        Raises:
            InfrastructureFault: The container was ended from outside, or the client does not work.
        """
        if not self._clean and self._ended is None:
            ran = self._exec(["sh", "-c", KILL_ALL], timeout_s)
            if ran.status != "ok":
                self._explain(ran)
            self._clean = ran.status == "ok"

    def remove(self, timeout_s: float) -> None:
        """Deletes the pod, without waiting for the end of its container. Raises nothing if the pod is gone.

        Raises:
            InfrastructureFault: The cluster does not answer in `timeout_s` seconds, or refuses.
        """
        ran = self.runtime.client.command([*DELETE, f"pod/{self.name}"], timeout_s)
        if ran.status != "ok":
            raise InfrastructureFault(f"the pod {self.name} cannot be deleted: {ran.last_line()}")

    def _exec(self, words: Sequence[str], timeout_s: float, **limits: Any) -> CommandOutput:
        stdin = ["--stdin"] if limits.get("stdin") else []
        command = ["exec", *stdin, "--pod-running-timeout=5s", self.name, f"--container={pod.CONTAINER}"]
        return self.runtime.client.command([*command, "--", *words], timeout_s, **limits)

    def _explain(self, ran: CommandOutput) -> CommandOutput:
        """Returns the result of a command that gave no reply, if the policy is the cause.

        Raises:
            InfrastructureFault: The cause is outside the container.
        """
        # the shell was killed, with or without the container
        if ENDED.search(ran.stderr):
            ran = self._exec(["true"], COMMAND_S)
        if ran.status == "ok" or NOT_STARTED.search(ran.stderr):
            return CommandOutput("failed", None, b"", ran.stderr[-500:])
        deadline = time.monotonic() + SETTLE_S
        while pod.runs(state := self.runtime.pod(self.name)) and time.monotonic() < deadline:
            time.sleep(1.0)
        reason = pod.end_by_policy(state)
        if reason is None:
            raise InfrastructureFault(f"the container of the pod {self.name} is lost: {ran.last_line()}")
        self._ended = CommandOutput("failed", None, b"", reason.encode())
        return self._ended
