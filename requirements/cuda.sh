#!/usr/bin/env bash
# Set-up of the CUDA environment, on a machine with or without a GPU: `cuda.sh PYTHON FOLDER` makes FOLDER a virtual
# environment of requirements/cuda.lock, with Transformer Engine's extension for torch compiled. It can be run again
# after a failure: what is there is kept. `make cuda` runs it for .venv-cuda, docker/Dockerfile for /opt/venv.
#
# Needed: Python 3.12 with its headers, g++, a CUDA 13 toolkit (CUDA_HOME; else where nvcc is, else /usr/local/cuda),
# 10 GB. MAX_JOBS bounds the compiler's processes, which take up to 3 GB each.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
venv=$2
lock=requirements/cuda.lock
extension=$(grep '^transformer-engine-torch==' "$lock")
pip=("$venv/bin/python" -m pip --disable-pip-version-check install -qq --no-deps)

stage() { printf '%4ds  %s\n' "$SECONDS" "$1"; }
stop() {
    printf '%s\n' "$1" >&2
    exit 2
}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1) ||
    stop "no Python 3.12 at '$python': make cuda PYTHON_CUDA=/path/to/python3.12"
[[ $version == 3.12 ]] ||
    stop "$lock is for Python 3.12, '$python' is $version: make cuda PYTHON_CUDA=/path/to/python3.12"
if [[ -z ${CUDA_HOME:-} ]]; then
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    # nvcc itself says where it is: what the path has may be a script that calls it.
    CUDA_HOME=$(readlink -f "$("$nvcc" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')" || true)
fi
[[ -x $CUDA_HOME/bin/nvcc ]] ||
    stop "no CUDA toolkit at '$CUDA_HOME' (bin/nvcc): CUDA_HOME=/path/to/cuda-13.0 make cuda"
release=$("$CUDA_HOME/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
[[ $release == 13.* ]] ||
    stop "$lock is for CUDA 13, the toolkit at '$CUDA_HOME' is $release: set CUDA_HOME to one of CUDA 13"

if [[ ! -x $venv/bin/python ]]; then
    stage "new environment $venv ($("$python" -V))"
    "$python" -m venv "$venv"
fi
stage "$(grep -c == "$lock") packages of $lock, all but $extension"
# Byte-compiled here, as processes start from a file system that they may not write to.
"${pip[@]}" -r <(grep -v '^transformer-engine-torch==' "$lock")
torch=$("$venv/bin/python" -c 'import torch; print(torch.__version__, torch.version.cuda)')
[[ $torch != *None ]] || stop "pip took a torch without CUDA (${torch% *}) from its find-links or index"

made=$venv/.extension # what it was compiled for
wanted="$extension $torch"
if [[ -e $made && $(<"$made") == "$wanted" ]]; then
    stage "$extension is there"
else
    stage "compiling $extension (CUDA toolkit $release, ${MAX_JOBS:=2} jobs)"
    wheels=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    # The libraries' headers are those of the wheels that torch loads, never the machine's. NCCL's expert-parallel part
    # would be compiled against the machine's NCCL, and nothing here uses it. A wheel in pip's cache may be one that was
    # compiled for another torch.
    CUDA_HOME=$CUDA_HOME CUDNN_PATH=$wheels/cudnn CPATH=$(printf '%s:' "$wheels"/*/include)${CPATH:-} \
        NVTE_FRAMEWORK=pytorch NVTE_WITH_NCCL_EP=0 MAX_JOBS=$MAX_JOBS \
        "${pip[@]}" --no-build-isolation --no-cache-dir --force-reinstall "$extension"
    echo "$wanted" >"$made"
fi
if [[ -f pyproject.toml ]]; then
    stage "skyrl_mega, editable"
    "${pip[@]}" --no-build-isolation -e .
fi
stage "first import of everything"
"$venv/bin/python" -c 'import megatron.core, ray, torch, transformer_engine.pytorch, transformers'
stage "ready"
