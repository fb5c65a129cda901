#!/bin/sh
# Starts a SLURM of its own on this machine (three kinds of virtual nodes), prints the line that points the commands
# at it, and ends it at Ctrl-C. With arguments, it runs them as a command in it instead.
set -eu
cd "$(dirname "$0")/.."
sh scripts/install_slurm.sh
PYTHON="${PYTHON:-.venv/bin/python}"
exec "$PYTHON" tests/slurm/lab.py "$@"
