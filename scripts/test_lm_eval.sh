#!/usr/bin/env bash
# Run the tests that compare scripts.lm_eval with lm-evaluation-harness's own model, HFLM.
#   bash scripts/test_lm_eval.sh [further arguments for pytest]
# Installs lm_eval and accelerate into .venv/lm_eval first, next to the packages of .venv: 1 to 3
# minutes, 45 packages, 0.45 GB. No other test sees them; without them these tests skip.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
setup requirements-dev.txt

venv=.venv/lm_eval
packages=("lm_eval>=0.4.13" "accelerate>=1.0")
packages_of='import sysconfig; print(sysconfig.get_path("purelib"))'

if [ ! -x "$venv/bin/python" ]; then
    python -m venv "$venv"
    python -c "$packages_of" > "$("$venv/bin/python" -c "$packages_of")/venv.pth"
fi

stamp=$venv/.installed
wanted=${packages[*]}
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing $wanted into $venv: 1 to 3 minutes"
    "$venv/bin/python" -m pip install --disable-pip-version-check "${packages[@]}" \
        | { grep -E '^(Collecting|Installing)' || true; }
    echo "$wanted" > "$stamp"
fi

exec "$venv/bin/python" -m pytest -q --no-header tests/test_lm_eval.py "$@"
