#!/usr/bin/env bash
# The whole test suite, set-up included. Two files at a time. Arguments go to pytest: `bash scripts/test.sh -m "not slow"` is the fast tier.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
setup requirements-dev.txt
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
