"""What of a cluster is unlike its plain form, for the conditions that a simulation prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heddle_dask.sim.clusters import Cluster


def cluster_conditions(cluster: Cluster) -> dict[str, object]:
    """Measured tables, wrong beliefs and faults; empty where there are none."""
    from heddle_dask.sim.clusters import FAULTS

    said: dict[str, object] = {}
    if cluster.tables:
        said["tables"] = " ".join(cluster.tables)
    if cluster.believed_gpu:
        said["believed gpu"] = cluster.believed_gpu
    told = {name: getattr(cluster.faults, name) for name in FAULTS}
    faults = [f"{name.replace('_', '-')} {value:g}" for name, value in told.items() if value]
    if faults:
        said["faults"] = " ".join(faults)
    return said
