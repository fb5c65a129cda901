"""One writer where the kernel's locks do not reach: real processes, a kernel without `flock`, another host name."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from worlds.journal_records import read_journal

from heddle_dask.core.errors import BadInput
from heddle_dask.records.journal import Journal
from heddle_dask.records.locks import EXPIRY_S, Holder, Lease, file_system_of

TESTS = Path(__file__).parents[1]
WRITER = """
import sys
from worlds.no_flock import refuse_flock
from heddle_dask.records.journal import Journal
refuse_flock()
with Journal.open_append(sys.argv[1]) as journal:
    journal.append("step", {"by": sys.argv[2]})
    journal.flush()
    print("written", flush=True)
    sys.stdin.readline()
"""
HOLDER = """
import sys
from pathlib import Path
from heddle_dask.records.locks import Lease
lease = Lease.take(Path(sys.argv[1]), beat_s=0.05)
print("taken", flush=True)
sys.stdin.readline()
lease.release()
"""


@contextlib.contextmanager
def process(script: str, *arguments: object, before: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """A process that has said its first word and goes on until its stdin is closed."""
    child = subprocess.Popen(
        (*before, sys.executable, "-c", script, *map(str, arguments)),
        env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
        if child.stdin is not None:
            child.stdin.close()


def other_host(**changes: object) -> Holder:
    return replace(Holder.this_process(), host="elsewhere", **changes)  # type: ignore[arg-type]


def dead_holder() -> Holder:
    """A process of this machine that has ended."""
    child = subprocess.Popen(["true"])
    child.wait()
    return replace(Holder.this_process(), pid=child.pid)


def leave(lease: Path, holder: Holder, silent_s: float = 0.0) -> None:
    """The lease of a holder that has not touched it for a while."""
    lease.write_text(json.dumps(asdict(holder)))
    os.utime(lease, (time.time() - silent_s,) * 2)


def test_without_flock_a_second_writer_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    Journal.create(path).close()
    with process(WRITER, path, "first") as first:
        with process(WRITER, path, "second") as second:
            _, said = second.communicate()
        assert f"{path} is being written by process {first.pid} on " in said.splitlines()[-1]
        first.kill()
    with process(WRITER, path, "third") as third:
        _, said = third.communicate()
    assert third.returncode == 0, said
    assert [body["by"] for _, body in read_journal(path)] == ["first", "third"]
    assert [file.name for file in tmp_path.iterdir()] == ["run.journal"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs another host name")
def test_a_holder_on_another_machine_that_lives_is_seen_to_live(tmp_path: Path) -> None:
    subject = tmp_path / "run"
    elsewhere = ("unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh")
    refused = pytest.raises(BadInput, match=r"being written by process \d+ on elsewhere")
    with process(HOLDER, subject, before=elsewhere), refused:
        Lease.take(subject)
    Lease.take(subject).release()


def test_a_holder_on_another_machine_that_is_silent_loses_the_lease_and_notices(tmp_path: Path) -> None:
    subject, lease = tmp_path / "run", tmp_path / "run.lease"
    leave(lease, other_host(), silent_s=EXPIRY_S + 1)
    holder = Lease.take(subject, beat_s=0.02)
    holder.check()
    # What a machine sees that was stopped for a minute: the file is another's.
    leave(lease, other_host())
    with pytest.raises(OSError, match=r"another process \(process \d+ on elsewhere\) has taken it over"):
        while True:
            holder.check()
    holder.release()
    assert lease.exists(), "it is the other one's"


def test_the_end_of_a_silent_lease_is_waited_for(tmp_path: Path) -> None:
    leave(tmp_path / "run.lease", other_host(), silent_s=EXPIRY_S - 1)
    Lease.take(tmp_path / "run").release()
    assert not list(tmp_path.iterdir())


def test_a_later_process_with_the_same_pid_is_not_the_holder(tmp_path: Path) -> None:
    mine = Holder.this_process()
    leave(tmp_path / "run.lease", replace(mine, started_ticks=mine.started_ticks - 100))
    Lease.take(tmp_path / "run").release()


def test_a_lease_that_was_cut_off_is_waited_out(tmp_path: Path) -> None:
    lease = tmp_path / "run.lease"
    lease.write_text('{"nonce": "ab')
    os.utime(lease, (time.time() - EXPIRY_S - 1,) * 2)
    Lease.take(tmp_path / "run").release()
    assert not list(tmp_path.iterdir())


def test_a_job_is_named(tmp_path: Path) -> None:
    holder = other_host(job="4711")
    assert str(holder) == f"process {holder.pid} on elsewhere, job 4711"


@pytest.mark.parametrize("has_dead_claim", [False, True])
def test_of_many_that_take_over_one_lease_one_wins(tmp_path: Path, has_dead_claim: bool) -> None:
    dead = dead_holder()
    contenders = 6
    for number in range(40):
        subject = tmp_path / f"run-{number}"
        lease = subject.with_name(subject.name + ".lease")
        leave(lease, dead)
        if has_dead_claim:  # of a process that was killed while it took over
            leave(lease.with_name(f"{lease.name}.after-{dead.nonce}"), replace(dead, nonce=f"{number:032x}"))
        won: list[Lease] = []
        start = threading.Barrier(contenders)

        def contend(subject: Path = subject, won: list[Lease] = won, start: threading.Barrier = start) -> None:
            start.wait()
            with contextlib.suppress(BadInput):
                won.append(Lease.take(subject))

        threads = [threading.Thread(target=contend) for _ in range(contenders)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        won[0].check()
        assert lease.exists()
        won[0].release()
    assert not list(tmp_path.iterdir())


MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 27 0:50 / /scratch rw - lustre mds@tcp:/scratch rw,localflock
41 40 0:51 / /scratch/fast rw shared:7 - xfs /dev/nvme0n1 rw
42 27 0:52 / /home\\040dirs rw - nfs4 server:/home rw
43 27 0:53 / /home\\040dirs rw - fuse.sshfs server:/home rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/run", "ext4"),
        ("/scratch/me/run", "lustre"),
        ("/scratchy/run", "ext4"),
        ("/scratch/fast/run", "xfs"),
        ("/home dirs/run", "fuse.sshfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_nearest_mount(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind
