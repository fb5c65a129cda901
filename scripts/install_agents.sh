#!/bin/sh
# Installs the agents of other projects that the tests run, unchanged: two Python packages and two npm packages, all
# with their hashes, into build/agents. What cannot be installed is skipped by the tests, which say so.
set -eu
PYTHON=${PYTHON:-.venv/bin/python}
TO=${1:-build/agents}
say() { echo "install_agents.sh: $*: the tests of these agents are skipped" >&2; }

# Programs begin with its path, which sandboxes know without links.
PYTHON=$("$PYTHON" -c 'import os, sys; print(os.path.realpath(sys.prefix) + "/bin/python")')
mkdir -p "$TO/npm"
# Its requirements are those of the project's environment; only what that lacks is here.
"$PYTHON" -m pip install -q --disable-pip-version-check --no-deps --require-hashes --upgrade --target "$TO/python" \
    -r tests/agents/python-packages.txt || say "mini-swe-agent and openai-agents could not be installed"

if ! command -v npm >/dev/null 2>&1 && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends nodejs npm >/dev/null; } || true
fi
cp tests/agents/package.json tests/agents/package-lock.json "$TO/npm/"
if ! command -v npm >/dev/null 2>&1; then
    say "claude-code and codex need npm (Node.js)"
elif ! npm ci --prefix "$TO/npm" --no-audit --no-fund --loglevel=error >&2; then
    say "claude-code and codex could not be installed"
fi
touch "$TO/.there"
