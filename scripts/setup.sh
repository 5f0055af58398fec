# Sourced by the other scripts. `setup FILE` makes .venv (or $VENV), installs the requirements FILE into it once, and
# activates it.
setup() {
    local python=${PYTHON:-python3} requirements=$1 venv=${VENV:-.venv}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "longhaul needs Python >= 3.11, and '$python' is older or missing: install it, or set PYTHON=/path/to/python3.11" >&2
        exit 2
    fi
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

    # The stamp says which requirements are installed.
    local stamp wanted
    stamp=$venv/.installed-$(basename "$requirements")
    wanted=$(cat requirements*.txt | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing $requirements into $venv: 1 to 5 minutes, mostly for torch"
        "$venv/bin/python" -m pip install --disable-pip-version-check -r "$requirements" \
            | { grep -E '^(Collecting|Installing)' || true; }
        echo "$wanted" > "$stamp"
    fi

    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}
