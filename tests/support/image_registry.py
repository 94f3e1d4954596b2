"""A registry of images on loopback, with a single image that has a single layer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

MANIFEST, CONFIG, LAYER = (
    f"application/vnd.oci.image.{name}" for name in ("manifest.v1+json", "config.v1+json", "layer.v1.tar")
)
"""Types of the documents of the OCI image format."""


def described(kind: str, data: bytes) -> dict[str, str | int]:
    """Returns the descriptor of a document."""
    return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}


@contextmanager
def image_registry(layer: bytes, failures: int = 0) -> Iterator[tuple[int, list[str]]]:
    """Serves an image `one:1` with a tar archive as its root folder; yields the port, and the list of asked paths.

    Args:
        layer: The tar archive.
        failures: Number of first requests for the image that are answered with status 503.
    """
    layers = {"type": "layers", "diff_ids": [described(LAYER, layer)["digest"]]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": layers}).encode()
    parts = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described(CONFIG, config)}
    manifest = json.dumps({**parts, "layers": [described(LAYER, layer)]}).encode()
    documents = {f"blobs/{described('', data)['digest']}": data for data in (config, layer)}
    documents |= dict.fromkeys(("manifests/1", f"manifests/{described('', manifest)['digest']}"), manifest)
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            data = documents.get(self.path.removeprefix("/v2/one/"))
            status = 200 if data is not None or self.path == "/v2/" else 404
            if "/v2/one/" in self.path and sum("/v2/one/" in path for path in asked) <= failures:
                status, data = 503, None
            body = data if data is not None else b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}'
            self.send_response(status)
            self.send_header("Content-Type", MANIFEST if "manifests" in self.path else "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, asked
        server.shutdown()
