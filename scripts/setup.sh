#!/usr/bin/env bash
# Create .venv and install what the project needs, once; a second run only compares a checksum.
# Environment: PYTHON (default: a Python that fits), ACCELERATOR (auto, cpu, gpu), TORCH_INDEX (a PyTorch CPU wheel index).
set -euo pipefail
cd -P "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/.undercurrent-setup
LOG=$VENV/setup.log
TORCH_INDEX=${TORCH_INDEX:?set-up is started by make, which knows the index: make setup}

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

fits() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" || fail "$PYTHON is not Python 3.11 or newer; name one that is: make setup PYTHON=python3.11"
        printf '%s\n' "$PYTHON"
        return
    fi
    # 3.11 first: the lock was made and run on it.
    for candidate in python3.11 python3.12 python3.13 python3; do
        if fits "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found; install one (apt install python3.11 python3.11-venv, or https://docs.astral.sh/uv: uv python install 3.11), then: make setup PYTHON=/path/to/python3.11"
}

find_accelerator() {
    case "${ACCELERATOR:-auto}" in
    cpu | gpu) printf '%s\n' "$ACCELERATOR" ;;
    auto) if nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi ;;
    *) fail "ACCELERATOR=$ACCELERATOR is none of auto, cpu, gpu" ;;
    esac
}

# What is compiled runs until it is built again, whatever its source says: the sources are part of the stamp.
# A moved checkout has a .venv whose scripts name the old place: the place is part of the stamp.
fingerprint() {
    { cat pyproject.toml requirements/*.lock scripts/setup.sh undercurrent/*/*.c && printf '%s\n' "$PWD" "$1" "$TORCH_INDEX"; } | cksum
}

pip() {
    "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@" >>"$LOG" 2>&1
}

say() {
    printf '[%3d s] %s\n' "$SECONDS" "$1"
}

create_venv() {
    local python
    python=$(find_python)
    # The module may be there and its ensurepip not, as on Debian without python3-venv.
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$python has no venv module; install it (apt install python3-venv), or name another Python: make setup PYTHON=..."
    say "creating $VENV with $("$python" --version)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV" || fail "$python -m venv $VENV failed; its output stands above"
}

install_torch_cpu() {
    say "torch for CPU, by pip as configured (about 200 MB)"
    pip install --no-deps -r requirements/torch-cpu.lock && return
    say "pip has no such torch; trying $TORCH_INDEX"
    pip install --no-deps --retries 1 --timeout 30 --index-url "$TORCH_INDEX" -r requirements/torch-cpu.lock ||
        fail "$(grep -v '^#' requirements/torch-cpu.lock) is neither where pip looks nor at $TORCH_INDEX; make setup TORCH_INDEX=<a mirror>, or PIP_FIND_LINKS=<a folder with the wheel> make setup (details: $LOG)"
}

install_locked() {
    say "the other packages, from requirements/$1.lock (1-4 minutes)"
    pip install --no-deps -r "requirements/$1.lock" ||
        fail "pip could not install requirements/$1.lock: $(grep -m1 '^ERROR' "$LOG" || echo 'no ERROR line') (details: $LOG)"
}

[ "$(uname -s)" = Linux ] ||
    fail "vLLM needs Linux and this is $(uname -s); use docker compose up, a Linux machine, or WSL2 on Windows"
accelerator=$(find_accelerator)
fingerprint=$(fingerprint "$accelerator")
if [ -x $VENV/bin/python ] && [ "$(cat $STAMP 2>/dev/null)" = "$fingerprint" ]; then
    exit 0
fi
# A whole environment of this place is kept and brought up to date; anything else is made anew.
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || ! grep -qsF "$PWD/$VENV" "$VENV/bin/activate"; then
    create_venv
fi
rm -f "$STAMP"
: >"$LOG"
if [ "$accelerator" = cpu ]; then
    install_torch_cpu
fi
install_locked "$accelerator"
say "undercurrent itself"
pip install --no-deps --no-build-isolation --editable . || fail "pip could not install the project (details: $LOG)"
printf '%s\n' "$fingerprint" >"$STAMP"
say "set up in $VENV ($accelerator)"
