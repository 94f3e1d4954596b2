"""A real vLLM server on the CPU, in a process of its own, as a user starts one outside of a run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.conftest import ROOT

START_S = 600.0
"""Seconds until a server must answer."""
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
PLUGIN = (
    *("--worker-extension-cls", "skyrl_mega.engines.vllm.transfer.WorkerExtension"),
    *("--weight-transfer-config", '{"backend": "skyrl_mega"}'),
)
"""Options of docs/endpoints.md for a server with the plug-in."""


@contextmanager
def vllm_server(model: Path, log: Path, *options: str, plugin: bool = True, longest: int = 64) -> Iterator[str]:
    """Yields the address of a server of a model, which ends with the block. The CPU build of vLLM is installed under
    another name than `vllm serve` asks for, so its module is started.

    Args:
        model: Hugging Face directory.
        log: File for the server's output.
        options: Further options of the server.
        plugin: True for a server with this project's plug-in.
        longest: Maximum length of a sequence.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(longest)),
        *("--max-num-seqs", "64", "--max-num-batched-tokens", "4096", "--no-enable-chunked-prefill"),
        *("--enforce-eager", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
        *("--kv-cache-memory-bytes", str(2**26), "--enable-scale-out", "--stream-interval", "4"),
        *(PLUGIN if plugin else ()),
        *options,
    ]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    environment["VLLM_PLUGINS"] = "skyrl_mega" if plugin else "none"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until = time.monotonic() + START_S
        while True:
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            try:
                if httpx.get(f"{url}/health", trust_env=False, timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
