"""The jobs of a cluster as it knows them: records, numbers, and what has become of earlier ones. No I/O."""

from __future__ import annotations

import html
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from heddle_dask.live.clusters.slurm.replacement import QUEUED, JobPhase, JobRecord, job_load
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, WorkerGroup
from heddle_dask.live.wire.cluster_messages import QueuedCapacity, WorkerLoad

_ENDED_KEPT = 200
# An ended job is forgotten in the pass that sees its end.
_COUNTED = {"ended": "leaving"}


def worker_names(group: WorkerGroup, job_name: str) -> tuple[str, ...]:
    """Names of the Dask workers of a job, as the launcher gives them."""
    number = max(1, group.engines)
    return (job_name,) if number == 1 else tuple(f"{job_name}-{index}" for index in range(number))


class JobTable:
    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self._numbers = dict.fromkeys(plan.groups, 0)
        self._trouble = ""
        # Jobs that have been submitted and not been forgotten, by name, in the order of their submission.
        self.present: dict[str, JobRecord] = {}
        self.ended: deque[JobRecord] = deque(maxlen=_ENDED_KEPT)  # the latest of the others

    def take_plan(self, plan: ClusterPlan) -> None:
        """The limits of the groups have changed."""
        self._plan = plan

    def new_name(self, group: str) -> str:
        """The name of the next job of a group; a number is used once, so that a replacement is no earlier job."""
        number = self._numbers[group]
        self._numbers[group] = number + 1
        return f"{group}-{number}"

    def put(self, record: JobRecord) -> None:
        self.present[record.name] = record

    def of_group(self, group: str) -> list[JobRecord]:
        return [job for job in self.present.values() if job.group == group]

    def forget(self, record: JobRecord) -> None:
        """A job has ended, or will not be asked about any more."""
        self.present.pop(record.name, None)
        self.ended.append(record)

    def failed(self, line: str) -> None:
        """Keep the latest failure for the drivers that wait."""
        self._trouble = line

    def take_loads(self, workers: Iterable[WorkerLoad], now_s: float) -> dict[str, WorkerLoad]:
        """Mark the jobs whose workers have all joined, and return the load of each job that has any worker."""
        by_name = {worker.name: worker for worker in workers}
        loads: dict[str, WorkerLoad] = {}
        for job in list(self.present.values()):
            names = worker_names(self._plan.groups[job.group], job.name)
            here = [by_name[name] for name in names if name in by_name]
            load = job_load(job.name, here)
            if load is not None:
                loads[job.name] = load
            if load is not None and len(here) == len(names):
                self.put(replace(job.joined(now_s, load.trouble), drains=load.drains))
            elif load is not None and load.drains:
                self.put(replace(job, drains=True))
        return loads

    def queued_capacity(self) -> QueuedCapacity:
        """What the jobs that have not joined will bring."""
        counts = dict.fromkeys(("engines", "tool_workers", "starting_engines", "starting_tool_workers"), 0)
        for job in self.present.values():
            if job.leaving or job.joined_s is not None:
                continue
            group = self._plan.groups[job.group]
            if group.role == "trainer":
                continue  # no rollout waits for it
            kind = "engines" if group.role == "rollout" else "tool_workers"
            if job.phase in QUEUED:
                counts[kind] += max(1, group.engines)
            elif job.phase is JobPhase.RUNNING:
                counts[f"starting_{kind}"] += max(1, group.engines)
        rollout = [group for group in self._plan.groups.values() if group.role == "rollout"]
        begins = max(1, sum(group.minimum * group.engines for group in rollout))
        return QueuedCapacity(**counts, engines_to_begin=begins, trouble=self._trouble)

    def counts(self) -> dict[str, dict[str, int]]:
        """Of every group: jobs that work, start, wait and leave."""
        table = {group: dict.fromkeys(("working", "starting", "queued", "leaving"), 0) for group in self._numbers}
        for job in self.present.values():
            table[job.group][_COUNTED.get(job.state, job.state)] += 1
        return table


def counts_text(counts: Mapping[str, Mapping[str, int]], wanted: Mapping[str, int]) -> str:
    parts = []
    for group, states in counts.items():
        others = [f"{number} {state}" for state, number in states.items() if number and state != "working"]
        told = f" ({', '.join(others)})" if others else ""
        parts.append(f"{group} {states['working']}/{wanted.get(group, 0)}{told}")
    return ", ".join(parts)


def html_table(
    title: str,
    counts: Mapping[str, Mapping[str, int]],
    wanted: Mapping[str, int],
    jobs: Iterable[JobRecord],
    link: str,
) -> str:
    """The cluster for a notebook: groups, and the reasons of jobs that do not work."""
    rows = [
        [group, str(wanted.get(group, 0)), *(str(number) for number in states.values())]
        for group, states in counts.items()
    ]
    table = _table(["group", "wanted", "working", "starting", "queued", "leaving"], rows)
    reasons = [[job.name, job.job_id, job.state, job.leaving or job.reason] for job in jobs]
    told = [row for row in reasons if row[3]]
    table += _table(["job", "id", "state", "reason"], told) if told else ""
    # A link of another scheme would run what somebody has written into the configuration.
    safe = re.match(r"https?://|/", link)
    shown = f'<p><a href="{html.escape(link)}" target="_blank">dashboard</a></p>' if safe else ""
    return f"<div><strong>{html.escape(title)}</strong>{table}{shown}</div>"


def _table(heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
