"""A cluster on this machine: the scheduler, rollout workers and tool workers, each in a process of its own.

Every process has a watchdog: when the process that made the cluster dies, in any way, the watchdog ends its process and
the engines there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.core import Status, rpc
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import ProcessInterface, SpecCluster

from heddle_dask.core.errors import BadInput, HeddleError, check_count
from heddle_dask.core.notebook import facts_html
from heddle_dask.core.resources import CPU_POOL, GPU_POOL, GPUS, MEMORY, PoolMaximum, Resources, checked_pool
from heddle_dask.engines.supervised_process import SupervisedProcess
from heddle_dask.isolation.cgroups import find_cgroups
from heddle_dask.isolation.cores import memory_bytes as machine_memory_bytes
from heddle_dask.live.clusters.credentials import Credentials
from heddle_dask.live.clusters.hardware import hardware_of_workers
from heddle_dask.live.clusters.owned_directory import OwnedDirectory
from heddle_dask.live.clusters.worker_command import PRELOADS, QUICK_LOOP, worker_arguments
from heddle_dask.live.wire.cluster_messages import ExchangeDemand, QueuedCapacity
from heddle_dask.live.wire.messages import (
    ENGINE_LOGS_VARIABLE,
    ENGINE_RESOURCE,
    HARDWARE_VARIABLE,
    MEMORY_VARIABLE,
    MODEL_RESOURCE,
    POOL_VARIABLE,
    SLOT_BYTES_RESOURCE,
    TOOL_RESOURCE,
    TRAINER_RESOURCE,
    TRAINER_THREADS_VARIABLE,
)
from heddle_dask.live.wire.transport import ask_over

# A busy machine takes its time; a process that ends is noticed at once.
START_TIMEOUT_S = 180.0
_NOT_SCALED = (
    "a LocalRolloutCluster keeps the workers that it was made with: ask for more engines when you make it, or scale "
    "the groups of a SlurmCluster whose backend is 'local'"
)

_SCHEDULER_ENV = {
    **QUICK_LOOP,
    "DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING": "False",
    # Dask blames every task of a dead worker; the controller counts losses itself.
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "100",
    "DASK_DISTRIBUTED__SCHEDULER__ACTIVE_MEMORY_MANAGER__START": "False",
}


class ClusterProcessFailed(HeddleError):
    """A scheduler or worker process of the local cluster ended while it was starting."""


class SupervisedDask(ProcessInterface):
    """A Dask command-line program under a watchdog."""

    def __init__(self, arguments: Sequence[str], directory: str, name: str, env: Mapping[str, str], logs: str) -> None:
        argv = [sys.executable, "-m", "dask", *arguments]
        self._process = SupervisedProcess(argv, Path(logs), name, env=env, records=Path(directory), grace_s=8.0)
        super().__init__()

    async def start(self) -> None:
        self._process.launch()
        await self.wait_until_up()
        await super().start()

    async def wait_until_up(self) -> None:
        """For subclasses: wait until the program answers."""

    async def close(self) -> None:
        """Ask it to end; after its grace everything it started is killed."""
        # A stopped program cannot end by itself: its grace would be lost time.
        await self._process.stop(0.0 if self._process.is_stopped() else None)
        await super().close()

    def is_stopped(self) -> bool:
        """Whether the program is stopped (SIGSTOP): nothing that is asked of it will be answered."""
        return self._process.is_stopped()

    def failed(self) -> str | None:
        """One line with the end of its log when it has ended, else None."""
        if self._process.returncode is None:
            return None
        tail = " | ".join(self._process.log_tail(3))
        return f"{self._process.name} ended with exit code {self._process.returncode}: {tail}"


class LocalScheduler(SupervisedDask):
    """The scheduler, alone in its process: nothing else delays its loop."""

    def __init__(
        self,
        directory: str,
        dashboard: bool,
        logs: str,
        credentials: Credentials | None,
        listens: Sequence[str] = ("--host", "127.0.0.1", "--port", "0"),
        dashboard_address: str = "127.0.0.1:0",
    ) -> None:
        self._file = Path(directory) / "scheduler.json"
        # Without a dashboard there still is an HTTP server, which would listen on Dask's fixed port.
        shown = ["--dashboard-address", dashboard_address, "--dashboard" if dashboard else "--no-dashboard"]
        super().__init__(
            [
                "scheduler",
                *listens,
                *_tls_options(credentials),
                *shown,
                "--scheduler-file",
                str(self._file),
                "--preload",
                f"{PRELOADS}.scheduler",
            ],
            directory,
            "scheduler",
            # Else its workspace is in the machine's temporary directory, and stays.
            {**_SCHEDULER_ENV, "DASK_TEMPORARY_DIRECTORY": directory},
            logs,
        )

    async def wait_until_up(self) -> None:
        """Read the address that the scheduler writes when it listens."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            failure = self.failed()
            if failure is not None:
                raise ClusterProcessFailed(failure)
            try:
                self.address = json.loads(self._file.read_text())["address"]
                return
            except (FileNotFoundError, json.JSONDecodeError):
                await asyncio.sleep(0.05)  # the file is missing or half written
        raise ClusterProcessFailed(f"the scheduler does not listen after {START_TIMEOUT_S:.0f} s")


class LocalWorker(SupervisedDask):
    """A worker with resource tags; with a nanny, which restarts it when it dies."""

    def __init__(
        self,
        scheduler: str,
        name: str,
        resources: Mapping[str, float],
        directory: str,
        logs: str,
        credentials: Credentials | None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        connection = [*_tls_options(credentials), "--host", "127.0.0.1"]
        super().__init__(
            worker_arguments(scheduler, name, resources, Path(directory), connection),
            directory,
            name,
            {**QUICK_LOOP, ENGINE_LOGS_VARIABLE: str(Path(logs) / name), **(env or {})},
            logs,
        )
        self._scheduler_address = scheduler
        self._name = name
        security = None if credentials is None else credentials.security
        self._connection_args = {} if security is None else security.get_connection_args("client")

    async def wait_until_up(self) -> None:
        """Wait until the worker has joined: a run must not begin with half of its engines."""
        deadline = time.monotonic() + START_TIMEOUT_S
        async with rpc(self._scheduler_address, connection_args=self._connection_args) as scheduler:
            while time.monotonic() < deadline:
                workers = (await scheduler.identity(n_workers=-1))["workers"]
                if any(str(worker["name"]) == self._name for worker in workers.values()):
                    return
                failure = self.failed()
                if failure is not None:
                    raise ClusterProcessFailed(failure)
                await asyncio.sleep(0.05)
        raise ClusterProcessFailed(f"worker {self._name} has not joined after {START_TIMEOUT_S:.0f} s")


def _tls_options(credentials: Credentials | None) -> list[str]:
    if credentials is None:
        return ["--protocol", "tcp"]
    return ["--protocol", "tls", *credentials.options]


class SupervisedCluster(SpecCluster):
    """A cluster whose scheduler is a `SupervisedDask`, and whose workers come back by themselves."""

    credentials: Credentials | None  # its TLS files; None while there are none

    def _update_worker_status(self, op: str, msg: Any) -> None:
        """Keep a worker that is gone: its nanny starts it again.

        `SpecCluster` looks again `distributed.deploy.lost-worker-timeout` (15 s) after a death. A worker that is away
        then would be closed for good, also one that had come back and died a second time.
        """
        Cluster._update_worker_status(self, op, msg)

    @property
    def _scheduler_is_silent(self) -> bool:
        """Whether the scheduler's process has ended or is stopped: it will not answer."""
        scheduler = self.scheduler
        return isinstance(scheduler, SupervisedDask) and bool(scheduler.failed() or scheduler.is_stopped())

    async def _close_without_scheduler(self) -> None:
        """Close the workers here: Dask would ask the scheduler to retire them, for half a minute or for ever."""
        assert self.scheduler is not None
        # First: workers end quickly once it is gone, and wait for the answer of one that is stopped.
        await self.scheduler.close()
        await asyncio.gather(*(worker.close() for worker in self.workers.values()))
        self.workers.clear()
        self.shutdown_scheduler = False


class LocalRolloutCluster(SupervisedCluster):
    """Scheduler, `engines` rollout workers and `tool_workers` tool workers on this machine.

    Parameters
    ----------
    engines
        Rollout workers; each may host one engine.
    tool_cpus
        CPUs that actions may use, all tool workers together; None: those of the machine. Each tool worker takes its
        share of the cores for itself. With more CPUs than cores actions share cores.
    tool_memory_bytes
        Memory that actions may demand, all tool workers together; None: that of the machine.
    tool_pools
        More tool workers, each a pool of its own with so many CPUs (``{"judge": 2}``), for ``Needs(pool="judge")``.
    model_gpus
        GPUs of a worker for model services; on a machine without GPUs, its memory slots. 0: no such worker.
    model_slot_bytes
        Bytes of each memory slot.
    trainers
        Workers that may host a trainer; a run has one.
    trainer_threads
        CPU threads of each process of a trainer, where its description names none.
    dashboard
        Serve the Dask dashboard on a free loopback port.
    directory
        For logs and scratch; None: a temporary one that goes with the cluster.
    logs
        For logs alone, those of engines too; None: with the scratch.
    hardware
        Classes of the rollout workers with their numbers, in order (``{"H800": 2, "H20": 1}``), which add up to
        `engines`; None: all are alike.
    security
        True: connections use TLS, with a key made for this cluster that only its owner can read, so that no other user
        of the machine can connect. False: they are open to every user of the machine, who can then run code as its
        owner.

    Attributes
    ----------
    credentials
        The key of this cluster; None without `security`.

    Examples
    --------
    >>> with LocalRolloutCluster(engines=2) as cluster, Client(cluster) as client:  # doctest: +SKIP
    ...     Rollout(client, env="math", model="my-model").run(8)
    """

    def __init__(
        self,
        engines: int = 1,
        *,
        tool_workers: int = 1,
        tool_cpus: int | None = None,
        tool_pools: Mapping[str, int] | None = None,
        model_gpus: int = 0,
        model_slot_bytes: int = 1 << 30,
        trainers: int = 0,
        trainer_threads: int = 1,
        tool_memory_bytes: int | None = None,
        dashboard: bool = True,
        directory: str | Path | None = None,
        logs: str | Path | None = None,
        security: bool = True,
        asynchronous: bool = False,
        hardware: Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> None:
        classes = hardware_of_workers(hardware, engines)
        self._owned = OwnedDirectory("heddle-cluster-") if directory is None else None
        self.directory = Path(directory or "") if self._owned is None else self._owned.path
        self.directory.mkdir(parents=True, exist_ok=True)
        self.logs = self.directory if logs is None else Path(logs).absolute()
        self.credentials = Credentials.temporary(self.directory) if security else None
        cpus = tool_cpus or os.cpu_count() or 1
        self._tool_cpus = share = max(1, cpus // max(1, tool_workers))
        memory_bytes = tool_memory_bytes or machine_memory_bytes(find_cgroups().folders)
        tool_env = {MEMORY_VARIABLE: str(memory_bytes // max(1, tool_workers))}
        workers = {
            **{
                f"rollout-{i}": self._spec(
                    f"rollout-{i}", {ENGINE_RESOURCE: 1}, {HARDWARE_VARIABLE: name} if name else None
                )
                for i, name in enumerate(classes)
            },
            **{f"tool-{i}": self._spec(f"tool-{i}", {TOOL_RESOURCE: share}, tool_env) for i in range(tool_workers)},
        }
        tools = Resources.of(cpus=share, memory_bytes=int(tool_env[MEMORY_VARIABLE]))
        self._maxima: tuple[PoolMaximum, ...] = (PoolMaximum(CPU_POOL, tools),) if tool_workers else ()
        for pool, cpus in (tool_pools or {}).items():
            check_count(f"CPUs of pool {pool!r}", cpus, 1)
            workers[f"tool-{pool}"] = self._spec(
                f"tool-{pool}", {TOOL_RESOURCE: cpus}, {**tool_env, POOL_VARIABLE: checked_pool(pool)}
            )
            self._maxima += (PoolMaximum(pool, Resources.of(cpus=cpus, memory_bytes=tools[MEMORY])),)
        if model_gpus:
            self._maxima += (PoolMaximum(GPU_POOL, Resources.of({GPUS: model_gpus})),)
            tags = {MODEL_RESOURCE: model_gpus, SLOT_BYTES_RESOURCE: model_slot_bytes}
            workers["model-0"] = self._spec("model-0", tags)
        trainer_env = {TRAINER_THREADS_VARIABLE: str(trainer_threads)}
        for i in range(trainers):
            workers[f"trainer-{i}"] = self._spec(f"trainer-{i}", {TRAINER_RESOURCE: 1}, trainer_env)
        scheduler = {
            "cls": LocalScheduler,
            "options": {
                "directory": str(self.directory),
                "dashboard": dashboard,
                "logs": str(self.logs),
                "credentials": self.credentials,
            },
        }
        super().__init__(
            workers=workers,
            scheduler=scheduler,
            asynchronous=asynchronous,
            security=None if self.credentials is None else self.credentials.security,
            name="heddle-local",
            **kwargs,
        )

    async def _start(self) -> None:
        await super()._start()
        # What no worker here can ever run is then refused at once; without this it would wait for one to join.
        await ask_over(self.scheduler_comm, ExchangeDemand(QueuedCapacity(), 0.0, self._maxima))

    def __repr__(self) -> str:
        kinds = [name.partition("-")[0] for name in map(str, self.worker_spec)]
        workers = ", ".join(f"{kind} workers={kinds.count(kind)}" for kind in dict.fromkeys(kinds))
        return f"<{type(self).__name__} {self.scheduler_address}: {workers}, logs={self.logs}>"

    __str__ = __repr__

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        """What a notebook shows: Dask's view of the cluster, and what it has for rollouts."""
        kinds = [name.partition("-")[0] for name in map(str, self.worker_spec)]
        own = facts_html(
            "For rollouts",
            {
                "workers that can host an engine": kinds.count("rollout"),
                "tool workers": f"{kinds.count('tool')} with {self._tool_cpus} CPUs each",
                "connections": "open to every user of this machine" if self.credentials is None else "TLS",
                "logs": self.logs,
            },
        )
        return f"{super()._repr_html_(cluster_status=cluster_status)}{own}"

    def scale(self, n: int = 0, memory: Any = None, cores: Any = None) -> Any:
        """Refused: Dask would end its latest workers, of whatever kind, or start one without a kind."""
        if self.status not in (Status.closing, Status.closed):
            raise BadInput(_NOT_SCALED)
        return super().scale(n, memory, cores)  # Dask's way to end all workers

    def adapt(self, *args: Any, **kwargs: Any) -> Any:
        """Refused as `scale` is."""
        raise BadInput(_NOT_SCALED)

    def _spec(self, name: str, resources: Mapping[str, float], env: Mapping[str, str] | None = None) -> dict[str, Any]:
        options = {
            "name": name,
            "resources": dict(resources),
            "directory": str(self.directory),
            "logs": str(self.logs),
            "credentials": self.credentials,
            "env": dict(env or {}),
        }
        return {"cls": LocalWorker, "options": options}

    async def _close(self) -> None:
        if self._scheduler_is_silent:
            await self._close_without_scheduler()
        await super()._close()
        if self.credentials is not None:
            self.credentials.remove()
        if self._owned is not None:
            self._owned.remove()
