#!/usr/bin/env bash
# Run the tests that need a CUDA build of torch and its Triton, but no GPU: tests/cuda_build.
#   bash scripts/test_cuda_build.sh [further arguments for pytest]
# Makes .cuda-venv first and installs the requirements with torch 2.11 into it: 5 to 15 minutes, 7 GB.
# VENV=/path/to/a/venv takes that one as it is and installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=${VENV:-.cuda-venv}
torch=2.11.0

if [ -z "${VENV:-}" ]; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "longhaul needs Python >= 3.11, and '$python' is older or missing: set PYTHON=/path/to/python3.11" >&2
        exit 2
    fi
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

    stamp=$venv/.installed
    wanted=$torch-$(cksum < requirements.txt)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing requirements.txt with the CUDA build of torch $torch into $venv: 5 to 15 minutes, 7 GB"
        "$venv/bin/python" -m pip install --disable-pip-version-check -r requirements.txt "torch==$torch" \
            | { grep -E '^(Collecting|Installing)' || true; }
        echo "$wanted" > "$stamp"
    fi
fi

"$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || {
    echo "the torch of $venv is missing or no CUDA build: unset VENV, or install torch==$torch from pypi.org into it" >&2
    exit 2
}
"$venv/bin/python" -c 'import torch; print("torch", torch.__version__, "with CUDA", torch.version.cuda)'

# 0: the compiler, not the interpreter that tests without a GPU use otherwise
exec env TRITON_INTERPRET=0 "$venv/bin/python" -m pytest -q --no-header tests/cuda_build "$@"
