"""Which engines and hosts there are, and on which Dask workers: facts that outlive sessions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from heddle_dask.core.ids import EngineId, HostId, PolicyVersion
from heddle_dask.core.nouns import EngineDescription, HostDescription
from heddle_dask.live.wire.driver_messages import ReadyEngine


@dataclass(slots=True)
class EngineRegistry:
    # `engines`, `hosts`: those that answer, with the address of their Dask worker.
    engines: dict[EngineId, tuple[str, EngineDescription]] = field(default_factory=dict)
    hosts: dict[HostId, tuple[str, HostDescription]] = field(default_factory=dict)
    # Address of every engine whose worker is alive, dead engines included: the worker still holds contexts.
    sources: dict[EngineId, str] = field(default_factory=dict)
    # The latest failed start of an engine, by worker address.
    start_failures: dict[str, str] = field(default_factory=dict)
    # What each engine that starts is doing, by worker address.
    starting: dict[str, str] = field(default_factory=dict)
    # By what means each host keeps actions apart, and why that is less than they ask for (empty: it is not).
    isolation: dict[HostId, tuple[str, str]] = field(default_factory=dict)
    _ready: dict[EngineId, ReadyEngine] = field(default_factory=dict)

    def add_engine(self, worker: str, ready: ReadyEngine) -> bool:
        """Register an engine; False when it was announced before."""
        spec = ready.engine
        if spec.engine_id in self.engines:
            return False
        self.engines[spec.engine_id] = (worker, spec)
        self.sources[spec.engine_id] = worker
        self._ready[spec.engine_id] = ready
        self.starts_no_more(worker)
        return True

    def starts(self, worker: str, phase: str) -> None:
        """An engine starts on this worker, and is so far."""
        self.starting[worker] = phase

    def starts_no_more(self, worker: str) -> None:
        """The worker hosts no engine, and what became of the last one is no news."""
        self.starting.pop(worker, None)
        self.start_failures.pop(worker, None)

    def start_failed(self, worker: str, reason: str) -> None:
        """It did not start; the worker tries again."""
        self.starting.pop(worker, None)
        self.start_failures[worker] = reason

    def weights_installed(self, engine_id: EngineId, version: PolicyVersion) -> None:
        """The engine samples with this version: the controllers of later sessions are told so."""
        if engine_id not in self.engines:
            return
        worker, spec = self.engines[engine_id]
        spec = replace(spec, policy_version=version.number, lineage=version.lineage)
        self.engines[engine_id] = (worker, spec)
        self._ready[engine_id] = replace(self._ready[engine_id], engine=spec)

    def add_host(self, worker: str, spec: HostDescription, isolation: str = "", weaker: str = "") -> bool:
        """Register a host; False when it was announced before."""
        if spec.host_id in self.hosts:
            return False
        self.hosts[spec.host_id] = (worker, spec)
        self.isolation[spec.host_id] = (isolation, weaker)
        return True

    def forget_worker(self, worker: str) -> tuple[list[EngineId], list[HostId]]:
        """Drop a worker and return what is lost with it.

        Engines that died before their worker are among them: their steps may not have reported yet.
        """
        engines = [engine_id for engine_id, address in self.sources.items() if address == worker]
        hosts = [host_id for host_id, (address, _) in self.hosts.items() if address == worker]
        for engine_id in engines:
            self.engines.pop(engine_id, None)
            del self.sources[engine_id]
            del self._ready[engine_id]
        for host_id in hosts:
            del self.hosts[host_id]
            self.isolation.pop(host_id, None)
        self.starts_no_more(worker)
        return engines, hosts

    @property
    def ready_engines(self) -> tuple[ReadyEngine, ...]:
        """The engines that answer, with the model that each of them serves."""
        return tuple(self._ready[engine_id] for engine_id in self.engines)

    @property
    def tool_cpus(self) -> int:
        return sum(host.cpus for _, host in self.hosts.values())
