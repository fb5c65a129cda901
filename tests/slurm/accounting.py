"""Accounts and limits of a lab: slurmdbd over a MariaDB of its own, which listens on a socket in the directory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ACCOUNTING_DAEMONS = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacctmgr")
# `two` takes two jobs of a user at a time, `small` 4 CPUs; jobs over them are refused at their submission.
QOS = {
    "two": "MaxSubmitJobsPerUser=2",
    "small": "MaxTRESPerUser=cpu=4 Flags=DenyOnLimit",
}

SLURMDBD = """
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
LogFile={root}/log/slurmdbd.log
PidFile={root}/slurmdbd.pid
"""


def accounting_conf(root: Path, port: int) -> str:
    """The lines of slurm.conf."""
    return (
        "AccountingStorageType=accounting_storage/slurmdbd\n"
        f"AccountingStorageHost=127.0.0.1\nAccountingStoragePort={port}\nAccountingStoragePass={root}/munge.socket\n"
        "AccountingStorageEnforce=associations,limits,qos\n"
    )


def database_command(root: Path, search: str) -> list[str]:
    """Make an empty database, and return the command of its daemon."""
    folder = root / "database"
    install = shutil.which("mariadb-install-db", path=search)
    assert install is not None
    # A database that starts removes temporary tables: also those of another one, in a folder of both.
    options = ["--no-defaults", f"--datadir={folder}", f"--tmpdir={root}", "--user=root"]
    made = subprocess.run(
        [
            install,
            *options,
            "--auth-root-authentication-method=socket",
            "--skip-test-db",
            "--skip-name-resolve",
        ],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        raise RuntimeError(f"mariadb-install-db: {made.stderr.strip() or made.stdout.strip()}")
    quick = [
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-buffer-pool-size=32M",
        "--innodb-log-file-size=16M",
    ]
    return ["mariadbd", *options, "--skip-networking", f"--socket={root}/database.socket", *quick]


def write_slurmdbd_conf(root: Path, port: int) -> None:
    """slurmdbd refuses a file that others may read."""
    path = root / "slurmdbd.conf"
    path.touch(mode=0o600)
    path.write_text(SLURMDBD.format(root=root, port=port))


def account_commands() -> list[list[str]]:
    """What `sacctmgr` is told: the cluster, an account of root, and what its jobs may ask for."""
    add = ["sacctmgr", "--immediate", "add"]
    return [
        [*add, "cluster", "heddle"],
        *([*add, "qos", name, *limits.split()] for name, limits in QOS.items()),
        [*add, "account", "lab", "Description=lab", "Organization=lab", f"QOS=normal,{','.join(QOS)}"],
        [
            *add,
            "user",
            "root",
            "Account=lab",
            "DefaultAccount=lab",
            f"QOS=normal,{','.join(QOS)}",
            "DefaultQOS=normal",
        ],
    ]
