#!/usr/bin/env bash
# Set-up of the CPU environment into .venv, from nothing but Python >= 3.11 and a package index: `install.sh PYTHON`.
# pip rather than a faster installer: it alone honours the machine's own pip configuration (mirrors, find-links).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
lock=requirements/cpu.lock
pip=(.venv/bin/python -m pip --disable-pip-version-check install -qq --no-compile)

stage() { printf '%4ds  %s\n' "$SECONDS" "$1"; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "PYTHON=$python is $("$python" -V 2>&1); Python 3.11 or later is needed: make PYTHON=python3.12 …" >&2
    exit 2
}
if [[ ! -x .venv/bin/python ]]; then
    stage "new environment .venv ($("$python" -V))"
    "$python" -m venv .venv
fi

torch=$(grep '^torch==' "$lock")
if ! .venv/bin/python -c "import importlib.metadata as m, sys; sys.exit('torch==' + m.version('torch') != '$torch')" 2>/dev/null; then
    stage "$torch"
    if ! why=$("${pip[@]}" --no-deps "$torch" 2>&1); then
        stage "$torch is not where pip looks; taking it from PyTorch's CPU index"
        "${pip[@]}" --no-deps "$torch" --extra-index-url https://download.pytorch.org/whl/cpu || {
            printf '%s\n' "$why" >&2
            exit 1
        }
    fi
fi

stage "$(grep -c == "$lock") packages of $lock"
"${pip[@]}" --no-deps -r "$lock"
# Transformer Engine's Python, for tests/cuda. Beside the environment, not in it: without its compiled extension
# megatron-core cannot be imported next to it. Where no index has it those tests skip, and say so.
engine=$(grep '^transformer-engine==' requirements/cuda.lock)
if [[ ! -d .venv/rehearsal/${engine/-engine==/_engine-}.dist-info ]]; then
    stage "$engine, to rehearse CUDA with"
    rm -rf .venv/rehearsal
    "${pip[@]}" --no-deps --target .venv/rehearsal "$engine" || stage "$engine cannot be had: its tests skip"
fi
stage "skyrl_mega, editable"
"${pip[@]}" --no-deps --no-build-isolation -e .
stage "first import of everything"
.venv/bin/python requirements/verify.py
stage "ready"
