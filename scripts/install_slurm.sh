#!/bin/sh
# Installs the SLURM daemons of the tests (Debian's slurm-wlm, munge, and slurmdbd with MariaDB), unless they are there.
# Exit code 3 and one line when it cannot: no Debian, no root, or no packages.
set -u
PATH="$PATH:/usr/sbin:/sbin"

refuse() {
  echo "SLURM daemons cannot be installed here: $1" >&2
  exit 3
}

missing() {
  for program in munged slurmctld slurmd sbatch setpriv slurmdbd mariadbd mariadb-install-db; do
    command -v "$program" >/dev/null 2>&1 || return 0
  done
  return 1
}

# The lab's GPUs are device files, and its daemons run as root.
[ "$(id -u)" -eq 0 ] || refuse "the daemons of the tests need root"
missing || exit 0
command -v apt-get >/dev/null 2>&1 || refuse "no apt-get; the tests are written for Debian's slurm-wlm and munge"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
  apt-get install -y --no-install-recommends -o DPkg::Lock::Timeout=300 slurm-wlm munge slurmdbd mariadb-server >"$log" 2>&1
}
# The lists of a fresh machine are empty, those of an old one name versions that are gone.
install || { apt-get update -qq >>"$log" 2>&1 && install; } || refuse "$(tail -n 1 "$log")"
missing && refuse "the packages are installed, but a daemon is not in PATH"
echo "installed: $(slurmctld -V), munge"
