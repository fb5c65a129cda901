#!/bin/sh
# Runs the tests on real SLURM daemons. With `--optional`, a machine where they cannot be installed is told in one
# line and is no failure.
set -u
PYTHON="${PYTHON:-.venv/bin/python}"
cd "$(dirname "$0")/.."
said=$(sh scripts/install_slurm.sh 2>&1)
code=$?
if [ "$code" -eq 0 ]; then
  [ -z "$said" ] || echo "$said"
  # These tests wait for SLURM: two files at once, each on daemons of its own.
  PYTHONHASHSEED=0 PYTHON="$PYTHON" exec sh scripts/pytest_twice.sh slurm -n 2 --dist loadfile \
    --no-loadscope-reorder --max-worker-restart 0 -m slurm tests/slurm
fi
if [ "$code" -eq 3 ] && [ "${1:-}" = "--optional" ]; then
  count=$("$PYTHON" -m pytest -q --collect-only -m slurm tests/slurm 2>/dev/null | grep -c "::")
  echo "$said: $count tests left out"
  exit 0
fi
echo "$said" >&2
exit "$code"
