"""What a job is asked to host, and the workers that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.gpus import named_gpus
from heddle_dask.live.wire.messages import ENGINE_RESOURCE, TOOL_RESOURCE, TRAINER_RESOURCE

Role = Literal["rollout", "tool", "trainer"]
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class WorkerTls:
    """Files for TLS connections: the authority, the certificate and its key."""

    ca: Path
    certificate: Path
    key: Path

    @property
    def options(self) -> list[str]:
        files = {"--tls-ca-file": self.ca, "--tls-cert": self.certificate, "--tls-key": self.key}
        return [part for name, path in files.items() for part in (name, str(path))]


@dataclass(frozen=True, slots=True)
class JobOptions:
    address: str  # of the Dask scheduler
    name: str
    role: Role = "rollout"
    workers: int = 1  # number of Dask workers; each rollout worker may host one engine
    tp_degree: int = 1  # GPUs of each rollout worker
    engines_per_gpu: int = 1  # rollout workers that share each GPU
    cpus: int = 1  # CPUs that the actions of each tool worker may use
    ends_in_s: float | None = None  # seconds until the job ends; None: the batch system is asked
    drain_s: float = 120.0  # the drain begins so many seconds before the end
    kill_wait_s: float = 25.0  # after SIGTERM the job is expected to be killed no earlier than this
    # `interface`, `host`: network interface or address of the workers; without both, the address from which the
    # scheduler is reached.
    interface: str | None = None
    host: str | None = None
    worker_ports: tuple[int, int] | None = None  # first and last port of workers and nannies; None: any
    # Where the directory of this job is made, and removed at its end; None: the directory for temporary files.
    scratch: Path | None = None
    logs: Path | None = None  # directory of the workers' and engines' logs; None: with the scratch
    tls: WorkerTls | None = None
    connect_s: float = 30.0

    @property
    def resources(self) -> Mapping[str, float]:
        if self.role == "tool":
            return {TOOL_RESOURCE: self.cpus}
        if self.role == "trainer":
            return {TRAINER_RESOURCE: 1}
        return {ENGINE_RESOURCE: self.tp_degree}

    @property
    def worker_names(self) -> tuple[str, ...]:
        """The name of the job, numbered if it has several workers."""
        if self.workers == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(self.workers))

    @property
    def port_options(self) -> list[str]:
        """Options of ``dask worker``: worker and nanny each take a free port of the range."""
        if self.worker_ports is None:
            return []
        ports = "{}:{}".format(*self.worker_ports)
        return ["--worker-port", ports, "--nanny-port", ports]

    def check(self) -> None:
        if self.interface is not None and self.host is not None:
            raise BadInput(f"--interface {self.interface} and --host {self.host}: give one of them")
        if self.ends_in_s is not None and not (math.isfinite(self.ends_in_s) and self.ends_in_s > 0):
            raise BadInput(f"--ends-in {self.ends_in_s}: give seconds above 0")
        if self.worker_ports is not None:
            first, last = self.worker_ports
            needed = 2 * self.workers
            if not 0 < first <= last < 65536 or last - first + 1 < needed:
                raise BadInput(
                    f"--worker-ports {first}:{last}: {self.workers} workers with their nannies need a range of "
                    f"{needed} ports or more between 1 and 65535"
                )
        if self.address.startswith("tls:") != (self.tls is not None):
            wrong = "are given" if self.tls is not None else "are missing"
            raise BadInput(
                f"scheduler address {self.address}: --tls-ca-file, --tls-cert and --tls-key {wrong}; "
                "they belong to an address tls://HOST:PORT, and to no other"
            )
        for path in () if self.tls is None else (self.tls.ca, self.tls.certificate, self.tls.key):
            if not path.is_file():
                raise BadInput(
                    f"{path} is no file on this node: put the TLS files on a file system that the nodes share"
                )


def gpu_slices(options: JobOptions, environ: Mapping[str, str]) -> list[str | None]:
    """The value of ``CUDA_VISIBLE_DEVICES`` of each worker; None: as it is.

    Each rollout worker sees its own GPUs of those that the job's own variable names, or shares them. A job without the
    variable has no GPUs of its own to divide; tool workers and trainers see what the job sees.

    Raises
    ------
    BadInput
        The job names GPUs, and not enough of them.
    """
    named = named_gpus(environ)
    if options.role != "rollout" or not named:
        return [None] * options.workers
    degree, sharers = options.tp_degree, options.engines_per_gpu
    needed = -(-options.workers // sharers) * degree
    if len(named) < needed:
        each = f", {sharers} on each GPU," if sharers > 1 else ""
        raise BadInput(
            f"job {options.name} has {len(named)} GPUs ({GPUS_VARIABLE}={environ[GPUS_VARIABLE]}), and "
            f"{options.workers} engines of TP degree {degree}{each} need {needed}: ask for more with --gres"
        )
    firsts = [worker // sharers * degree for worker in range(options.workers)]
    return [",".join(named[at : at + degree]) for at in firsts]
