#!/bin/sh
# Installs everything the project needs: the sandbox from Debian's packages, the rest into a virtual environment.
# Run again after a failure: it goes on where it stopped. Documented in docs/installation.md.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
HEDDLE_NO_HASHES=${HEDDLE_NO_HASHES:-0}

say() { printf 'install: %s\n' "$*" >&2; }
refuse() { say "$*"; exit 2; }
pip() { "$VENV/bin/python" -m pip "$@"; }
pip_install() { pip install -q --disable-pip-version-check --no-input --no-deps "$@"; }

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null ||
    refuse "$PYTHON is not Python 3.11 to 3.13, which the locked packages are for: set PYTHON to one of these"

# -- the virtual environment: one without a working pip was left half made, and is made again --

if ! pip --version >/dev/null 2>&1; then
    "$PYTHON" -c 'import ensurepip' 2>/dev/null ||
        refuse "$PYTHON cannot make a virtual environment: install Debian's package python3-venv, then run this again"
    [ ! -e "$VENV" ] || [ -f "$VENV/pyvenv.cfg" ] ||
        refuse "$VENV exists and is not a virtual environment: remove it, or set VENV to another folder"
    "$PYTHON" -m venv --clear "$VENV"
fi

# -- bubblewrap: the strong sandbox mode; without it tools run in the weaker one (docs/sandbox.md) --

if ! command -v bwrap >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "bubblewrap from Debian's packages"
        apt-get install -y -qq --no-install-recommends bubblewrap >&2 ||
            { apt-get update -qq >&2 && apt-get install -y -qq --no-install-recommends bubblewrap >&2; }
    else
        say "bubblewrap is missing; tools will run in the weaker sandbox mode (docs/sandbox.md)"
    fi
fi

# -- torch: the CPU build is not on PyPI. A site may have it; else it comes from PyTorch's own index --

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
torch=$(sed -n 's/^torch==//p' constraints.txt)+cpu
printf 'torch==%s' "$torch" >"$scratch/torch.txt"
if [ "$HEDDLE_NO_HASHES" != 1 ]; then
    while read -r hash archive; do
        case $archive in "torch-$torch-"*) printf ' --hash=sha256:%s' "$hash" ;; esac
    done <scripts/torch-cpu.sha256 >>"$scratch/torch.txt"
fi
say "packages into $VENV (once, some minutes)"
# `--index-url` here alone: no other package can come from that index.
pip_install -r "$scratch/torch.txt" 2>"$scratch/site.log" ||
    pip_install -r "$scratch/torch.txt" --index-url "$TORCH_CPU_INDEX" || {
        say "torch $torch comes neither from pip's own settings (below) nor from TORCH_CPU_INDEX=$TORCH_CPU_INDEX (above)"
        cat "$scratch/site.log" >&2
        say "set TORCH_CPU_INDEX to a mirror of PyTorch's CPU index; HEDDLE_NO_HASHES=1 takes a build of the site's own"
        exit 1
    }

# -- xgboost and xgboost-cpu are one module: the one goes before the other comes --

if pip show -q xgboost >/dev/null 2>&1 && grep -q '^xgboost-cpu' requirements-lock.txt && [ "$(uname -m)" = x86_64 ]; then
    pip uninstall -q -y xgboost >&2
fi

# -- everything else: the lock names every package, so that pip resolves nothing and checks every archive --

cp requirements-lock.txt "$scratch/lock.txt"
[ "$HEDDLE_NO_HASHES" != 1 ] || sed -e '/^ *--hash=/d' -e 's/ \\$//' requirements-lock.txt >"$scratch/lock.txt"
pip_install -r "$scratch/lock.txt" 2>"$scratch/lock.log" || {
    cat "$scratch/lock.log" >&2
    if grep -q HASHES "$scratch/lock.log"; then
        say "an archive is not the one of requirements-lock.txt. If the package index builds archives of its own and you"
        say "trust it, set HEDDLE_NO_HASHES=1"
    fi
    exit 1
}
# The build requirements are in the lock too.
pip_install --no-build-isolation -e .
