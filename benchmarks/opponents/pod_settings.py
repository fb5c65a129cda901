"""Nodes, pods and control plane of Kubernetes, for `opponents.pods`."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.errors import BadInput


@dataclass(frozen=True, slots=True)
class PodSettings:
    """Pods and the control plane that starts them.

    Attributes
    ----------
    nodes
        CPUs of each node.
    request_cpus
        By which pods are packed: a node has room for its CPUs over this.
    limit_cpus
        Most CPUs of a pod, and the parallelism of its commands.
    start_s
        Seconds from the binding of a pod to its running container.
    starts_per_s
        Pods that the control plane binds per second; 0: no limit.
    exec_s
        Seconds that sending a command into a pod adds.
    execs_per_s
        Commands that the control plane sends into pods per second; 0: no limit.
    start_timeout_s, start_tries
        A pod that does not run after so long is deleted and made again, behind all others, so many times in all; then
        the call fails. 0: no limit.
    """

    nodes: tuple[int, ...]
    request_cpus: float = 0.5
    limit_cpus: float = 4.0
    start_s: float = 0.0
    starts_per_s: float = 0.0
    exec_s: float = 0.0
    execs_per_s: float = 0.0
    start_timeout_s: float = 0.0
    start_tries: int = 3

    def __post_init__(self) -> None:
        if not self.nodes or min(self.nodes) < max(1.0, self.request_cpus) or self.request_cpus <= 0:
            raise BadInput("pods: give nodes with room for the request of a pod, and a request above 0")
        if self.limit_cpus <= 0:
            raise BadInput("pods: limit_cpus must be above 0")
