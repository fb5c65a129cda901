"""A SLURM job of a group: dask-jobqueue's class with our script, and dask-jobqueue's import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from heddle_dask.live.clusters.slurm.jobs import with_last_words
from heddle_dask.live.clusters.slurm.replacement import JobPhase, Observation

IMPORT = """
import importlib, signal, sys, threading
before = signal.getsignal(signal.SIGINT)
failures = []
def load():
    try:
        importlib.import_module("heddle_dask.live.clusters.slurm.slurm_job")
    except BaseException as error:
        failures.append(error)
if sys.argv[1] == "thread":
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
else:
    load()
assert not failures, failures
assert signal.getsignal(signal.SIGINT) is before
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
"""

JOB = """
import asyncio
from heddle_dask.live.clusters.slurm.jobs import with_last_words
from heddle_dask.live.clusters.slurm.replacement import JobPhase, Observation
from heddle_dask.live.clusters.slurm.queue import SlurmFailed
from heddle_dask.live.clusters.slurm.slurm_job import SlurmGroupJob
from heddle_dask.live.clusters.slurm.worker_group import WorkerGroup

class Queue:
    def __init__(self, full):
        self.full, self.scripts, self.cancelled = full, [], []
    async def submit(self, script):
        if self.full:
            raise SlurmFailed("Job violates accounting/QOS policy")
        self.scripts.append(script)
        return "42"
    async def cancel(self, job_ids):
        self.cancelled += job_ids

async def body():
    group = WorkerGroup("cpu", "tool", partition="cpu", cpus=2)
    write = lambda group, name, scheduler: f"{group.name} {name} {scheduler}"
    queue = Queue(full=False)
    job = await SlurmGroupJob("tls://h:1", "cpu-0", group=group, script=write, queue=queue)
    assert (job.job_id, job.refused, queue.scripts) == ("42", "", ["cpu cpu-0 tls://h:1"])
    assert job.job_script() == queue.scripts[0]
    await job.close()
    assert queue.cancelled == ["42"]
    refused = await SlurmGroupJob("tls://h:1", "cpu-1", group=group, script=write, queue=Queue(full=True))
    assert (refused.job_id, refused.refused) == (None, "Job violates accounting/QOS policy")
    await refused.close()
asyncio.run(body())
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_dask_jobqueue_is_imported_in_any_thread_and_leaves_ctrl_c_alone(where: str) -> None:
    subprocess.run([sys.executable, "-c", IMPORT, where], check=True)


def test_a_job_is_submitted_with_our_script_and_a_refusal_is_kept() -> None:
    subprocess.run([sys.executable, "-c", JOB], check=True)


def test_the_end_of_a_job_is_told_with_its_last_words_where_it_has_any(tmp_path: Path) -> None:
    failed = Observation(JobPhase.ENDED, "it failed (NonZeroExitCode)")
    log = tmp_path / "gpu-0-7.log"
    told = with_last_words(failed, log, ()).reason
    assert told == f"it failed (NonZeroExitCode), without a log: its node must be able to write {log}"
    log.touch()
    assert with_last_words(failed, log, ()).reason == f"it failed (NonZeroExitCode) (log: {log})"
    said = with_last_words(failed, log, ("no", "module " + "x" * 1000)).reason
    assert said.startswith("it failed (NonZeroExitCode): xxx") and said.endswith(f"xxx (log: {log})")
    for other in (Observation(JobPhase.RUNNING), Observation(JobPhase.ENDED, "it ended", planned=True)):
        assert with_last_words(other, log, ("words",)) == other
