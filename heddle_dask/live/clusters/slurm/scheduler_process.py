"""Where the scheduler of a cluster of groups listens."""

from __future__ import annotations

import os

import dask
from distributed.utils import get_ip, get_ip_interface

from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan


def listen_options(plan: ClusterPlan) -> list[str]:
    """Options of ``dask scheduler``: one address that the workers reach, and not every address of this machine.

    Raises
    ------
    BadInput
        This machine has no such network interface.
    """
    port = ["--port", str(plan.scheduler_port)]
    if plan.interface is not None:
        try:
            return ["--host", get_ip_interface(plan.interface), *port]
        except ValueError as error:
            raise BadInput(f"interface {plan.interface}: {' '.join(str(error).split())}") from None
    own = "127.0.0.1" if plan.backend == "local" else get_ip()
    return ["--host", plan.host or own, *port]


def dashboard_url(plan: ClusterPlan, port: int) -> str:
    """The address of the dashboard, as it listens: Dask's own link names the scheduler's address in any case."""
    host = plan.dashboard_address.rpartition(":")[0]
    everywhere = host in ("0.0.0.0", "[::]", "::")
    template = dask.config.get("distributed.dashboard.link")
    values = {**os.environ, "scheme": "http", "host": get_ip() if everywhere else host, "port": port}
    try:
        return str(template.format(**values))
    except KeyError:  # a variable of a hub in which this process does not run
        return f"http://{values['host']}:{port}/status"
