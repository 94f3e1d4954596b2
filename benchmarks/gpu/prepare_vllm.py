"""`--prepare-vllm FOLDER`, on a machine with a network: packs vLLM for CUDA and the packages missing on a GPU machine
into one archive, small enough to carry in a call of its own."""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.fatbin import Entry, hopper, shrink, smallest_foreign
from benchmarks.gpu.prepare import WORK, download, files_of, locked, say_sizes

VLLM, SITE, SCRIPT = "vllm", "site.tar.xz", "install.sh"
PACKAGES = (
    *("annotated-types", "anthropic", "apache-tvm-ffi", "astor", "blake3", "cachetools", "cbor2", "compressed-tensors"),
    *("depyf", "dill", "distro", "docstring-parser", "fastapi", "gguf", "httpcore2", "httptools", "httpx2", "ijson"),
    *("importlib-metadata", "interegular", "jiter", "jsonschema", "jsonschema-specifications", "lark", "llguidance"),
    *("lm-format-enforcer", "loguru", "mcp", "mcp-types", "mistral-common", "model-hosting-container-standards"),
    *("msgspec", "openai", "opentelemetry-api", "opentelemetry-exporter-otlp", "opentelemetry-sdk"),
    *("opentelemetry-semantic-conventions", "opentelemetry-semantic-conventions-ai", "oss-harmony", "outlines-core"),
    *("partial-json-parser", "prometheus-fastapi-instrumentator", "pybase64", "pycountry", "pydantic", "pydantic-core"),
    *("pydantic-extra-types", "pydantic-settings", "python-dotenv", "python-json-logger", "pyzmq", "referencing"),
    *("rpds-py", "setproctitle", "sniffio", "starlette", "truststore", "typing-inspection", "uvicorn", "watchfiles"),
    "xgrammar",
)
"""Packages imported by an engine and missing on the GPU machine."""
LEFT_OUT = (
    *("vllm/benchmarks/", "vllm/entrypoints/serve/instrumentator/static/", "vllm/vllm-rs"),
    *("vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/third_party/tml_fa4/"),
    *("vllm/_deepselect_C.", "vllm/_flashkda_C.", "vllm/_flashmla_C.", "vllm/_flashmla_extension_C."),
    *("vllm/_qutlass_C.", "vllm/vllm_flash_attn/_vllm_fa2_C."),
    "pycountry/locales/",
)
"""Beginnings of the files left out: no proof uses these kernels, servers and texts."""
EXTENSIONS = ("vllm/_C_stable_libtorch.", "vllm/_moe_C_stable_libtorch.")
ATTENTION = "vllm/vllm_flash_attn/_vllm_fa3_C."
MAIN_LOOP, OUR_MAIN_LOOP = b"Mainloop", b"ILi64EEEEEELi64ENS_10bfloat16_tEf"
"""Parts of kernel names in FlashAttention 3: any attention kernel, and those for head dimension 64 in bfloat16."""
PRESET = 4
"""Level of compression: 41 MiB in about two minutes. Most bytes are zeros in place of device code."""
INSTALL = """#!/bin/bash
# Unpacks vLLM {version} and the packages missing on the GPU machine into a folder for PYTHONPATH ({identity}).
set -e
here=$(cd "$(dirname "$0")" && pwd)
site=${{1:-/tmp/vllm-site}}
mkdir -p "$site"
python3 - "$here/{archive}" "$site" <<'END'
import sys, tarfile
with tarfile.open(sys.argv[1], "r:xz") as archive:
    archive.extractall(sys.argv[2], filter="data")
END
# Byte code for all processes of an engine. Files for other versions of Python do not compile, and are not imported.
python3 -m compileall -q -j 0 "$site" >/dev/null 2>&1 || true
"""


def prepare_vllm(folder: Path, say: Callable[[str], None]) -> None:
    """Writes the archive and its script, unless both are there for these versions, and prints the size of each file.

    Raises:
        UserError: pip cannot fetch a package.
    """
    versions = locked()
    wanted = {name: versions[name] for name in (VLLM, *PACKAGES)}
    identity = hashlib.sha256(repr(wanted).encode()).hexdigest()[:12]
    text = INSTALL.format(version=versions[VLLM], identity=identity, archive=SITE)
    script, archive = folder / SCRIPT, folder / SITE
    if not (archive.exists() and script.exists() and script.read_text() == text):
        folder.mkdir(parents=True, exist_ok=True)
        script.unlink(missing_ok=True)  # written last: its presence says that the archive is whole
        wheels = _wheels(wanted, say)
        say(f"packing {len(wheels)} packages, with sm_90 code only (about two minutes)")
        _pack(wheels, archive)
        script.write_text(text)
        script.chmod(0o755)
    say_sizes(folder, say)


def _wheels(wanted: dict[str, str], say: Callable[[str], None]) -> list[Path]:
    """Returns the wheel of each package, downloaded if missing in the work folder."""
    work = WORK / "vllm"
    work.mkdir(parents=True, exist_ok=True)
    missing = [name for name in wanted if not files_of(work, name, wanted[name])]
    if missing:
        say(f"downloading {', '.join(missing)}")
        download(work, [f"{name}=={wanted[name]}" for name in missing])
    return [files_of(work, name, version)[0] for name, version in wanted.items()]


def _pack(wheels: list[Path], archive: Path) -> None:
    """Writes the wheels' files, except those left out, into an archive."""
    new = archive.with_name(f".{archive.name}")
    opened = [zipfile.ZipFile(wheel) for wheel in wheels]
    try:
        found = {place(name): (wheel, name) for wheel in opened for name in wheel.namelist()}
        found.pop("", None)
        spare = _spare(found)
        with lzma.open(new, "wb", preset=PRESET) as stream, tarfile.open(fileobj=stream, mode="w") as packed:
            for target, (wheel, name) in sorted(found.items()):
                data = reduced(target, wheel.read(name), spare)
                member = tarfile.TarInfo(target)
                member.size = len(data)
                packed.addfile(member, io.BytesIO(data))
    finally:
        for wheel in opened:
            wheel.close()
    new.replace(archive)


def place(name: str) -> str:
    """Returns the place of a wheel's file in the folder of packages; empty if the file is left out."""
    inside = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", name)
    unused = inside.endswith(("/", ".pyi")) or re.match(r"[^/]+\.data/", inside) or inside.startswith(LEFT_OUT)
    return "" if unused else inside


def _spare(found: dict[str, tuple[zipfile.ZipFile, str]]) -> bytes:
    """Returns the smallest machine code for another GPU in vLLM's extensions, the replacement of unused code.

    CUDA refuses an empty fat binary, but accepts code for another GPU as long as no kernel of this code is called.
    """
    objects = [wheel.read(name) for target, (wheel, name) in found.items() if target.startswith(EXTENSIONS)]
    return min(filter(None, map(smallest_foreign, objects)), key=len, default=b"")


def reduced(target: str, data: bytes, spare: bytes) -> bytes:
    """Returns a file with the device code that the proofs use; unused fat binaries contain the spare code only."""
    if target.startswith(EXTENSIONS):
        return shrink(data, lambda entries: hopper(entries) or spare)
    if target.startswith(ATTENTION):
        return shrink(data, lambda entries: _attention(entries) or spare)
    return data


def _attention(entries: list[Entry]) -> bytes:
    """Returns FlashAttention's kernels for the proofs' model, and kernels around an attention kernel."""
    code = hopper(entries)
    return code if MAIN_LOOP not in code or OUR_MAIN_LOOP in code else b""
