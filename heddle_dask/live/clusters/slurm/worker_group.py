"""What a cluster of worker groups consists of: groups of equal jobs, and what all of them share.

The classes check themselves, so a plan that exists can be started, except for what only the site knows (whether it has
that partition, and that gres).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from heddle_dask.core.errors import BadInput, check_count, check_seconds
from heddle_dask.core.resources import CPU_POOL, PoolMaximum, Resources
from heddle_dask.engines.spec import check_hardware
from heddle_dask.live.clusters.slurm.amounts import slurm_time
from heddle_dask.live.clusters.slurm.directives import (
    check_choice,
    check_directive,
    check_export,
    check_line,
    check_node_path,
    gpus_asked_for,
)
from heddle_dask.live.wire.messages import POOL_VARIABLE

Role = Literal["rollout", "tool", "trainer"]
_UNKNOWN_BYTES = 1 << 60
Backend = Literal["slurm", "srun", "local"]
Runtime = Literal["apptainer", "pyxis"]

ROLES: tuple[str, ...] = get_args(Role)
BACKENDS: tuple[str, ...] = get_args(Backend)
RUNTIMES: tuple[str, ...] = get_args(Runtime)

LONGEST_SIGNAL_S = 65535
"""``sbatch --signal`` takes no more."""

# A part behind a hyphen begins with a letter: workers are called GROUP-JOB or GROUP-JOB-WORKER, with numbers.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(-[A-Za-z][A-Za-z0-9_]*)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Container:
    """An image in which the workers of a group run; ``sbatch`` and ``srun`` stay outside."""

    runtime: Runtime
    # For Apptainer a path or URI (``/images/heddle.sif``); for Pyxis what ``--container-image`` takes.
    image: str
    # ``SOURCE[:DESTINATION[:OPTIONS]]`` of directories that the workers see, besides scratch, caches, logs and
    # credentials.
    binds: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # further arguments of ``apptainer exec`` or ``srun``
    python: str = "python3"  # Python inside the image, which has heddle_dask

    def __post_init__(self) -> None:
        check_choice("runtime", self.runtime, RUNTIMES)
        for name in ("image", "python"):
            if not getattr(self, name).strip():
                raise BadInput(f"{name} is empty")
        for name in ("image", "python", "binds", "options"):
            value = getattr(self, name)
            for text in (value,) if isinstance(value, str) else value:
                check_line(name, text)


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Equal jobs, each of one node."""

    name: str
    role: Role
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    gres: str | None = None
    constraint: str | None = None
    cpus: int = 1  # CPUs of a job
    memory_bytes: int | None = None  # memory of a job; None: the partition's default
    walltime_s: float | None = None  # None: the partition's default; workers ask SLURM when their job ends
    engines: int = 0  # rollout group: engines of one job, each in a worker of its own, with GPUs of its own
    tp_degree: int = 0  # rollout group: GPUs of each engine
    engines_per_gpu: int = 0  # rollout group: engines that share each GPU
    gpu_memory_utilization: float | None = None  # rollout group: share of a GPU's memory for one engine
    kv_cache_gib: float | None = None  # rollout group: KV cache of an engine on each GPU
    tool_cpus: int = 0  # tool group: CPUs of a job that actions may use; all of them unless given
    # `minimum`, `maximum`: jobs. The group is scaled between them by demand.
    minimum: int = 1
    maximum: int | None = None
    initial: int | None = None  # jobs at the start; None: `minimum`
    prologue: tuple[str, ...] = ()  # lines of shell before the worker, such as ``module load cuda``
    directives: tuple[str, ...] = ()  # further options of ``sbatch``, such as ``--exclusive``
    container: Container | None = None
    # Longest time from the start of a job to the first step of its engines; time in the queue does not count.
    start_timeout_s: float = 600.0
    # How long before its end a job begins to leave: it starts no step, and its trajectories move.
    drain_s: float = 120.0
    env: Mapping[str, str] = field(default_factory=dict)  # variables of the worker's environment
    hardware: str = ""  # rollout group: class of its GPUs, for affinity; empty: all engines are alike

    @property
    def maximum_of_pool(self) -> PoolMaximum | None:
        """The tool worker of each of its jobs; None for a group of rollout workers.

        The partition's default of memory is not known: a demand of memory is then judged when such a worker has joined.
        """
        if self.role != "tool":
            return None
        memory_bytes = self.memory_bytes or _UNKNOWN_BYTES
        pool = self.env.get(POOL_VARIABLE) or CPU_POOL
        return PoolMaximum(pool, Resources.of(cpus=self.tool_cpus, memory_bytes=memory_bytes))

    def __post_init__(self) -> None:
        check_group_name(self.name)
        try:
            check_hardware("hardware", self.hardware)
            self._complete()
            self._check_role()
            self._check_jobs()
            self._check_times()
            self._check_texts()
            self._check_devices()
        except BadInput as error:
            raise BadInput(f"group {self.name}: {error}") from None

    def _complete(self) -> None:
        check_choice("role", self.role, ROLES)
        check_count("cpus", self.cpus)
        for name in ("engines", "tp_degree", "engines_per_gpu", "tool_cpus", "minimum"):
            check_count(name, getattr(self, name), 0)
        defaults: Mapping[str, Mapping[str, int]] = {
            "rollout": {"engines": 1, "tp_degree": 1, "engines_per_gpu": 1},
            "tool": {"tool_cpus": self.cpus},
        }
        for name, value in defaults.get(self.role, {}).items():
            object.__setattr__(self, name, getattr(self, name) or value)
        if self.maximum is None:
            object.__setattr__(self, "maximum", max(1, self.minimum))
        if self.initial is None:
            object.__setattr__(self, "initial", self.minimum)

    def _check_role(self) -> None:
        engine_keys = ("engines", "tp_degree", "engines_per_gpu", "gpu_memory_utilization", "kv_cache_gib")
        for name, other in (("tool_cpus", "tool"), *((key, "rollout") for key in engine_keys)):
            if getattr(self, name) and self.role != other:
                raise BadInput(f"{name.replace('_', '-')} belongs to a group with role = {other!r}: leave it out")
        if self.tool_cpus > self.cpus:
            raise BadInput(f"tool-cpus {self.tool_cpus} exceed the {self.cpus} cpus of a job: raise cpus")

    def _check_jobs(self) -> None:
        check_count("maximum", self.most)
        check_count("initial", self.initial, 0)
        if self.minimum > self.most:
            raise BadInput(f"minimum {self.minimum} exceeds maximum {self.most}: raise maximum")
        if not self.minimum <= self.first <= self.most:
            raise BadInput(f"initial {self.first} is not between minimum {self.minimum} and maximum {self.most}")

    def _check_times(self) -> None:
        check_seconds("start-timeout", self.start_timeout_s)
        check_seconds("drain", self.drain_s)
        if self.memory_bytes is not None and not 0 < self.memory_bytes < 1 << 60:
            raise BadInput(f"memory is {self.memory_bytes!r} bytes: use more than nothing")
        if self.walltime_s is None:
            return
        check_seconds("walltime", self.walltime_s)
        start_s = self.start_timeout_s if self.role == "rollout" else 0.0
        if self.walltime_s <= start_s + self.drain_s:
            start = f"an engine's start (start-timeout {slurm_time(start_s)}) and " if start_s else ""
            raise BadInput(
                f"walltime {slurm_time(self.walltime_s)} leaves no time to work after {start}the drain "
                f"({slurm_time(self.drain_s)}): ask for more walltime, or lower "
                f"{'start-timeout or drain' if start_s else 'drain'}"
            )

    def _check_texts(self) -> None:
        for name in ("partition", "account", "qos", "reservation", "gres", "constraint"):
            value = getattr(self, name)
            if value is None:
                continue
            check_line(name, value)
            if not value.strip():
                raise BadInput(f"{name} is empty: give a value, or leave it out")
        for line in self.prologue:
            check_line("prologue", line)
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name):
                raise BadInput(f"env has {name!r}, which is no name of a variable")
            check_line(f"env.{name}", value)
        for directive in self.directives:
            check_directive(directive)

    def _check_devices(self) -> None:
        gpus = self.gpus
        needed = -(-self.engines // max(1, self.engines_per_gpu)) * self.tp_degree
        if gpus is None or not self.engines:
            return
        if self.tp_degree > gpus:
            raise BadInput(
                f"an engine of TP degree {self.tp_degree} does not fit on one node with {gpus} GPUs per job: an engine "
                "over several nodes is not supported, lower tp-degree or raise gres"
            )
        if needed > gpus:
            each = f", {self.engines_per_gpu} on each GPU," if self.engines_per_gpu > 1 else ""
            raise BadInput(
                f"{self.engines} engines of TP degree {self.tp_degree}{each} need {needed} GPUs, and a job asks for "
                f"{gpus}: raise gres or lower engines"
            )

    @property
    def most(self) -> int:
        """Jobs at most: `maximum`, which is set once the group exists."""
        assert self.maximum is not None
        return self.maximum

    @property
    def first(self) -> int:
        """Jobs at the start: `initial`, which is set once the group exists."""
        assert self.initial is not None
        return self.initial

    @property
    def gpus(self) -> int | None:
        """GPUs that a job asks for, by gres and directives; None: it names none."""
        return gpus_asked_for(self.gres, self.directives)


def check_group_name(name: str) -> None:
    """Refuse a name that is none, or could be that of a job of another group."""
    if not _NAME.fullmatch(name) or len(name) > 40:
        raise BadInput(
            f"group {name!r}: a name is at most 40 letters, digits, _ and -, begins with a letter, and has a letter "
            "after each -"
        )


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Groups of workers and what they share."""

    groups: Mapping[str, WorkerGroup]  # by name
    # ``slurm``: each job is submitted with ``sbatch``. ``srun``: each is a step of the allocation in which the driver
    # runs. ``local``: each is a process of this machine.
    backend: Backend = "slurm"
    interface: str | None = None  # network interface of scheduler and workers, such as ``ib0``
    # Address or name by which workers reach the scheduler, where `interface` does not say it.
    host: str | None = None
    worker_ports: tuple[int, int] | None = None  # first and last port on which workers listen; None: any
    scheduler_port: int = 0  # 0: any
    # Directory on node-local disk, in which each job has one of its own, which is removed after it. The node expands
    # variables: ``$TMPDIR``.
    scratch: str = "/tmp"
    # Directory on node-local disk for caches of models and compilers, which jobs of one user share and which stays.
    # None: in the directory of the user under `scratch`.
    caches: str | None = None
    # Whether model weights are copied to `caches` once per node, and engines load them from there. Copies stay for
    # later jobs; one that no engine uses goes when another one needs its room.
    stage_weights: bool = False
    # Directory that all nodes see, for credentials. None: beside the logs.
    shared: Path | None = None
    # Directory that all nodes see, for logs of jobs and engines. None: beside the run.
    logs: Path | None = None
    # Interpreter of the workers; None: this one. All nodes see it, except where a container has its own.
    python: str | None = None
    tls: bool = True  # whether Dask connections are encrypted, with a key made for this cluster
    offline: bool = True  # whether jobs must not try to reach the model hub
    adaptive: bool = True  # whether groups are scaled by demand between their minimum and maximum
    # Variables of the driver that jobs get, as ``sbatch --export`` takes them: ``ALL``, ``NONE`` or names.
    export: str = "ALL"
    poll_s: float = 30.0  # seconds between two questions to ``squeue``, for all jobs together
    dashboard_address: str = "127.0.0.1:0"  # ``HOST:PORT`` of the dashboard; loopback unless given

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, BACKENDS)
        if not self.groups:
            raise BadInput("there are no groups: give at least one table [groups.NAME]")
        for name, group in self.groups.items():
            if name != group.name:
                raise BadInput(f"group {group.name} is listed as {name!r}: use one name")
        self._check_network()
        check_seconds("poll", self.poll_s)
        for name in ("interface", "host", "python"):
            value = getattr(self, name)
            if value is not None:
                check_line(name, value)
                if not value.strip():
                    raise BadInput(f"{name} is empty: give a value, or leave it out")
        check_node_path("scratch", self.scratch)
        if self.caches is not None:
            check_node_path("caches", self.caches)
        check_export(self.export)
        if self.backend == "slurm":
            self._check_slurm()
        else:
            self._check_containers()

    def _check_network(self) -> None:
        if self.interface is not None and self.host is not None:
            raise BadInput("interface and host exclude each other: use one")
        check_count("scheduler-port", self.scheduler_port, 0)
        ports = self.worker_ports
        if self.scheduler_port > 65535 or (ports is not None and not 0 < ports[0] <= ports[1] < 65536):
            raise BadInput("ports are from 1 to 65535: give worker-ports as FIRST:LAST")
        host, _, port = self.dashboard_address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise BadInput(f"dashboard-address is {self.dashboard_address!r}: give HOST:PORT, such as 127.0.0.1:8787")

    def _check_slurm(self) -> None:
        for group in self.groups.values():
            if group.partition is None:
                raise BadInput(f"group {group.name} has no partition: give partition = NAME (`sinfo` lists them)")
            if group.drain_s > LONGEST_SIGNAL_S:
                raise BadInput(
                    f"group {group.name}: drain {group.drain_s:g} s is longer than SLURM warns a job before its end "
                    f"({LONGEST_SIGNAL_S} s): lower it"
                )
            if group.role == "rollout" and group.tp_degree > 1 and group.gpus is None:
                raise BadInput(
                    f"group {group.name}: an engine of TP degree {group.tp_degree} needs GPUs of one node, and a job "
                    f"asks for none: give gres = 'gpu:{group.engines * group.tp_degree}'"
                )

    def _check_containers(self) -> None:
        for group in self.groups.values():
            runtime = None if group.container is None else group.container.runtime
            if runtime == "pyxis":
                raise BadInput(
                    f"group {group.name}: backend {self.backend} starts no Pyxis container: use runtime = 'apptainer'"
                )
