#!/usr/bin/env bash
# Run the tests. Installs what they need into .venv first.
#   bash scripts/test.sh           the fast tests
#   bash scripts/test.sh --all     every test, as CI runs them
# Further arguments go to pytest: bash scripts/test.sh --all tests/test_model.py -k rotary
# SLOW_UNTIL=SECONDS (since 1970) skips slow tests that would begin later, and says so.
# WORKERS=4 runs four test files at a time instead of three, of which one often only waits.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
setup requirements-dev.txt

tier=(-m "not slow")
if [ "${1:-}" = --all ]; then
    tier=()
    shift
fi
# If a test ends its worker, the run ends and names it: pytest-xdist 3.8 would give the files that the
# worker has had to the others again, and wait for ever.
# Hundreds of processes are started: each would compile longhaul again, 0.4 s of CPU time.
unset PYTHONDONTWRITEBYTECODE
exec python -m pytest -p tests.progress -q --no-header \
    -n "${WORKERS:-3}" --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "${tier[@]}" "$@"
