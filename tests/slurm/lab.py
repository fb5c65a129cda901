"""A SLURM of its own on this machine: munged, slurmctld and one slurmd for each virtual node, in one directory.

Nothing under /etc is read or written, no port is fixed, all daemons listen on loopback only: several labs run side by
side. `python tests/slurm/lab.py` starts one for a person to try things in; with a command as its arguments, for that
command.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from slurm.accounting import (
    ACCOUNTING_DAEMONS,
    account_commands,
    accounting_conf,
    database_command,
    write_slurmdbd_conf,
)

NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none"
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
# Debian has the daemons in /usr/sbin, which is not in every user's PATH.
SEARCH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
PLACE, PREFIX, OWNED = "/tmp", "heddle-slurm-", "owned"
START_S = 30.0
STOP_S = 15.0
ATTEMPTS = 3


class LabFailed(Exception):
    """The daemons do not come up; the message has the end of their logs."""


@dataclass(frozen=True, slots=True)
class Node:
    """A virtual node; its CPUs, memory and GPUs are claims that nobody checks."""

    name: str
    cpus: int
    memory_mib: int = 64_000
    gpus: int = 0
    feature: str = ""


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition; `options` are raw words of its line in slurm.conf."""

    name: str
    nodes: str
    max_time: str = "60"
    options: str = "State=UP"


NODES = (
    Node("gpu0", cpus=8, gpus=2, feature="h200"),
    Node("gpu1", cpus=8, gpus=2, feature="h200"),
    Node("cpu0", cpus=8),
    Node("cpu1", cpus=8),
    Node("one0", cpus=1),
)
# `short` ends jobs after two minutes, `single` has room for one job, in `down` jobs wait, `inactive` refuses them.
PARTITIONS = (
    Partition("cpu", "cpu[0-1]", options="State=UP Default=YES"),
    Partition("gpu", "gpu[0-1]"),
    Partition("short", "gpu[0-1],cpu[0-1]", max_time="2"),
    Partition("single", "one0"),
    Partition("down", "cpu[0-1]", options="State=DOWN"),
    Partition("inactive", "cpu[0-1]", options="State=INACTIVE"),
)


def slurm_conf(root: Path, host: str, ports: list[int], accounting: str) -> str:
    """Return the text of slurm.conf; `ports` has that of slurmctld first, then one for each node."""
    # The periods are short, since a test waits for them: scheduling every 2 s, end of a cancelled job after 5 s.
    settings = f"""
ClusterName=heddle
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={ports[0]}
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/log/slurmctld.log
StateSaveLocation={root}/state
SlurmdParameters=config_overrides
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdLogFile={root}/log/slurmd-%n.log
SlurmdSpoolDir={root}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
{accounting.strip()}
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=100000
DefMemPerCPU=1000
ReturnToService=2
KillWait=5
MinJobAge=600
JobRequeue=1
GresTypes=gpu
"""
    lines = settings.strip().splitlines()
    for node, port in zip(NODES, ports[1:], strict=True):
        gres = f" Gres=gpu:{node.gpus}" if node.gpus else ""
        feature = f" Feature={node.feature}" if node.feature else ""
        lines.append(
            f"NodeName={node.name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={node.cpus}"
            f" RealMemory={node.memory_mib}{gres}{feature} State=UNKNOWN"
        )
    for part in PARTITIONS:
        lines.append(
            f"PartitionName={part.name} Nodes={part.nodes} MaxTime={part.max_time} DefaultTime=1 {part.options}"
        )
    return "\n".join(lines) + "\n"


def gres_conf(root: Path) -> str:
    """Return the text of gres.conf: every GPU is a device that nobody opens."""
    return "".join(
        f"NodeName={node.name} Name=gpu File={root}/devices/gpu[0-{node.gpus - 1}]\n" for node in NODES if node.gpus
    )


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def missing_daemons() -> list[str]:
    """Return the programs that are not installed: `scripts/install_slurm.sh` installs them."""
    return [name for name in (*DAEMONS, *ACCOUNTING_DAEMONS) if shutil.which(name, path=SEARCH) is None]


@dataclass
class Lab:
    """A running SLURM: where its configuration is, and what a test asks it."""

    root: Path
    accounting: bool = False
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _owned: int = -1

    @property
    def conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def environ(self) -> dict[str, str]:
        """The environment in which SLURM's commands speak to this lab."""
        database = f"{self.root}/database.socket"
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": SEARCH, "MYSQL_UNIX_PORT": database}

    def run(self, *command: str, check: bool = True) -> str:
        """Run one of SLURM's commands and return its stdout."""
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise LabFailed(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def submit(self, *arguments: str, script: str = "") -> int:
        """Submit a job (`script` is given to sbatch on stdin) and return its number."""
        done = subprocess.run(
            ("sbatch", "--parsable", *arguments),
            env=self.environ,
            input=script or None,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise LabFailed(done.stderr.strip())
        return int(done.stdout.split(";")[0])

    def jobs(self) -> dict[str, tuple[str, str]]:
        """Return state and reason of every job that waits, runs or ends now, by name."""
        found = {}
        for line in self.run("squeue", "--noheader", "--format=%j|%T|%r").splitlines():
            name, state, reason = line.strip().split("|")
            found[name] = (state, reason)
        return found

    def job_fields(self, number: int) -> dict[str, str]:
        """Return what `scontrol show job` says of a job, also for ten minutes after its end."""
        words = self.run("scontrol", "--oneliner", "show", "job", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def named(self, name: str) -> dict[str, str]:
        """Return what SLURM says of the latest job of this name, also for ten minutes after its end."""
        lines = self.run("scontrol", "--oneliner", "show", "job").splitlines()
        numbers = [line.split()[0].removeprefix("JobId=") for line in lines if f" JobName={name} " in line]
        return self.job_fields(max(map(int, numbers)))

    def state(self, number: int) -> str:
        """Return the state of a job: PENDING, RUNNING, COMPLETED, CANCELLED, TIMEOUT, ..."""
        return self.job_fields(number)["JobState"]

    def clear(self) -> None:
        """Cancel every job and wait until none is left, so that the next test begins with free nodes."""
        self.run("scancel", "--state=PENDING", check=False)
        self.run("scancel", "--state=RUNNING", "--signal=KILL", "--full", check=False)
        self.run("scancel", "--state=RUNNING", check=False)
        wait_for(lambda: not self.jobs(), STOP_S, "the jobs are not gone")

    def stop(self) -> None:
        """End jobs and daemons, and what is left of the jobs."""
        try:
            self.clear()
        except (LabFailed, subprocess.TimeoutExpired) as failure:
            print(f"SLURM lab: {failure}", file=sys.stderr)
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        end_survivors(self.conf)
        os.close(self._owned)

    def _daemon(self, *command: str) -> None:
        # Without a parent they would stay for ever: the kernel ends them when this process dies.
        program = shutil.which(command[0], path=SEARCH)
        assert program is not None
        with (self.root / "log" / f"{command[0]}.out").open("ab") as output:
            process = subprocess.Popen(
                ("setpriv", "--pdeathsig", "TERM", program, *command[1:]),
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.processes.append(process)

    def _start(self) -> None:
        # It gets its name when it is locked: no other lab takes it for abandoned.
        new = self.root / "owned.new"
        self._owned = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._owned, fcntl.LOCK_EX)
        new.rename(self.root / OWNED)
        # munged refuses a directory that other users may not enter: they could not reach its socket.
        self.root.chmod(0o755)
        for name in ("log", "state", "spool", "devices"):
            (self.root / name).mkdir(exist_ok=True)
        for number in range(max(node.gpus for node in NODES)):
            # Another /dev/null: SLURM asks for devices, and counts them by the digits of their names.
            os.mknod(self.root / "devices" / f"gpu{number}", stat.S_IFCHR | 0o666, os.stat(os.devnull).st_rdev)
        *ports, accounts_port = free_ports(2 + len(NODES))
        storage = accounting_conf(self.root, accounts_port) if self.accounting else NO_ACCOUNTING
        self.conf.write_text(slurm_conf(self.root, socket.gethostname().split(".")[0], ports, storage))
        (self.root / "gres.conf").write_text(gres_conf(self.root))
        key = self.root / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)
        files = [f"--{name}-file={self.root}/munge.{name}" for name in ("key", "pid", "seed")]
        self._daemon("munged", "--foreground", f"--socket={self.root}/munge.socket", *files)
        wait_for(lambda: (self.root / "munge.socket").exists(), START_S, "munged does not start")
        if self.accounting:
            self._start_accounting(accounts_port)
        self._daemon("slurmctld", "-D", "-f", str(self.conf))
        for node in NODES:
            (self.root / "spool" / node.name).mkdir(exist_ok=True)
            self._daemon("slurmd", "-D", "-f", str(self.conf), "-N", node.name)
        wait_for(self._nodes_are_idle, START_S, "the nodes do not come up")

    def _start_accounting(self, port: int) -> None:
        self._daemon(*database_command(self.root, SEARCH))
        wait_for((self.root / "database.socket").exists, START_S, "the database does not start")
        write_slurmdbd_conf(self.root, port)
        self._daemon("slurmdbd", "-D")
        answers = ("sacctmgr", "--noheader", "list", "cluster")
        wait_for(
            lambda: not subprocess.run(answers, env=self.environ, capture_output=True).returncode,
            START_S,
            "slurmdbd does not answer",
        )
        for command in account_commands():
            self.run(*command)

    def _nodes_are_idle(self) -> bool:
        if any(process.poll() is not None for process in self.processes):
            raise LabFailed("a daemon has ended")
        states = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False).splitlines()
        return {line.split()[0] for line in states if line.endswith(" idle")} >= {node.name for node in NODES}

    def log_tails(self) -> str:
        """Return the last lines of every daemon's log."""
        tails = []
        for log in sorted((self.root / "log").iterdir()):
            lines = log.read_text(errors="replace").splitlines()[-8:]
            tails += [f"--- {log.name}", *lines]
        return "\n".join(tails)


def end_survivors(conf: Path) -> None:
    """Kill what is left of a lab's jobs: with `proctrack/linuxproc` some outlive their job, and their daemons."""
    mine = f"SLURM_CONF={conf}".encode()
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            environment = (directory / "environ").read_bytes().split(b"\0")
            is_of_a_job = any(word.startswith(b"SLURM_JOB_ID=") for word in environment)
            is_of_a_job |= (directory / "cmdline").read_bytes().startswith(b"slurmstepd:")
            if mine in environment and is_of_a_job:
                os.kill(int(directory.name), signal.SIGKILL)


def clear_abandoned() -> None:
    """End what labs have left whose process was killed."""
    for owned in Path(PLACE).glob(f"{PREFIX}*/{OWNED}"):
        with contextlib.suppress(OSError):
            handle = os.open(owned, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end_survivors(owned.parent / "slurm.conf")
                shutil.rmtree(owned.parent, ignore_errors=True)
            finally:
                os.close(handle)


def wait_for(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Ask until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise LabFailed(f"{otherwise} within {seconds:.0f} s")
        time.sleep(0.1)


@contextmanager
def running_lab(*, accounting: bool = False) -> Iterator[Lab]:
    """Start a lab in a directory of its own and end it with everything that ran in it.

    Parameters
    ----------
    accounting
        With accounts and limits (`slurm.accounting`), which are enforced.
    """
    clear_abandoned()
    for attempt in range(ATTEMPTS):
        # Short: munge's socket has to fit into 107 characters.
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=PLACE, ignore_cleanup_errors=True) as directory:
            lab = Lab(Path(directory), accounting)
            try:
                lab._start()
            except LabFailed as failure:
                tails = lab.log_tails()
                lab.stop()
                # Another process may have taken a port meanwhile.
                if attempt + 1 == ATTEMPTS:
                    raise LabFailed(f"{failure}\n{tails}") from None
                continue
            try:
                yield lab
            finally:
                lab.stop()
            return


def main(command: list[str]) -> int:
    """Start a lab; run a command in it, or wait for Ctrl-C."""
    if missing := missing_daemons():
        print(f"{', '.join(missing)} not found: run scripts/install_slurm.sh", file=sys.stderr)
        return 3
    # Also where a script has started it in the background, with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with running_lab(accounting=True) as lab, contextlib.suppress(KeyboardInterrupt):
        if command:
            return subprocess.run(command, env=lab.environ).returncode
        print(lab.run("sinfo"), end="")
        print(
            f"\nexport SLURM_CONF={lab.conf}\n\nIn another shell, that line first. Ctrl-C here ends it.",
            flush=True,
        )
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
