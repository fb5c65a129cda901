#!/bin/sh
# Installs Debian's Chromium, in which the tests look at the dashboard. Without it they are skipped, and say so.
set -eu
if command -v chromium >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "install_browser.sh: no Chromium, and it needs root and apt-get to be installed here:" \
        "the tests of the dashboard in a browser are skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# The lists of a fresh machine are empty, and those of an old one name packages that are gone.
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-liberation >/dev/null; }; then
    echo "install_browser.sh: Chromium could not be installed: the tests of the dashboard in a browser are skipped" >&2
fi
