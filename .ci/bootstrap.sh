#!/usr/bin/env bash
# Brings .venv to the state that `make setup` or `make test` needs, and does nothing when it is there already.
#   .ci/bootstrap.sh setup|test
#   TORCH=auto|cpu|cuda|none   which build of torch (default: the one chosen before, else auto)
#   MEMBOUND_TORCH_INDEX=URL   a package index that offers the wanted build of torch
#   PYTHON=PATH                the interpreter to use
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
goal=${1:-setup}
torch_version=2.13.0

say() { printf '%s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

case $goal in setup | test) ;; *) die "bootstrap: '$goal' is not a goal; use setup or test." ;; esac

torch=${TORCH:-}
if [ -z "$torch" ]; then torch=$(cat .venv/.torch 2>/dev/null || echo auto); fi
case $torch in
    auto) if nvidia-smi -L >/dev/null 2>&1; then torch=cuda; else torch=cpu; fi ;;
    cpu | cuda | none) ;;
    *) die "TORCH=$torch is not known; use auto, cpu, cuda or none." ;;
esac

# Two `make` at once would install over each other.
if command -v flock >/dev/null 2>&1; then
    exec 9<"${BASH_SOURCE[0]}"
    flock 9
fi

usable_python() { # a version manager's shim can exist and not run, and Debian's python can lack venv
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

make_venv() {
    if usable_python .venv/bin/python; then return; fi
    local candidate python=
    for candidate in ${PYTHON:+"$PYTHON"} python3.13 python3.12 python3.11 python3; do
        if usable_python "$candidate"; then python=$candidate; break; fi
    done
    [ -n "$python" ] || die "membound needs Python 3.11 or newer with venv; install it (Debian: python3-venv) or set PYTHON=/path/to/python3."
    say "creating .venv with $("$python" -V)"
    "$python" -m venv --clear .venv
}

pip_install() { .venv/bin/python -m pip install --disable-pip-version-check "$@"; }

install_torch() {
    local wanted=torch==$torch_version
    # the index only adds to what pip knows; a build with a local label (2.13.0+cpu) wins over a plain one
    local pip_torch="pip_install -c constraints.txt ${MEMBOUND_TORCH_INDEX:+--extra-index-url $MEMBOUND_TORCH_INDEX}"
    if [ "$torch" = none ]; then return; fi
    say "installing torch $torch_version ($torch)"
    if [ "$torch" = cuda ]; then
        # without an index of the user's, `===` leaves out a CPU build that lies nearer than the CUDA build
        if [ -n "${MEMBOUND_TORCH_INDEX:-}" ]; then $pip_torch "$wanted"; else $pip_torch "torch===$torch_version"; fi
    elif $pip_torch -q --dry-run --no-deps "$wanted+cpu" >/dev/null 2>&1; then
        $pip_torch -q "$wanted+cpu"
    else
        if [ "$(uname -s)" = Linux ]; then
            say "pip finds no CPU-only build of torch $torch_version here (MEMBOUND_TORCH_INDEX may name an index that has one): installing what it finds, which may be the large CUDA build."
        fi
        $pip_torch "$wanted"
    fi
}

install_packages() {
    local extras=
    if [ "$torch" != none ]; then extras=runtime; fi
    if [ "$goal" = test ]; then extras=${extras:+$extras,}test; fi
    say "installing membound${extras:+ with $extras}"
    pip_install -q -c constraints.txt -e ".${extras:+[$extras]}"
}

find_browser() {
    local candidate
    for candidate in ${CHROME:+"$CHROME"} chromium chromium-browser google-chrome google-chrome-stable chrome \
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome" \
        "/Applications/Chromium.app/Contents/MacOS/Chromium"; do
        if command -v "$candidate" >/dev/null 2>&1; then return 0; fi
    done
    return 1
}

apt_install() { # apt's locks may be held by an update that the machine runs by itself
    local try
    for try in 1 2 3 4 5 6; do
        if apt-get -qq update >&2 && DEBIAN_FRONTEND=noninteractive \
            apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@" >&2; then return 0; fi
        say "apt-get did not install $* (try $try of 6)"
        sleep 10
    done
    return 1
}

install_browser() {
    local missing=
    find_browser || missing=chromium
    if [ "$(id -u)" = 0 ] && command -v dpkg >/dev/null 2>&1; then
        if [ "${CI:-}" = true ] && ! command -v c++ >/dev/null 2>&1; then missing="$missing g++"; fi
        dpkg -s fonts-noto-cjk >/dev/null 2>&1 || missing="$missing fonts-noto-cjk"
        if [ -n "$missing" ]; then
            say "installing $missing"
            # shellcheck disable=SC2086
            apt_install $missing || true
        fi
    fi
    find_browser || say "No Chrome or Chromium found, so the browser tests are skipped; install one (Debian: apt-get install chromium) or set CHROME=/path/to/it."
}

stamp() { # what .venv was made from
    cat pyproject.toml constraints.txt .ci/bootstrap.sh | cksum
    echo "$PWD $torch $torch_version ${MEMBOUND_TORCH_INDEX:-}"
    .venv/bin/python -V
}

make_venv
for done_goal in "$goal" test; do # an environment made for the tests has all that setup needs
    if [ "$(cat ".venv/.stamp-$done_goal" 2>/dev/null)" = "$(stamp)" ] && [ -x .venv/bin/membound ]; then
        ready=1
        break
    fi
done
if [ -z "${ready:-}" ]; then
    rm -f .venv/.stamp-*
    install_torch
    install_packages
    stamp >".venv/.stamp-$goal"
fi
echo "$torch" >.venv/.torch
if [ "$goal" = test ]; then install_browser; fi
