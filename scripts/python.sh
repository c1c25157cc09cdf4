# Sourced by the other scripts: make_venv gives .venv a Python that this project runs on. PYTHON=... chooses it.

usable() {
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.12 python3.13 python3.11; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "no Python 3.11 to 3.13 with venv found; install one, or set PYTHON=/path/to/python" >&2
    return 2
}

make_venv() {
    if ! [ -x .venv/bin/python ] || ! usable .venv/bin/python; then
        local python
        python=$(find_python)
        echo "making .venv with $("$python" --version)" >&2
        "$python" -m venv --clear .venv
    fi
}

# install ARGUMENTS...: pip's own progress where somebody watches, silence in a log.
install() {
    local quiet=--quiet
    if [ -t 2 ]; then quiet=--no-input; fi
    .venv/bin/python -m pip install --disable-pip-version-check "$quiet" "$@" >&2
}

# installed NAME FILES...: whether NAME was installed from these very files. mark NAME FILES... notes that it was.
fingerprint() { cat "$@" | .venv/bin/python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'; }
installed() { local name=$1; shift; [ "$(cat ".venv/.hvd-$name" 2>/dev/null)" = "$(fingerprint "$@")" ]; }
mark() { local name=$1; shift; fingerprint "$@" >".venv/.hvd-$name"; }
