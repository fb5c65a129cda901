"""A cluster of groups of different workers: as SLURM jobs, as steps of one allocation, or as processes here."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed.core import Status
from distributed.utils import NoOpAwaitable

from heddle_dask.core.errors import BadInput, check_count
from heddle_dask.live.clusters.credentials import Credentials
from heddle_dask.live.clusters.local import ClusterProcessFailed, LocalScheduler, SupervisedCluster
from heddle_dask.live.clusters.owned_directory import OwnedDirectory
from heddle_dask.live.clusters.slurm.cluster_file import read_cluster_file
from heddle_dask.live.clusters.slurm.job_script import job_script, srun_arguments
from heddle_dask.live.clusters.slurm.job_table import JobTable, counts_text, html_table, worker_names
from heddle_dask.live.clusters.slurm.jobs import LocalGroupJob, SrunJob
from heddle_dask.live.clusters.slurm.queue import SlurmFailed, SlurmQueue
from heddle_dask.live.clusters.slurm.replacement import JobRecord
from heddle_dask.live.clusters.slurm.scaling import ScalingRule
from heddle_dask.live.clusters.slurm.scheduler_process import dashboard_url, listen_options
from heddle_dask.live.clusters.slurm.tending import Tending
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, WorkerGroup

_LOG = logging.getLogger(__name__)
# A pass of the tending ends within this, unless SLURM does not answer.
_LAST_PASS_S = 120.0
_LAST_PASS_OF_SILENT_S = 5.0


class SlurmCluster(SupervisedCluster):
    """A Dask cluster whose workers are the jobs of named groups.

    The scheduler runs in a process of its own on this machine. Jobs that are refused, lost, cancelled or preempted are
    replaced; groups are scaled between their minimum and maximum by the work of the rollout, or by `scale`.

    Parameters
    ----------
    plan
        The groups, or the path of a cluster file.
    logs
        Directory that all nodes see, for logs of jobs, workers and engines; None: as the plan says, else
        ``heddle-logs`` in the current directory.
    rule
        Constants of the scaling by demand; None: `ScalingRule()`.
    on_event
        Takes one line for each job that is submitted, lost, replaced or let go, with the reason; also in the log of
        this module.

    Attributes
    ----------
    cluster_plan
        The groups with the limits in force.
    logs
        Where the logs are.
    credentials
        Its TLS files; None before the start, and without TLS.

    Raises
    ------
    BadInput
        In one line: the plan cannot be, or SLURM refuses a group (with its message). Nothing was started then.

    Examples
    --------
    >>> with SlurmCluster("slurm.toml") as cluster, Client(cluster) as client:  # doctest: +SKIP
    ...     cluster.scale(gpu=4)
    ...     Rollout(client, env="math", model="my-model").run(64)
    """

    def __init__(
        self,
        plan: ClusterPlan | str | Path,
        *,
        logs: str | Path | None = None,
        rule: ScalingRule | None = None,
        on_event: Callable[[str], None] = lambda line: None,
        asynchronous: bool = False,
        name: str = "heddle-slurm",
        **kwargs: Any,
    ) -> None:
        given = plan if isinstance(plan, ClusterPlan) else read_cluster_file(plan)
        self.logs = Path(logs or given.logs or "heddle-logs").absolute()
        self.cluster_plan = replace(given, logs=self.logs, shared=given.shared or self.logs)
        self._on_event = on_event
        self._directory: OwnedDirectory | None = None
        self.credentials: Credentials | None = None
        self._queue = SlurmQueue()
        self._tending = Tending(
            self,
            self.cluster_plan,
            rule or ScalingRule(),
            queue=self._queue,
            job_spec=self._job_spec,
            cancel_jobs=self._cancel_jobs,
            note=self._note,
        )
        self._tending_task: asyncio.Task[None] | None = None
        listens = listen_options(self.cluster_plan)
        scheduler = {"cls": LocalScheduler, "options": {"dashboard": True, "listens": listens}}
        try:
            super().__init__(scheduler=scheduler, asynchronous=asynchronous, name=name, **kwargs)
        except BaseException:
            self._loop_runner.stop()
            raise

    # -- life --------------------------------------------------------------------------------------

    async def _start(self) -> None:
        if self.status != Status.created:
            await super()._start()
            return
        try:
            await self._check()
            self._prepare()
        except BaseException:
            self.status = Status.closed
            self._remove_files()
            raise
        try:
            await super()._start()
            self._tending_task = asyncio.create_task(self._tending.begin())
            await asyncio.shield(self._tending_task)
        except BaseException as error:
            # Cancelled, too: what has been started and submitted until then must not stay.
            await self._close_failed()
            if isinstance(error.__cause__, ClusterProcessFailed):
                raise BadInput(f"{error.__cause__} (logs: {self.logs})") from None
            raise
        self._tending_task = asyncio.create_task(self._tending.run())

    async def _close_failed(self) -> None:
        if self.status != Status.closed:
            self.status = Status.failed
            await self._close()

    async def _check(self) -> None:
        """Refuse what SLURM would refuse, before anything is started or written."""
        groups = self.cluster_plan.groups.values()
        if self.cluster_plan.backend == "srun" and not ("SLURM_JOB_ID" in os.environ and shutil.which("srun")):
            raise BadInput("backend srun uses the allocation around it: start inside salloc or sbatch")
        if self.cluster_plan.backend == "slurm":
            texts = {group.name: self._script(group, f"{group.name}-check", "tcp://127.0.0.1:1") for group in groups}
            checks = (self._queue.check(name, text) for name, text in texts.items())
            refused = [error for error in await asyncio.gather(*checks, return_exceptions=True) if error]
            for error in refused:
                assert error is not None
                raise error
            await self._queue.check_walltimes(groups)

    def _prepare(self) -> None:
        assert self.cluster_plan.shared is not None
        for path in (self.logs, self.cluster_plan.shared):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadInput(f"cannot make {path}: {error.strerror}: give another directory") from None
        self._directory = OwnedDirectory("heddle-cluster-")
        if self.cluster_plan.tls:
            self.credentials = Credentials.temporary(self.cluster_plan.shared)
            self.security = self.credentials.security
        self.scheduler_spec["options"].update(
            directory=str(self._directory.path),
            logs=str(self.logs),
            credentials=self.credentials,
            dashboard_address=self.cluster_plan.dashboard_address,
        )

    def _remove_files(self) -> None:
        if self.credentials is not None:
            self.credentials.remove()
        if self._directory is not None:
            self._directory.remove()

    async def _close(self) -> None:
        if self.status in (Status.closing, Status.closed):
            await super()._close()
            return
        self._tending.stop()
        if self._tending_task is not None:
            # It is not cancelled: a submission that is cut off would leave a job whose id nobody knows.
            limit_s = _LAST_PASS_OF_SILENT_S if self._scheduler_is_silent else _LAST_PASS_S
            await asyncio.wait([self._tending_task], timeout=limit_s)
            self._tending_task.cancel()
        try:
            # First of all: nothing that fails below may leave a job behind.
            await self._cancel_all()
            self.worker_spec.clear()
            if self.scheduler is not None and self.scheduler.status == Status.running:
                # The scheduler first: it closes the workers, and jobs that find no scheduler have nothing to drain.
                await self._close_without_scheduler()
        finally:
            await super()._close()
            self._remove_files()

    # -- what the tending asks for -----------------------------------------------------------------

    def _note(self, line: str) -> None:
        _LOG.info("%s", line)
        self._on_event(line)

    def _job_spec(self, group: WorkerGroup, name: str) -> dict[str, Any]:
        options: dict[str, Any] = {"group": group, "script": self._script}
        if self.cluster_plan.backend == "slurm":
            from heddle_dask.live.clusters.slurm.slurm_job import SlurmGroupJob

            spec: dict[str, Any] = {"cls": SlurmGroupJob, "options": {**options, "queue": self._queue}}
        else:
            assert self._directory is not None, "it is prepared before it has jobs"
            options.update(logs=self.logs, records=self._directory.path)
            if self.cluster_plan.backend == "srun":
                options["command"] = srun_arguments(self.cluster_plan, group, name)
            spec = {
                "cls": SrunJob if self.cluster_plan.backend == "srun" else LocalGroupJob,
                "options": options,
            }
        names = worker_names(group, name)
        return spec if names == (name,) else {**spec, "group": [each.removeprefix(name) for each in names]}

    def _script(self, group: WorkerGroup, job_name: str, scheduler: str) -> str:
        return job_script(self.cluster_plan, group, job_name, scheduler, self.credentials)

    async def _cancel_jobs(self, names: list[str]) -> None:
        """Cancel the SLURM jobs among these, in one call; the other jobs are ended when they are closed."""
        if self.cluster_plan.backend == "srun":
            await self._queue.end_steps(os.environ["SLURM_JOB_ID"], names)
        if self.cluster_plan.backend != "slurm":
            return
        jobs = [self.workers[name] for name in names if name in self.workers]
        await self._queue.cancel([job.job_id for job in jobs if job.job_id])
        for job in jobs:
            job.forget()

    async def _cancel_all(self) -> None:
        """Cancel every job; those that SLURM does not hear of end by themselves, without a scheduler."""
        ids = [job.job_id for job in self.workers.values() if getattr(job, "job_id", None)]
        try:
            await self._cancel_jobs(list(self.workers))
        except SlurmFailed as error:
            self._note(f"jobs {' '.join(ids)} could not be cancelled: {error}: see to it with scancel {' '.join(ids)}")
            for job in self.workers.values():
                job.forget()

    # -- size --------------------------------------------------------------------------------------

    def scale(self, n: int | None = None, memory: Any = None, cores: Any = None, **groups: int) -> Any:
        """Ask for so many jobs of each named group, which the demand does not change from then on.

        Parameters
        ----------
        n
            Jobs of the only group, where the cluster has one; 0: as few jobs of all groups as their minimum allows.
        **groups
            Jobs by group: ``cluster.scale(gpu=4, cpu=2)``.

        Raises
        ------
        BadInput
            There is no such group, or the number is below its minimum or above its maximum.
        """
        if self.status in (Status.closing, Status.closed):
            self.worker_spec.clear()
            return NoOpAwaitable() if self.asynchronous else None
        if memory is not None or cores is not None:
            raise BadInput("scale takes jobs by group, not memory or cores: scale(gpu=4)")
        wanted = dict(groups)
        if n == 0:
            wanted.update({name: group.minimum for name, group in self.cluster_plan.groups.items()})
        elif n is not None:
            if len(self.cluster_plan.groups) > 1:
                raise BadInput(f"there are several groups: scale({next(iter(self.cluster_plan.groups))}={n})")
            wanted[next(iter(self.cluster_plan.groups))] = n
        for group, number in wanted.items():
            self._check_number(group, number)
        for group, number in wanted.items():
            self._tending.pin(group, number)
        return self._wake()

    def adapt(  # type: ignore[override]
        self, *, rule: ScalingRule | None = None, **limits: tuple[int, int]
    ) -> Any:
        """Scale all groups by demand (from now on, also those that `scale` has set).

        Parameters
        ----------
        rule
            Constants of the scaling; None: as before.
        **limits
            Minimum and maximum of groups by name: ``cluster.adapt(gpu=(1, 8))``.

        Raises
        ------
        BadInput
            There is no such group, or its limits exclude each other.
        """
        for group, (least, most) in limits.items():
            self._group(group)
            check_count(f"{group}: minimum", least, 0)
            check_count(f"{group}: maximum", most)
            if least > most:
                raise BadInput(f"{group}: minimum {least} exceeds maximum {most}")
        changed = {
            name: replace(self.cluster_plan.groups[name], minimum=least, maximum=most, initial=least)
            for name, (least, most) in limits.items()
        }
        self.cluster_plan = replace(self.cluster_plan, groups={**self.cluster_plan.groups, **changed})
        self._tending.adapt(self.cluster_plan, rule)
        return self._wake()

    def _group(self, name: str) -> WorkerGroup:
        group = self.cluster_plan.groups.get(name)
        if group is None:
            raise BadInput(f"there is no group {name!r}: the groups are {', '.join(self.cluster_plan.groups)}")
        return group

    def _check_number(self, name: str, number: int) -> None:
        group = self._group(name)
        check_count(f"number of jobs of {name}", number, 0)
        if not group.minimum <= number <= group.most:
            raise BadInput(
                f"{number} jobs of group {name}: its minimum is {group.minimum} and its maximum {group.most}"
            )

    def _wake(self) -> Any:
        assert self.loop is not None
        self.loop.add_callback(self._tending.wake)
        return NoOpAwaitable() if self.asynchronous else None

    # -- what a person sees ------------------------------------------------------------------------

    def jobs(self) -> tuple[JobRecord, ...]:
        """All jobs: those that are there, then the latest that are not, each with its state and reason."""
        return (*self._table.present.values(), *reversed(self._table.ended))

    @property
    def wanted(self) -> Mapping[str, int]:
        """Jobs that are wanted of each group now."""
        return dict(self._tending.wanted)

    @property
    def _table(self) -> JobTable:
        return self._tending.table

    @property
    def dashboard_link(self) -> str:
        """Address of the Dask dashboard, as it listens."""
        port = self.scheduler_info.get("services", {}).get("dashboard")
        return dashboard_url(self.cluster_plan, port) if port else ""

    def __repr__(self) -> str:
        groups = counts_text(self._table.counts(), self.wanted)
        return f"SlurmCluster({self.name}, {self.cluster_plan.backend}: {groups})"

    def _repr_html_(self, cluster_status: Any = None) -> str:
        title = f"{type(self).__name__} {self.name} ({self.cluster_plan.backend}), {self.scheduler_address}"
        counts, present = self._table.counts(), self._table.present.values()
        return html_table(title, counts, self.wanted, [*present, *self._table.ended][-10:], self.dashboard_link)

    def _ipython_display_(self, **kwargs: Any) -> None:
        """Dask's widget scales a cluster of equal workers: it is not shown."""
        from IPython.display import display

        display({"text/plain": repr(self), "text/html": self._repr_html_()}, raw=True)
