#!/bin/sh
# pytest, and what failed once more, alone:  pytest_twice.sh NAME ARGUMENTS…
# On a busy machine a test may fail that is right. One that fails twice fails the stage, and so does a process of
# pytest that ends, or a stage that is cut short: then nothing says that the other tests ran.
set -u
PYTHON="${PYTHON:-.venv/bin/python}"
kept="cache_dir=build/pytest/$1"
name=$1
shift
"$PYTHON" -m pytest -q -o "$kept" "$@"
code=$?
[ "$code" -eq 1 ] || exit "$code"
echo "stage $name: what failed, once more, alone"
exec "$PYTHON" -m pytest -q -o "$kept" "$@" -n 0 --last-failed --last-failed-no-failures none
