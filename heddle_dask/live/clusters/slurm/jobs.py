"""Jobs that are processes of the driver's machine: the workers of a group here, or as steps of an allocation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from distributed.deploy.spec import ProcessInterface

from heddle_dask.engines.supervised_process import SupervisedProcess
from heddle_dask.live.clusters.slurm.replacement import JobPhase, Observation
from heddle_dask.live.clusters.slurm.worker_group import WorkerGroup

_GRACE_S = 8.0
_STEP_GRACE_S = 15.0
# What srun prints while a step waits for resources that other steps of the allocation hold.
_WAITS = (
    "temporarily disabled, retrying",
    "temporarily unable to create job step",
    "Requested nodes are busy",
)
_BEGINS = "Step created for"


LAST_LINES = 2
_LONGEST_WORDS = 400


def with_last_words(seen: Observation, log: Path, tail: Sequence[str]) -> Observation:
    """An end that was not expected, with what the job printed last, and where the rest is."""
    if seen.phase is not JobPhase.ENDED or seen.planned:
        return seen
    words = " | ".join(tail)[-_LONGEST_WORDS:]
    told = f"{f': {words}' if words else ''} (log: {log})"
    if not log.exists():
        told = f", without a log: its node must be able to write {log}"
    return replace(seen, reason=seen.reason + told)


ScriptOf = Callable[[WorkerGroup, str, str], str]
"""The script of one job of a group: takes the group, the name of the job and the scheduler's address."""


class LocalGroupJob(ProcessInterface):
    """One job of a group as a supervised process of this machine: it never outlives the driver."""

    def __init__(
        self,
        # `scheduler`, `name`: given by `SpecCluster`: the scheduler's address and the name of the job.
        scheduler: str,
        name: str,
        *,
        group: WorkerGroup,
        script: ScriptOf,  # writes its script
        command: Sequence[str] = (),  # what runs the shell with the script
        logs: Path,
        records: Path,  # directory of the records of supervised processes
    ) -> None:
        argv = [*command, "/bin/bash", "-c", script(group, name, scheduler)]
        self.name = name
        # Not under the name of the worker, whose log is there too.
        self.process = SupervisedProcess(argv, logs, f"{name}-job", records=records, grace_s=_GRACE_S)
        super().__init__()

    async def start(self) -> None:
        """Launch it; its workers join later."""
        self.process.launch()
        await super().start()

    async def close(self) -> None:
        """End it; after its grace everything that it started is killed."""
        await self.process.stop()
        await super().close()

    @property
    def job_id(self) -> str:
        """Pid of the process; empty before it was launched."""
        return str(self.process.pid or "")

    def observation(self) -> Observation:
        """Whether it runs, and how it has ended."""
        code = self.process.returncode
        if code is None:
            return Observation(JobPhase.RUNNING)
        ended = Observation(JobPhase.ENDED, f"it ended with exit code {code}", planned=code == 0)
        return with_last_words(ended, self.process.log_path, self.process.log_tail(LAST_LINES))


class SrunJob(LocalGroupJob):
    """One job of a group as a step of the allocation in which the driver runs; it waits while others use its share."""

    async def close(self) -> None:
        """End it. The step was asked to leave before (`SlurmQueue.end_steps`): a signal to `srun` kills it at once."""
        if self.observation().phase is JobPhase.RUNNING:
            await self.process.ended_within(_STEP_GRACE_S)
        await super().close()

    def observation(self) -> Observation:
        """As of a process, except that a step may wait for resources."""
        seen = super().observation()
        tail = " ".join(self.process.log_tail(3))
        if seen.phase is JobPhase.RUNNING and any(sign in tail for sign in _WAITS) and _BEGINS not in tail:
            return Observation(JobPhase.PENDING, "other steps of the allocation use what it needs")
        return seen
