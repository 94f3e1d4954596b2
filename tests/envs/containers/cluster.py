"""A small API server of Kubernetes for the real `kubectl`: pods are processes in namespaces of their own.

Usage: python cluster.py PORT. Knows discovery, access reviews, network policies, and pods with `exec` by WebSocket.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import boxes  # beside this file
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

KINDS = {
    "api/v1": ("v1", {"pods": ("Pod", True), "pods/exec": ("PodExecOptions", True)}),
    "apis/authorization.k8s.io/v1": (
        "authorization.k8s.io/v1",
        {"selfsubjectaccessreviews": ("SelfSubjectAccessReview", False)},
    ),
    "apis/networking.k8s.io/v1": ("networking.k8s.io/v1", {"networkpolicies": ("NetworkPolicy", True)}),
}
VERBS = ["create", "delete", "get", "list", "patch", "watch"]
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
"""Channels of a connection to `exec`."""
pods: dict[str, dict[str, Any]] = {}
policies: dict[str, dict[str, Any]] = {}
processes: dict[str, int] = {}


def resources(path: str) -> dict[str, Any]:
    version, kinds = KINDS[path]
    listed = [
        {"name": name, "singularName": "", "namespaced": spaced, "kind": kind, "verbs": VERBS}
        for name, (kind, spaced) in kinds.items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": listed}


def groups() -> dict[str, Any]:
    found = []
    for path, (version, _) in KINDS.items():
        if path.startswith("apis/"):
            named = {"groupVersion": version, "version": "v1"}
            found.append({"name": version.split("/")[0], "versions": [named], "preferredVersion": named})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}


def schema(path: str) -> dict[str, Any]:
    """Returns the part of a schema by which the client learns that the server checks fields itself."""
    version, kinds = KINDS[path]
    group = version.split("/")[0] if "/" in version else ""
    paths = {}
    for name, (kind, _) in kinds.items():
        paths[f"/{path}/namespaces/{{namespace}}/{name}/{{name}}"] = {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "responses": {},
                "x-kubernetes-action": "patch",
                "x-kubernetes-group-version-kind": {"group": group, "version": "v1", "kind": kind},
            }
        }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1"}, "paths": paths}


async def discovery(request: Request) -> Response:
    path = request.url.path.strip("/")
    if path == "api":
        return JSONResponse({"kind": "APIVersions", "versions": ["v1"]})
    if path == "apis":
        return JSONResponse(groups())
    if path == "openapi/v3":
        return JSONResponse({"paths": {name: {"serverRelativeURL": f"/openapi/v3/{name}?hash=1"} for name in KINDS}})
    if path.startswith("openapi/v3/"):
        return JSONResponse(schema(path.removeprefix("openapi/v3/")))
    return JSONResponse(resources(path)) if path in KINDS else missing(path)


def missing(name: str) -> Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
    return JSONResponse({**body, "message": f'pods "{name}" not found', "details": {"name": name, "kind": "pods"}}, 404)


async def review(request: Request) -> Response:
    kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}  # asked for in protobuf
    return JSONResponse({**kind, "spec": {}, "status": {"allowed": True}}, 201)


async def policy(request: Request) -> Response:
    name = request.path_params.get("name")
    if request.method == "POST":
        made = await request.json()
        policies[made["metadata"]["name"]] = made
        return JSONResponse(made, 201)
    return JSONResponse(policies[name]) if name in policies else missing(str(name))


def with_status(name: str) -> dict[str, Any]:
    runs = boxes.first_process(processes[name]) is not None
    state = {"running": {}} if runs else {"terminated": {"reason": "Error", "exitCode": 137}}
    ready = {"type": "Ready", "status": "True" if runs else "False"}
    status = {"phase": "Running" if runs else "Failed", "conditions": [ready]}
    box = pods[name]["spec"]["containers"][0]["name"]
    return {**pods[name], "status": {**status, "containerStatuses": [{"name": box, "ready": runs, "state": state}]}}


async def all_pods(request: Request) -> Response:
    if request.method == "POST":
        pod = await request.json()
        name = pod["metadata"]["name"]
        pod["metadata"] |= {"uid": name, "resourceVersion": "1", "namespace": request.path_params["space"]}
        pods[name] = pod
        processes[name] = boxes.start(pod["spec"]["containers"][0]["command"])
        return JSONResponse(with_status(name), 201)
    query = request.query_params
    label, _, value = query.get("labelSelector", "").partition("=")
    wanted = query.get("fieldSelector", "").removeprefix("metadata.name=")
    found = [
        with_status(name)
        for name in pods
        if (not wanted or name == wanted) and (not label or pods[name]["metadata"]["labels"].get(label) == value)
    ]
    if query.get("watch") in ("1", "true"):

        async def events() -> AsyncIterator[bytes]:
            for pod in found:
                yield json.dumps({"type": "ADDED", "object": pod}).encode() + b"\n"
            await asyncio.sleep(float(query.get("timeoutSeconds", "30")))

        return StreamingResponse(events(), media_type="application/json")
    return JSONResponse({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": found})


async def one_pod(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in pods:
        return missing(name)
    pod = with_status(name)
    if request.method == "DELETE":
        os.kill(processes.pop(name), signal.SIGKILL)
        del pods[name]
    return JSONResponse(pod)


async def execute(socket: WebSocket) -> None:
    name, query = socket.path_params["name"], socket.query_params
    first = boxes.first_process(processes[name]) if name in processes else None
    if first is None:
        await socket.close()
        return
    await socket.accept(subprotocol="v5.channel.k8s.io")
    interactive = query.get("stdin") == "true"
    process = await asyncio.create_subprocess_exec(
        *boxes.inside(first, {}),
        *query.getlist("command"),
        stdin=asyncio.subprocess.PIPE if interactive else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )

    async def send(channel: int, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(32768):
            await socket.send_bytes(bytes([channel]) + data)

    async def receive() -> None:
        stdin = process.stdin
        while stdin is not None:
            try:
                data = await socket.receive_bytes()
            except WebSocketDisconnect:
                return
            if data[0] == STDIN:
                stdin.write(data[1:])
                await stdin.drain()
            elif data[0] == CLOSE:
                stdin.close()
                return

    assert process.stdout is not None and process.stderr is not None
    receiving = asyncio.create_task(receive())
    await asyncio.gather(send(STDOUT, process.stdout), send(STDERR, process.stderr))
    code = await process.wait()
    code = code if code >= 0 else 128 - code
    status: dict[str, Any] = {"metadata": {}, "status": "Success"}
    if code:
        causes = [{"reason": "ExitCode", "message": str(code)}]
        status = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
        status |= {"message": f"command terminated with non-zero exit code: exit status {code}"}
    await socket.send_bytes(bytes([STATUS]) + json.dumps(status).encode())
    receiving.cancel()
    await socket.close()


PODS = "/api/v1/namespaces/{space}/pods"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/{space}/networkpolicies"
app = Starlette(
    routes=[
        Route("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review, methods=["POST"]),
        Route(POLICIES, policy, methods=["POST"]),
        Route(POLICIES + "/{name}", policy, methods=["GET"]),
        Route(PODS, all_pods, methods=["GET", "POST"]),
        Route(PODS + "/{name}", one_pod, methods=["GET", "DELETE"]),
        WebSocketRoute(PODS + "/{name}/exec", execute),
        Route("/{rest:path}", discovery),
    ]
)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", loop="asyncio")
