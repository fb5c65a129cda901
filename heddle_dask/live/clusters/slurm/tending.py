"""Keeps the jobs of a cluster as they are wanted: asks the queue and the scheduler, and applies the pure rules."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from heddle_dask.engines.supervised_process import log_tail
from heddle_dask.live.clusters.local import SupervisedCluster
from heddle_dask.live.clusters.slurm.job_script import job_log
from heddle_dask.live.clusters.slurm.job_table import JobTable, worker_names
from heddle_dask.live.clusters.slurm.jobs import LAST_LINES, LocalGroupJob, with_last_words
from heddle_dask.live.clusters.slurm.queue import SlurmFailed, SlurmQueue
from heddle_dask.live.clusters.slurm.queue_parsing import refusal_kind, short_refusal
from heddle_dask.live.clusters.slurm.replacement import (
    QUEUED,
    GroupRules,
    JobPhase,
    JobRecord,
    Losses,
    NotTaken,
    Observation,
    Review,
    SiteLimit,
    review,
    to_retire,
)
from heddle_dask.live.clusters.slurm.scaling import GroupSize, Held, ScalingRule, ScalingState, targets, told_idle
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, WorkerGroup
from heddle_dask.live.wire.cluster_messages import Demand, DrainWorkers, ExchangeDemand, WorkerLoad
from heddle_dask.live.wire.transport import ask_over

_LOG = logging.getLogger(__name__)
_PASS_S = 2.0
# What is announced as queued holds for so long without another announcement; a busy machine may take its time.
_ANNOUNCED_S = 60.0
# A replacement is submitted at least so long before the drain of the job before it.
_TAKES_S = 60.0


class Tending:
    """One pass after the other until it is stopped."""

    def __init__(
        self,
        cluster: SupervisedCluster,  # whose jobs are tended: they are the entries of its `worker_spec`
        plan: ClusterPlan,
        rule: ScalingRule,
        *,
        queue: SlurmQueue,  # the batch system
        # What the cluster needs to start a job of this name.
        job_spec: Callable[[WorkerGroup, str], dict[str, Any]],
        # Cancels the SLURM jobs among these; the other jobs are ended when they are closed.
        cancel_jobs: Callable[[list[str]], Awaitable[None]],
        note: Callable[[str], None],  # takes a line about what has become of a job
    ) -> None:
        self._cluster = cluster
        self._queue = queue
        self._job_spec = job_spec
        self._cancel_jobs = cancel_jobs
        self._note = note
        self._plan = plan
        self._rule = rule
        self._adaptive = plan.adaptive
        self._pinned: set[str] = set()
        self.wanted = {name: group.first for name, group in plan.groups.items()}  # jobs of each group
        self.table = JobTable(plan)
        self._losses: Mapping[str, Losses] = {}
        self._limits: Mapping[str, SiteLimit] = {}
        self._told_idle = ""
        # What the plan asks for at the start holds as long as what the demand has asked for.
        self._scaling = ScalingState({name: Held(number) for name, number in self.wanted.items()})
        # The longest time from a submission to the last of the job's workers, by group.
        self._took_s: dict[str, float] = {}
        self._asked_queue_s = time.monotonic()
        self._wakes = asyncio.Event()
        self._stopped = False
        self._drains: dict[str, asyncio.Task[None]] = {}
        self._silent = ""

    # -- orders ------------------------------------------------------------------------------------

    def pin(self, group: str, number: int) -> None:
        """Want so many jobs of a group, whatever the demand."""
        self._pinned.add(group)
        self.wanted[group] = number

    def adapt(self, plan: ClusterPlan, rule: ScalingRule | None) -> None:
        """Follow the demand in all groups, within the limits of this plan."""
        self._plan = plan
        self._rule = rule or self._rule
        self._adaptive = True
        self._pinned.clear()
        for name, group in plan.groups.items():
            self.wanted[name] = min(max(self.wanted[name], group.minimum), group.most)
        self.table.take_plan(plan)

    def wake(self) -> None:
        """Begin the next pass now."""
        self._wakes.set()

    def stop(self) -> None:
        """End after the pass that runs."""
        self._stopped = True
        for task in self._drains.values():
            task.cancel()
        self._wakes.set()

    # -- passes ------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Submit the jobs of the start."""
        now_s = time.monotonic()
        self._submit(dict(self.wanted), now_s)
        await self._correct()

    async def run(self) -> None:
        """One pass after the other; what fails in one is told and tried again in the next."""
        while not self._stopped:
            try:
                await self._pass(time.monotonic())
                self._silent = ""
            except (OSError, RuntimeError, SlurmFailed) as error:
                self._tell_once(" ".join(str(error).split()) or repr(error))
            except Exception:
                _LOG.exception("the jobs of the cluster are not tended")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wakes.wait(), _PASS_S)
            self._wakes.clear()

    def _tell_once(self, failure: str) -> None:
        if failure != self._silent:
            self._silent = failure
            self._note(f"jobs cannot be tended now: {failure}")

    async def _pass(self, now_s: float) -> None:
        try:
            await self._observe(now_s)
        finally:
            # The scheduler hears of the queue and tells of the work, also when SLURM does not answer.
            maxima = (group.maximum_of_pool for group in self._plan.groups.values())
            queued = replace(self.table.queued_capacity(), next_job_s=self._next_job_s(now_s))
            request = ExchangeDemand(queued, _ANNOUNCED_S, tuple(each for each in maxima if each is not None))
            demand = await ask_over(self._cluster.scheduler_comm, request)
        joined = {name for name, job in self.table.present.items() if job.joined_s is not None}
        loads = self.table.take_loads(demand.workers, now_s)
        self._tell_joined(joined)
        if self._adaptive:
            self._follow(demand, now_s)
        rules = {name: self._rules(group) for name, group in self._plan.groups.items()}
        jobs = self.table.present.values()
        decided = review(jobs, self.wanted, self._losses, self._limits, rules, now_s)
        self._tell_limits(decided.limits, now_s)
        self._losses, self._limits = decided.losses, decided.limits
        await self._apply(decided, loads, now_s)
        await self._close_late(loads)

    async def _observe(self, now_s: float) -> None:
        """Ask the processes of this machine every time, and SLURM for all jobs together when it is due."""
        asked: dict[str, str] = {}
        for record in list(self.table.present.values()):
            job = self._cluster.workers.get(record.name)
            if isinstance(job, LocalGroupJob):
                self.table.put(self._with_walltime(replace(record, job_id=job.job_id), job.observation(), now_s))
            elif job is not None and job.refused:
                kind = refusal_kind(job.refused)
                why = short_refusal(job.refused) if kind is NotTaken.LIMIT else f"SLURM refuses it: {job.refused}"
                refused = Observation(JobPhase.ENDED, why, refusal=kind)
                self.table.put(record.observed(refused, now_s))
            elif job is not None and job.job_id:
                self.table.put(replace(record, job_id=job.job_id))
                if record.phase is not JobPhase.ENDED:
                    asked[job.job_id] = record.name
        if asked and now_s - self._asked_queue_s >= self._plan.poll_s:
            self._asked_queue_s = now_s
            for name, seen in (await self._queue.observe(asked)).items():
                before = self.table.present[name]
                seen = await self._with_last_words(before, seen)
                self.table.put(before.observed(seen, time.monotonic()))
                if seen.phase is JobPhase.PENDING and seen.reason not in ("", before.reason):
                    self._note(f"{name} waits in the queue: {seen.reason}")

    async def _with_last_words(self, job: JobRecord, seen: Observation) -> Observation:
        if job.leaving or self._plan.logs is None:
            return seen
        log = job_log(self._plan.logs, job.name, job.job_id)
        return with_last_words(seen, log, await asyncio.to_thread(log_tail, log, LAST_LINES))

    def _with_walltime(self, record: JobRecord, seen: Observation, now_s: float) -> JobRecord:
        """A process of this machine has no batch system that ends it: the group's walltime says when it leaves."""
        record = record.observed(seen, now_s)
        walltime_s = self._plan.groups[record.group].walltime_s
        if walltime_s is None or record.running_s is None:
            return record
        return replace(record, ends_s=record.running_s + walltime_s)

    def _tell_joined(self, before: set[str]) -> None:
        for name, job in self.table.present.items():
            if job.joined_s is not None and name not in before:
                took_s = job.joined_s - job.submitted_s
                self._took_s[job.group] = max(took_s, self._took_s.get(job.group, 0.0))
                self._note(f"{name} has joined, {took_s:.0f} s after its submission")

    def _follow(self, demand: Demand, now_s: float) -> None:
        sizes = [self._size(group, now_s) for group in self._plan.groups.values()]
        wanted, self._scaling = targets(demand, sizes, self._scaling, now_s, self._rule)
        idle = told_idle(demand, self._scaling, self._rule)
        if idle and not self._told_idle:
            self._note(idle)
        self._told_idle = idle
        for name, number in wanted.items():
            if name not in self._pinned:
                self.wanted[name] = number

    def _size(self, group: WorkerGroup, now_s: float) -> GroupSize:
        waits = (job for job in self.table.of_group(group.name) if job.phase in QUEUED and not job.leaving)
        stuck = sum(now_s - job.submitted_s >= self._rule.spill_s for job in waits)
        units = group.engines if group.role == "rollout" else group.tool_cpus
        return GroupSize(group.name, group.role, units, group.minimum, group.most, stuck)

    def _rules(self, group: WorkerGroup) -> GroupRules:
        took_s = max(_TAKES_S, self._took_s.get(group.name, 0.0))
        lead_s = group.drain_s + min(took_s, group.start_timeout_s)
        return GroupRules(group.start_timeout_s, lead_s, group.minimum)

    def _tell_limits(self, limits: Mapping[str, SiteLimit], now_s: float) -> None:
        """A limit that is new, or another number than before, is told once."""
        for group, limit in limits.items():
            before = self._limits.get(group)
            if before is not None and before.jobs == limit.jobs:
                continue
            told = f"{group}: SLURM takes {limit.jobs} jobs at present ({limit.reason})"
            self._note(f"{told}; one more is tried in {limit.probe_s - now_s:.0f} s")
            if limit.jobs < self._plan.groups[group].minimum:
                self.table.failed(told)

    # -- what is done ------------------------------------------------------------------------------

    async def _apply(self, decided: Review, loads: Mapping[str, WorkerLoad], now_s: float) -> None:
        closing = [job.name for job in decided.gone]
        for job in decided.gone:
            if job.refusal is NotTaken.LIMIT:
                self.table.forget(job)
                continue  # told with the limit
            told = f"{job.name} is gone: {job.reason}"
            if not (job.leaving or job.planned):
                self.table.failed(f"{job.name}: {job.reason}")
                told += self._told_delay(job.group, now_s)
            self._note(told)
            self.table.forget(job)
        for name, reason in decided.cancel.items():
            job = self.table.present[name]
            self.table.failed(f"{name}: {reason}")
            self._note(f"{name} is cancelled: {reason}{self._told_delay(job.group, now_s)}")
            self.table.forget(replace(job, leaving=reason))
            closing.append(name)
        for group, number in decided.surplus.items():
            lead_s = self._rules(self._plan.groups[group]).lead_s
            serving = [job for job in self.table.of_group(group) if job.serves(lead_s, now_s)]
            for job in to_retire(serving, loads, number):
                if self._let_go(job, loads.get(job.name)):
                    closing.append(job.name)
        self._submit(decided.submit, now_s)
        await self._close_jobs(closing)

    def _told_delay(self, group: str, now_s: float) -> str:
        losses = self._losses.get(group, Losses())
        wait_s = losses.not_before_s - now_s
        return f"; failure {losses.in_a_row} in a row, the next job in {wait_s:.0f} s" if wait_s > 0 else ""

    def _next_job_s(self, now_s: float) -> float:
        """Seconds until a job with engines may be submitted again; 0: nothing delays one."""
        rollout = [name for name, group in self._plan.groups.items() if group.role == "rollout"]
        times = [self._losses[name].not_before_s for name in rollout if name in self._losses]
        times += [self._limits[name].probe_s for name in rollout if name in self._limits]
        return min((at_s - now_s for at_s in times if at_s > now_s), default=0.0)

    def _submit(self, numbers: Mapping[str, int], now_s: float) -> None:
        for group, number in numbers.items():
            for _ in range(number):
                name = self.table.new_name(group)
                self._cluster.worker_spec[name] = self._job_spec(self._plan.groups[group], name)
                self.table.put(JobRecord(name, group, now_s))
                self._note(f"{name} is submitted")

    def _let_go(self, job: JobRecord, load: WorkerLoad | None) -> bool:
        """Have a job leave; True if it may be closed now."""
        if job.joined_s is None or load is None:
            self._note(f"{job.name} is cancelled: it is not needed any more")
            self.table.forget(replace(job, leaving="not needed any more"))
            return True
        self.table.put(replace(job, leaving="scaled down"))
        self._note(f"{job.name} leaves: it is not needed any more")
        self._drains[job.name] = asyncio.ensure_future(self._drain(job))
        return False

    async def _drain(self, job: JobRecord) -> None:
        group = self._plan.groups[job.group]
        names = worker_names(group, job.name)
        late: tuple[str, ...] = names
        try:
            late = (await ask_over(self._cluster.scheduler_comm, DrainWorkers(names, group.drain_s))).late
        except (OSError, RuntimeError) as error:
            self._note(f"{job.name} could not be drained: {error}")
        self._drains.pop(job.name, None)
        if late:
            self._note(f"{job.name} holds work after {group.drain_s:.0f} s: it stays until it does not")
            return
        try:
            await self._close_left(job.name)
        except (OSError, RuntimeError, SlurmFailed) as error:  # the next pass closes it again
            self._note(f"{job.name} could not be closed: {error}")

    async def _close_left(self, name: str) -> None:
        leaving = self.table.present.get(name)
        if leaving is not None:
            self.table.forget(leaving)
        await self._close_jobs([name])

    async def _close_late(self, loads: Mapping[str, WorkerLoad]) -> None:
        """Close the jobs that were not drained in time and hold nothing any more: there is no hurry."""
        for job in list(self.table.present.values()):
            load = loads.get(job.name)
            if job.leaving and job.name not in self._drains and (load is None or load.idle):
                await self._close_left(job.name)

    async def _close_jobs(self, names: Iterable[str]) -> None:
        names = list(names)
        for name in names:
            self._cluster.worker_spec.pop(name, None)
        await self._cancel_jobs(names)
        await self._correct()

    async def _correct(self) -> None:
        # Shielded: a submission that is cut off would leave a job whose id nobody knows.
        await asyncio.shield(self._cluster._correct_state())
