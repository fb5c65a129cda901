"""The simulated cluster: engines, tools, model services, links, delays of the control plane, faults."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from heddle_dask.core.errors import BadInput
from heddle_dask.core.gpu_chunks import chunk_size
from heddle_dask.core.ids import EngineId, HostId
from heddle_dask.core.nouns import EngineDescription, HostDescription
from heddle_dask.core.resources import ModelService, Resources
from heddle_dask.cost.engine_cost import ClassCosts, EngineCost
from heddle_dask.sim.program import MakeActionBody


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Seconds of loads and evictions, and what requests of one batch cost each other.

    Attributes
    ----------
    link_bytes_s
        Bytes per second from host memory to one GPU; the GPUs of a copy load their parts at the same time.
    files_bytes_s
        Bytes per second from files to the GPUs of a copy, for a service without a copy in host memory.
    setup_s
        Seconds of every load beside the copying.
    batch_cost
        A request in a batch of n runs 1 + batch_cost (n - 1) times as long as alone. 0: batches are free; 1: requests
        share the copy, so that batching gains nothing.
    prepared
        Whether host memory had all copies before the rollout, so that the first load of a service is not cold.
    failure_share
        Share of loads that fail, after half their time.
    """

    link_bytes_s: float = 50e9
    files_bytes_s: float = 5e9
    setup_s: float = 0.05
    evict_s: float = 0.02
    batch_cost: float = 0.5
    prepared: bool = False
    failure_share: float = 0.0

    def __post_init__(self) -> None:
        if min(self.link_bytes_s, self.files_bytes_s) <= 0 or min(self.setup_s, self.evict_s, self.batch_cost) < 0:
            raise BadInput("service times: rates must be above 0, and seconds at least 0")

    def load_s(self, service: ModelService, gpus: int, cold: bool) -> float:
        """Seconds of a load: as declared for this size, otherwise bytes over the rate."""
        cold = cold and not self.prepared
        declared = service.cold_load_s if cold else service.load_s
        by_size = {chunk_size(n): seconds for n, seconds in zip(service.gpus, declared, strict=False)}
        if gpus in by_size:
            return by_size[gpus]
        rate = self.files_bytes_s if cold else self.link_bytes_s * gpus
        return self.setup_s + service.host_bytes / rate


FIT_S, FIT_ROW_S = 0.15, 2.1e-4


@dataclass(frozen=True, slots=True)
class ControlDelays:
    """Seconds that the control plane adds, one way each.

    Attributes
    ----------
    request_s
        From the agent's request to the controller.
    start_s
        From the controller's command to the engine.
    report_s
        From the engine to controller and agent.
    action_s
        From a tool's request to its start, and again from its end to the agent.
    predict_s
        From the first request of a call to its predictions. The call answers all requests made until then.
    fit_s, fit_row_s
        Duration of a predictor's fit: a constant, and seconds per decision point in the training data. The old model
        answers meanwhile.
    slot_s
        From the end of a step in its engine until the next waiting step arrives there. Live, a worker holds a slot
        until it has the result, and only then sends the next request. 0: steps wait in the engine's own queue.
    steps_ahead
        Steps beyond its slots that are sent to an engine (`engines.spec.EngineSpec`); used with a queue at the
        worker.
    """

    request_s: float = 0.0
    start_s: float = 0.0
    report_s: float = 0.0
    action_s: float = 0.0
    predict_s: float = 0.0
    slot_s: float = 0.0
    steps_ahead: int = 6
    fit_s: float = 0.0
    fit_row_s: float = 0.0

    def fitting_s(self, rows: int) -> float:
        """Seconds of a fit on `rows` decision points."""
        return self.fit_s + self.fit_row_s * rows

    @classmethod
    def measured(
        cls, step_added_s: float, action_added_s: float, predict_s: float = 2e-3, slot_s: float = 0.0
    ) -> ControlDelays:
        """Delays from the seconds that ``python -m benchmarks overhead`` measured for a step and for an action.

        A fit's `FIT_S` and `FIT_ROW_S` are CPU seconds of one thread of a server CPU, fitted by hand to 400 to 17,000
        decision points of the workloads coding, search and math: 0.6 s for 2,100 points, 1.6 s for 8,200, 3.2 s for
        15,900 (experiments.md). Assumption: request, command and report take a
        third of a step's delay each. 64 predictions take 1 to 1.4 ms (docs/predictor.md); the rest of `predict_s` is
        the way to another thread and back.
        """
        third = step_added_s / 3
        return cls(
            third,
            third,
            third,
            action_added_s / 2,
            predict_s,
            slot_s,
            fit_s=FIT_S,
            fit_row_s=FIT_ROW_S,
        )

    def with_request(self, request_s: float) -> ControlDelays:
        """These delays plus an engine's request time (`TableFit.request_s`): half before the step, half after it."""
        half_s = request_s / 2
        return replace(self, start_s=self.start_s + half_s, report_s=self.report_s + half_s)


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """KV transfers between engines: seconds per transfer, and seconds per token.

    Attributes
    ----------
    whole
        Whether every token of the context is sent. False: only those that the target's prefix cache lacks, as vLLM's
        NIXL connector asks for.
    """

    setup_s: float = 0.1
    token_s: float = 5e-6
    whole: bool = True


FAILED_TOOL_SHARE = 0.5
"""Share of its planned time after which a failing tool call ends."""


_EXPIRING_S = 5.0


@dataclass(frozen=True, slots=True)
class SimulatedFaults:
    """Faults of a simulation. Times are virtual seconds.

    Attributes
    ----------
    engines_lost
        Time at which an engine and its worker are lost, by the engine's number.
    tool_failure_share
        Share of tool calls that end with an error after half their time.
    walltime_s
        End of the allocation, at which all running trajectories are aborted; 0: never.
    engine_mtbf_s
        Mean time to failure of an engine with its worker, exponentially distributed and drawn for each engine by its
        name; 0: never.
    engine_restart_s
        Time from such a failure until a replacement engine has started.
    engines_join
        Time at which an engine joins [default: 0], by the engine's number.
    engines_end
        Time at which the job of an engine ends, by the engine's number. The engine drains before.
    drain_s
        The drain begins so long before the end of the job.
    hosts_join, hosts_drain, hosts_lost
        Time at which a host of CPUs joins [default: 0], begins to drain, and is lost, by the host's number.
    """

    engines_lost: Mapping[int, float] = field(default_factory=dict)
    tool_failure_share: float = 0.0
    walltime_s: float = 0.0
    engine_mtbf_s: float = 0.0
    engine_restart_s: float = 0.0
    engines_join: Mapping[int, float] = field(default_factory=dict)
    engines_end: Mapping[int, float] = field(default_factory=dict)
    drain_s: float = 120.0
    hosts_join: Mapping[int, float] = field(default_factory=dict)
    hosts_drain: Mapping[int, float] = field(default_factory=dict)
    hosts_lost: Mapping[int, float] = field(default_factory=dict)

    def drain_times(self, ends_s: float) -> tuple[float, float]:
        """When an engine that ends then begins to drain, and when its steps are stopped; as live."""
        return max(0.0, ends_s - self.drain_s), ends_s - min(_EXPIRING_S, self.drain_s / 3)


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """The engines, the tool pool, and the delays and faults around them.

    Attributes
    ----------
    engines
        Description and true cost of each engine; the cost is for contexts of the description's length.
    tool_cpus
        CPUs of the tool pool; 0 if tools only wait and take no CPU.
    believed
        Cost by TP degree with which strategies plan; empty: the true cost.
    crowded
        True cost of each engine by the number of busy engines (`sim.engine`); empty: engines do not affect each
        other.
    hosts
        Hosts for actions; empty: one with `tool_cpus`.
    sandbox_start_s
        Seconds to start the sandbox of a trajectory on a host.
    unmanaged
        Makes what runs actions in place of hosts that the controller allocates; None: nothing does.
    services, service_times
        Model services on hosts with GPUs, and how long they take.
    """

    engines: tuple[tuple[EngineDescription, EngineCost], ...]
    delays: ControlDelays = ControlDelays()
    link: SimulatedLink = SimulatedLink()
    faults: SimulatedFaults = field(default_factory=SimulatedFaults)
    tool_cpus: int = 0
    believed: Mapping[int, EngineCost] = field(default_factory=dict)
    crowded: Mapping[int, EngineCost] = field(default_factory=dict)
    hosts: tuple[HostDescription, ...] = ()
    sandbox_start_s: float = 0.0
    unmanaged: MakeActionBody | None = None
    services: tuple[ModelService, ...] = ()
    service_times: ServiceTimes = field(default_factory=ServiceTimes)

    def __post_init__(self) -> None:
        if not self.engines:
            raise BadInput("the fleet has no engine: give at least one")
        longest = max(spec.max_context_tokens for spec, _ in self.engines)
        engines = tuple((spec, cost.for_contexts(spec.max_context_tokens)) for spec, cost in self.engines)
        object.__setattr__(self, "engines", engines)
        crowded = {busy: cost.for_contexts(longest) for busy, cost in self.crowded.items()}
        object.__setattr__(self, "crowded", crowded)
        for spec, cost in self.engines:
            capacity = spec.kv_capacity_tokens or cost.capacity_tokens
            if capacity < spec.max_context_tokens + cost.block_tokens:
                raise BadInput(
                    f"{spec.engine_id} (TP {spec.tp_degree}) has KV room for {capacity} tokens, fewer than its context "
                    f"of {spec.max_context_tokens} and a block of {cost.block_tokens}: shorten it, raise the degree"
                )

    @property
    def action_hosts(self) -> tuple[HostDescription, ...]:
        """The hosts for actions; for the controller, what it does not manage is one of them."""
        if self.hosts and self.unmanaged is None:
            return self.hosts
        return (HostDescription(HostId("tools"), Resources.of(cpus=self.tool_cpus or 1)),)

    @property
    def beliefs(self) -> Mapping[int, EngineCost]:
        """Cost by TP degree with which strategies plan."""
        if self.believed:
            return self.believed
        classes = {(spec.hardware, spec.tp_degree): cost for spec, cost in self.engines}
        if any(hardware for hardware, _ in classes):
            return ClassCosts(classes)
        return {spec.tp_degree: cost for spec, cost in self.engines}


def equal_hosts(
    count: int, cpus: int, *, memory_bytes: int = 0, pool: str = "cpu", first: int = 0
) -> tuple[HostDescription, ...]:
    """`count` identical hosts for actions, numbered from `first`."""
    resources = Resources.of(cpus=cpus, memory_bytes=memory_bytes)
    return tuple(HostDescription(HostId(f"host-{first + number}"), resources, pool) for number in range(count))


def equal_engines(
    count: int,
    cost: EngineCost,
    *,
    slots: int,
    max_context_tokens: int,
    tp_degree: int = 1,
    kv_transfer: bool = True,
    first: int = 0,
    hardware: str = "",
) -> tuple[tuple[EngineDescription, EngineCost], ...]:
    """`count` identical engines, numbered from `first`; their KV capacity is that of the cost."""
    return tuple(
        (
            EngineDescription(
                engine_id=EngineId(f"engine-{first + number}"),
                slots=slots,
                max_context_tokens=max_context_tokens,
                tp_degree=tp_degree,
                kv_capacity_tokens=cost.capacity_tokens,
                kv_transfer=kv_transfer,
                hardware=hardware,
            ),
            cost,
        )
        for number in range(count)
    )


class FaultDraws:
    """Fault draws of one simulation."""

    def __init__(self, faults: SimulatedFaults, seed: int) -> None:
        self._faults, self._seed = faults, seed

    def tool_fails(self, action_id: str) -> bool:
        share = self._faults.tool_failure_share
        return share > 0 and self._draw(action_id).random() < share

    def life_s(self, engine_id: str) -> float:
        """Seconds from an engine's start to its death; 0: it does not die."""
        mean_s = self._faults.engine_mtbf_s
        return self._draw(f"life of {engine_id}").expovariate(1 / mean_s) if mean_s else 0.0

    def _draw(self, name: str) -> random.Random:
        # A seed of type str is hashed by SHA-512, not by `hash`: the same in every process.
        return random.Random(f"faults {self._seed} {name}")
