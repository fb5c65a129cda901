"""Which jobs are submitted, cancelled, forgotten and replaced: pure rules over records of jobs.

A job is *present* from its submission until the queue says that it has ended. It *serves* unless it leaves, or its
walltime ends so soon that its replacement has to be queued. All times are seconds on one monotonic clock.

What SLURM does not take is no failure of a job. A limit of the site over several jobs, such as
`QOSMaxSubmitJobPerUserLimit`, is the group's present capacity: below it jobs are replaced at once, and now and then one
more is tried, since the limit may count jobs of others. A controller that does not answer is asked again soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from heddle_dask.live.wire.cluster_messages import WorkerLoad

FIRST_DELAY_S = 2.0
LONGEST_DELAY_S = 300.0
PROBE_S, SHORT_PROBE_S = 300.0, 30.0
"""One job more than a limit allowed is tried after so long: the second while the group is below its minimum, or below
what the limit allowed before."""
SILENCE_S = 10.0
"""A controller that did not take a job, since it did not answer, is asked again after so long."""
HEALTHY_S = 60.0
"""A job that has served so long was asked for in the right way: its group's failures are not in a row any more."""


class NotTaken(StrEnum):
    """Why SLURM has not taken a job, where that says nothing about the job."""

    NONE = ""
    LIMIT = "limit"
    SILENCE = "silence"


class JobPhase(StrEnum):
    """Where a job is, as far as the queue says."""

    SUBMITTED = "submitted"
    PENDING = "pending"
    REFUSED = "refused"
    RUNNING = "running"
    ENDED = "ended"


QUEUED = (JobPhase.SUBMITTED, JobPhase.PENDING)


@dataclass(frozen=True, slots=True)
class Observation:
    """What a queue says of one job."""

    phase: JobPhase
    reason: str = ""  # why it is pending, refused, or has ended
    ends_s: float | None = None  # when its walltime ends; None where that is unknown
    # Whether an end was to be expected: the job left by itself, or its walltime has passed.
    planned: bool = False
    refusal: NotTaken = NotTaken.NONE


@dataclass(frozen=True, slots=True, repr=False)
class JobRecord:
    """One job, from its submission to its end."""

    name: str
    group: str
    submitted_s: float
    job_id: str = ""
    phase: JobPhase = JobPhase.SUBMITTED
    reason: str = ""
    planned: bool = False
    refusal: NotTaken = NotTaken.NONE
    # `running_s`, `joined_s`, `seen_s`: when it was first seen running, when its workers had first joined, and when
    # they were last seen.
    running_s: float | None = None
    joined_s: float | None = None
    seen_s: float | None = None
    ends_s: float | None = None  # when its walltime ends
    # `failing_s`, `trouble`: since when an engine of it has failed to start, and why; None and empty: none does.
    failing_s: float | None = None
    trouble: str = ""
    drains: bool = False  # whether it leaves by itself, since its time is over or it is being preempted
    leaving: str = ""  # why it is being drained or cancelled by the cluster; empty: it is not

    def __repr__(self) -> str:
        told = self.leaving or self.reason or self.trouble
        return f"<{self.name}, job {self.job_id or '?'}: {self.state}{', ' if told else ''}{told}>"

    @property
    def state(self) -> str:
        """One word: queued, starting, working, leaving or ended."""
        if self.phase is JobPhase.ENDED:
            return "ended"
        if self.leaving or self.drains or self.phase is JobPhase.REFUSED:
            return "leaving"
        if self.phase in QUEUED:
            return "queued"
        return "starting" if self.joined_s is None else "working"

    def observed(self, seen: Observation, now_s: float) -> JobRecord:
        """This record after the queue was asked; an end is final."""
        if self.phase is JobPhase.ENDED:
            return self
        began = now_s if seen.phase is JobPhase.RUNNING and self.running_s is None else self.running_s
        return replace(
            self,
            phase=seen.phase,
            reason=seen.reason,
            planned=seen.planned,
            refusal=seen.refusal,
            running_s=began,
            ends_s=seen.ends_s if seen.ends_s is not None else self.ends_s,
        )

    def joined(self, now_s: float, trouble: str = "") -> JobRecord:
        """This record when all its workers are on the scheduler: the job runs, whatever the queue said before.

        Parameters
        ----------
        trouble
            Why an engine of it does not start.
        """
        if self.phase is JobPhase.ENDED:
            return self
        return replace(
            self,
            phase=JobPhase.RUNNING,
            reason="",
            running_s=now_s if self.running_s is None else self.running_s,
            joined_s=now_s if self.joined_s is None else self.joined_s,
            seen_s=now_s,
            failing_s=None if not trouble else now_s if self.failing_s is None else self.failing_s,
            trouble=trouble,
        )

    def healthy(self, now_s: float) -> bool:
        """Whether it has served for so long that it was asked for in the right way."""
        return self.joined_s is not None and now_s - self.joined_s >= HEALTHY_S

    def serves(self, lead_s: float, now_s: float) -> bool:
        """Whether it counts towards the number that is wanted of its group."""
        if self.leaving or self.drains or self.phase in (JobPhase.ENDED, JobPhase.REFUSED):
            return False
        if self.ends_s is None:
            return True
        # A job that is shorter than the lead serves for half of its time: else none would ever serve.
        began_s = self.submitted_s if self.running_s is None else self.running_s
        return self.ends_s - now_s > min(lead_s, (self.ends_s - began_s) / 2)


@dataclass(frozen=True, slots=True)
class Losses:
    """Failures of a group's jobs in a row, when the latest was, and when the next job may be submitted."""

    in_a_row: int = 0
    failed_s: float = 0.0
    not_before_s: float = 0.0

    def after_failure(self, now_s: float) -> Losses:
        """These after one more failure, which doubles the delay; failures at one moment have one cause."""
        if self.in_a_row and now_s == self.failed_s:
            return self
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self.in_a_row, 30))
        return Losses(self.in_a_row + 1, now_s, now_s + delay_s)

    def after_end(self, job: JobRecord, now_s: float) -> Losses:
        if job.refusal is NotTaken.LIMIT:
            return self
        if job.refusal is NotTaken.SILENCE:
            return replace(self, not_before_s=max(self.not_before_s, now_s + SILENCE_S))
        if job.leaving or (job.planned and job.healthy(now_s)):
            return self
        return self.after_failure(now_s)

    def with_health(self, job: JobRecord, now_s: float) -> Losses:
        """These while this job is there: one that serves well since the latest failure ends the row."""
        joined_since = job.joined_s is not None and job.joined_s > self.failed_s
        return Losses() if self.in_a_row and joined_since and job.healthy(now_s) else self


@dataclass(frozen=True, slots=True)
class SiteLimit:
    """Jobs of a group that the site's limits allow at present, and when one more is tried."""

    jobs: int
    reason: str
    probe_s: float


@dataclass(frozen=True, slots=True)
class GroupRules:
    """The minimum of a group, and times of its jobs."""

    # Within this, from when a job runs, its workers must join; and come back, when they were away.
    start_timeout_s: float
    lead_s: float = 0.0  # so long before the end of a job's walltime its replacement is submitted
    minimum: int = 0


@dataclass(frozen=True, slots=True)
class Review:
    """What is to be done."""

    gone: tuple[JobRecord, ...] = ()  # jobs that have ended, to be forgotten
    cancel: Mapping[str, str] = field(default_factory=dict)  # jobs to be cancelled, by name, with the reason
    # `submit`, `surplus`: jobs to be submitted now, and jobs too many, by group.
    submit: Mapping[str, int] = field(default_factory=dict)
    surplus: Mapping[str, int] = field(default_factory=dict)
    # `losses` of every group, `limits` of those that have met one, for the next review.
    losses: Mapping[str, Losses] = field(default_factory=dict)
    limits: Mapping[str, SiteLimit] = field(default_factory=dict)


def review(
    jobs: Iterable[JobRecord],
    wanted: Mapping[str, int],
    losses: Mapping[str, Losses],
    limits: Mapping[str, SiteLimit],
    rules: Mapping[str, GroupRules],
    now_s: float,
) -> Review:
    present, gone, cancel = [], [], {}
    after = {group: losses.get(group, Losses()) for group in wanted}
    for job in jobs:
        if job.phase is JobPhase.ENDED:
            gone.append(job)
            after[job.group] = after[job.group].after_end(job, now_s)
            continue
        present.append(job)
        after[job.group] = after[job.group].with_health(job, now_s)
        why = "" if job.leaving else reason_to_cancel(job, rules[job.group], now_s)
        if why:
            cancel[job.name] = why
            after[job.group] = after[job.group].after_failure(now_s)
    submit, surplus, known = {}, {}, {}
    for group, number in wanted.items():
        mine = [job for job in present if job.group == group and job.name not in cancel]
        limit = _limit(limits.get(group), mine, [job for job in gone if job.group == group], rules[group], now_s)
        if limit is not None:
            known[group] = limit
        serving = sum(job.serves(rules[group].lead_s, now_s) for job in mine)
        if serving > number:
            surplus[group] = serving - number
        elif serving < number and now_s >= after[group].not_before_s:
            more = _within(limit, number - serving, mine, now_s)
            if more > 0:
                submit[group] = more
    return Review(tuple(gone), cancel, submit, surplus, after, known)


def _limit(
    before: SiteLimit | None,
    present: Sequence[JobRecord],
    gone: Sequence[JobRecord],
    rules: GroupRules,
    now_s: float,
) -> SiteLimit | None:
    """The limit that a group has met; None: none, or it has more jobs than that by now."""
    taken = sum(bool(job.job_id) for job in present)
    refused = next((job for job in gone if job.refusal is NotTaken.LIMIT), None)
    if refused is None:
        return before if before is not None and taken <= before.jobs else None
    fallen = before is not None and taken < before.jobs
    again_s = SHORT_PROBE_S if fallen or taken < rules.minimum else PROBE_S
    return SiteLimit(taken, refused.reason, now_s + again_s)


def _within(limit: SiteLimit | None, number: int, present: Sequence[JobRecord], now_s: float) -> int:
    """How many of that number of jobs more are submitted now."""
    if limit is None:
        return number
    if len(present) < limit.jobs:
        return min(number, limit.jobs - len(present))
    answered = all(job.job_id for job in present)
    return int(answered and now_s >= limit.probe_s)


def reason_to_cancel(job: JobRecord, times: GroupRules, now_s: float) -> str:
    """Why a job cannot come to serve; empty: it may. Time in the queue does not count."""
    if job.phase is JobPhase.REFUSED:
        return f"it can never start: {job.reason}"
    if job.phase is not JobPhase.RUNNING or job.running_s is None:
        return ""
    if job.failing_s is not None and now_s - job.failing_s > times.start_timeout_s:
        return f"its engine has not started for {times.start_timeout_s:.0f} s: {job.trouble}"
    since_s = job.running_s if job.seen_s is None else job.seen_s
    if now_s - since_s > times.start_timeout_s:
        what = "has not joined" if job.joined_s is None else "has been away"
        return f"it runs, and its worker {what} for {times.start_timeout_s:.0f} s"
    return ""


def to_retire(jobs: Iterable[JobRecord], loads: Mapping[str, WorkerLoad], number: int) -> list[JobRecord]:
    """The jobs of one group that are missed least: first those that wait, then idle ones, then the least loaded.

    Parameters
    ----------
    loads
        Of every job whose workers have joined (`job_load`).
    """
    candidates = [job for job in jobs if not job.leaving and job.phase is not JobPhase.ENDED]

    def missed(job: JobRecord) -> tuple[int, int, int, float]:
        load = loads.get(job.name)
        if job.phase in (*QUEUED, JobPhase.REFUSED):
            return (0, 0, 0, -job.submitted_s)
        if job.joined_s is None or load is None:
            return (1, 0, 0, -job.submitted_s)
        if load.idle:
            return (2, 0, 0, -job.submitted_s)
        return (3, load.resident_tokens, load.busy + load.residents + load.results, -job.submitted_s)

    return sorted(candidates, key=missed)[:number]


def job_load(name: str, workers: Sequence[WorkerLoad]) -> WorkerLoad | None:
    """The loads of a job's workers, added up; None when it has none."""
    if not workers:
        return None
    return WorkerLoad(
        name,
        all(worker.serves for worker in workers),
        sum(worker.busy for worker in workers),
        sum(worker.residents for worker in workers),
        sum(worker.resident_tokens for worker in workers),
        sum(worker.results for worker in workers),
        next((worker.trouble for worker in workers if worker.trouble), ""),
        any(worker.drains for worker in workers),
    )
