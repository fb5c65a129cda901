"""What ``heddle doctor --cluster FILE`` shows: what SLURM says to each group of the file, and the job scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from distributed.security import Security

from heddle_dask.cli.doctor.checks import Check
from heddle_dask.cli.group_cluster import plan_of_file
from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.credentials import Credentials
from heddle_dask.live.clusters.slurm.job_script import job_script
from heddle_dask.live.clusters.slurm.queue import SlurmQueue
from heddle_dask.live.clusters.slurm.site_limits import SiteLimits
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, WorkerGroup

# In place of what is known when a cluster starts.
_LOGS = Path("/LOGS")
_SCHEDULER = "HOST:PORT"
_KEYS = Path("/SHARED/tls")


def plan_to_check(path: Path) -> ClusterPlan:
    plan = plan_of_file(path)
    if plan is None:
        raise BadInput(f"--cluster {path} has no groups: give tables [groups.NAME] (docs/slurm.md)")
    return plan


def cluster_checks(plan: ClusterPlan) -> Iterator[Check]:
    """Ask SLURM about each group and what the site allows, without submitting anything."""
    limits = asyncio.run(SlurmQueue().site_limits()) if plan.backend == "slurm" else SiteLimits()
    for group in plan.groups.values():
        yield _group_check(plan, group, limits)
    if plan.backend == "slurm" and not limits.known:
        yield Check("accounts", "ok", "SLURM tells no limits of jobs (sacctmgr): they show when jobs are refused")
    yield from _path_checks(plan)


def _group_check(plan: ClusterPlan, group: WorkerGroup, limits: SiteLimits) -> Check:
    found = f"{group.role}, {group.minimum} to {group.most} jobs"
    if plan.backend != "slurm":
        return Check(f"group {group.name}", "ok", f"{found} (backend {plan.backend})")
    try:
        asyncio.run(SlurmQueue().check(group.name, _script(plan, group)))
    except BadInput as error:
        return Check(f"group {group.name}", "fail", found, str(error))
    problems = "; ".join(limits.problems(group))
    if problems:
        return Check(f"group {group.name}", "warn", found, problems)
    return Check(f"group {group.name}", "ok", f"{found}; SLURM accepts them")


def _path_checks(plan: ClusterPlan) -> Iterator[Check]:
    """The interpreter and the folders as this machine sees them: nodes usually have them at the same place."""
    if plan.python is not None and not Path(plan.python).is_file():
        yield Check("python", "warn", plan.python, "no such file on this machine: jobs run it on the nodes")
    for name, folder in (("logs", plan.logs), ("shared", plan.shared)):
        if folder is not None and not folder.parent.is_dir():
            yield Check(name, "warn", str(folder), f"{folder.parent} is not on this machine: jobs write there")


def example_scripts(plan: ClusterPlan) -> dict[str, str]:
    """The script of the first job of each group, by group; words in capitals are known when the cluster starts."""
    shown = plan if plan.logs is not None else replace(plan, logs=_LOGS)
    return {group.name: _script(shown, group) for group in plan.groups.values()}


def _script(plan: ClusterPlan, group: WorkerGroup) -> str:
    keys = Path(plan.shared or _KEYS)
    credentials = Credentials(Security(), keys / "certificate.pem", keys / "key.pem") if plan.tls else None
    scheme = "tls" if plan.tls else "tcp"
    return job_script(plan, group, f"{group.name}-0", f"{scheme}://{_SCHEDULER}", credentials)
