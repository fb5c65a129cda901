"""What a site allows a user, from `sinfo` and `sacctmgr`. Pure text; `queue` runs the commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from heddle_dask.live.clusters.slurm.worker_group import WorkerGroup

PARTITIONS = ("sinfo", "-h", "-o", "%R|%a")
QOS = ("sacctmgr", "-nP", "show", "qos", "format=name,maxsubmitpu,maxjobspu,grpsubmit,grpjobs")
_LIMITS = "maxsubmit,maxjobs,grpsubmit,grpjobs"
ASSOCIATIONS = ("sacctmgr", "-nP", "show", "assoc", f"format=account,user,defaultqos,{_LIMITS}")


@dataclass(frozen=True, slots=True)
class SiteLimits:
    """Partitions by state, and jobs that a QOS and an account take at a time.

    Attributes
    ----------
    qos, accounts
        The least of what limits jobs, by name; those without a limit are left out.
    default_qos
        The QOS of an account, where a job names none.
    known
        Whether accounting has answered.
    """

    partitions: Mapping[str, str] = field(default_factory=dict)
    qos: Mapping[str, int] = field(default_factory=dict)
    accounts: Mapping[str, int] = field(default_factory=dict)
    default_qos: Mapping[str, str] = field(default_factory=dict)
    known: bool = False

    def problems(self, group: WorkerGroup) -> Iterator[str]:
        """What of it keeps jobs of a group from starting."""
        for name in (group.partition or "").split(","):
            state = self.partitions.get(name, "up")
            if state != "up":
                yield f"partition {name} is {state}: its jobs wait until it is up"
        account = group.account or next(iter(self.default_qos), "")
        qos = group.qos or self.default_qos.get(account, "")
        for what, name, limits in (("QOS", qos, self.qos), ("account", account, self.accounts)):
            most = limits.get(name)
            if most is not None and most < group.most:
                yield f"{what} {name} takes {most} jobs at a time, and the group has up to {group.most}"


def site_limits(partitions: str, qos: str | None, associations: str | None, user: str) -> SiteLimits:
    """Read what the commands have printed; None: accounting is not there."""
    mine = [row for row in _rows(associations or "") if row[1] == user]
    return SiteLimits(
        {row[0]: row[1] for row in _rows(partitions)},
        _least((row[0], row[1:]) for row in _rows(qos or "")),
        _least((row[0], row[3:]) for row in mine),
        {row[0]: row[2] for row in mine},
        qos is not None and associations is not None,
    )


def _rows(printed: str) -> list[list[str]]:
    return [line.strip().split("|") for line in printed.splitlines() if "|" in line]


def _least(limits: Iterable[tuple[str, Sequence[str]]]) -> dict[str, int]:
    numbers = {name: [int(cell) for cell in cells if cell.isdecimal()] for name, cells in limits}
    return {name: min(found) for name, found in numbers.items() if found}
