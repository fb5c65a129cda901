"""What a site allows, as `sinfo` and `sacctmgr` print it."""

from __future__ import annotations

from heddle_dask.live.clusters.slurm.site_limits import SiteLimits, site_limits
from heddle_dask.live.clusters.slurm.worker_group import WorkerGroup

PARTITIONS = "gpu|up\ncpu|down\n"
QOS = "normal|||| \ntwo|2|8||\nsmall||||40\n"
ASSOCIATIONS = "root||||||\nlab|ada|normal|6||20|\nlab|bob|two||||\n"


def group(**values: object) -> WorkerGroup:
    return WorkerGroup("g", "rollout", gres="gpu:1", **{"maximum": 4, **values})  # type: ignore[arg-type]


def test_the_least_limit_of_each_is_read() -> None:
    found = site_limits(PARTITIONS, QOS, ASSOCIATIONS, "ada")
    assert found == SiteLimits(
        {"gpu": "up", "cpu": "down"}, {"two": 2, "small": 40}, {"lab": 6}, {"lab": "normal"}, True
    )


def test_what_is_under_the_groups_maximum_is_a_problem() -> None:
    ada, bob = (site_limits(PARTITIONS, QOS, ASSOCIATIONS, user) for user in ("ada", "bob"))
    assert list(ada.problems(group(partition="gpu"))) == []
    assert list(ada.problems(group(partition="gpu,cpu"))) == ["partition cpu is down: its jobs wait until it is up"]
    two = "QOS two takes 2 jobs at a time, and the group has up to 4"
    assert list(ada.problems(group(qos="two"))) == [two]
    assert list(bob.problems(group())) == [two], "the QOS that his jobs have without naming one"
    assert list(ada.problems(group(maximum=8))) == ["account lab takes 6 jobs at a time, and the group has up to 8"]


def test_without_accounting_nothing_is_known() -> None:
    found = site_limits(PARTITIONS, None, None, "ada")
    assert not found.known and list(found.problems(group(qos="two"))) == []
