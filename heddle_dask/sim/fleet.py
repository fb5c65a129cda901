"""What is simulated beside the trajectories: engines, tools, links, delays of the control plane, faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId, HostId
from heddle_dask.core.nouns import EngineDescription, HostDescription
from heddle_dask.cost.engine_cost import EngineCost

FIT_S, FIT_ROW_S = 0.15, 2.1e-4


@dataclass(frozen=True, slots=True)
class ControlDelays:
    """Seconds that the control plane adds, one way each.

    Attributes
    ----------
    request_s
        From the agent's question to the controller.
    start_s
        From the controller's command to the engine.
    report_s
        From the engine to controller and agent.
    action_s
        From a tool's request to its start, and again from its end to the agent.
    predict_s
        From the end of a step to a prediction's arrival; those that ask meanwhile share the next call.
    fit_s, fit_row_s
        Of a predictor's fit, from its begin until the new model answers: a constant, and seconds for each decision
        point that it learns from. The old model answers meanwhile.
    slot_s
        From the end of a step in its engine until the next one that waited for its slot is there. Live, a worker holds
        a slot until it has the answer, and only then sends the next request; 0: the line is the engine's own.
    steps_ahead
        How many more steps than it has slots an engine is sent (`engines.spec.EngineSpec`); with a line at the worker.
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
        """Seconds of a fit on so many decision points."""
        return self.fit_s + self.fit_row_s * rows

    @classmethod
    def measured(
        cls, step_added_s: float, action_added_s: float, predict_s: float = 2e-3, slot_s: float = 0.0
    ) -> ControlDelays:
        """From what ``heddle bench overhead`` says is added to a step and to an action.

        A fit's `FIT_S` and `FIT_ROW_S` are CPU seconds of one thread of a server CPU, fitted by hand to 400 to 17,000
        decision points of the workloads coding, search and math: 0.6 s for 2,100 points, 1.6 s for 8,200, 3.2 s for
        15,900 (docs/experiments/2026-11-24-fitting-takes-time.md). That a step's third each goes to question, command
        and report is assumed. 64 predictions take 1 to 1.4 ms
        (docs/predictor.md), and their way to another thread and back the rest of `predict_s`.
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
        """These, and an engine's own way of a request (`TableFit.request_s`): half before it, half behind."""
        half_s = request_s / 2
        return replace(self, start_s=self.start_s + half_s, report_s=self.report_s + half_s)


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """How a KV cache travels between engines: seconds of a transfer, and of each of its tokens."""

    setup_s: float = 0.1
    token_s: float = 5e-6


FAILED_TOOL_SHARE = 0.5
"""Of its time, after which a tool call that fails ends."""


@dataclass(frozen=True, slots=True)
class SimulatedFaults:
    """What goes wrong, by virtual time.

    Attributes
    ----------
    engines_lost
        Seconds at which an engine dies with its worker, by the engine's number.
    tool_failure_share
        Share of tool calls that end with an error after half their time.
    walltime_s
        When the allocation ends: whatever runs then is aborted; 0 for never.
    engine_mtbf_s
        Mean of the seconds that an engine runs until it dies with its worker, exponentially distributed and drawn for
        each engine by its name; 0 for never.
    engine_restart_s
        Until another engine answers in the place of one that died so.
    """

    engines_lost: Mapping[int, float] = field(default_factory=dict)
    tool_failure_share: float = 0.0
    walltime_s: float = 0.0
    engine_mtbf_s: float = 0.0
    engine_restart_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """The engines, and what serves them.

    Attributes
    ----------
    engines
        Description and true cost of each; the cost is taken for contexts as long as the description's.
    tool_cpus
        CPUs of the tool pool; 0 when tools only wait and take none.
    believed
        Cost by TP degree as strategies believe it; empty: the truth.
    crowded
        True cost of each engine by how many of them are busy (`sim.shared_cores`); empty: none disturbs another.
    """

    engines: tuple[tuple[EngineDescription, EngineCost], ...]
    delays: ControlDelays = ControlDelays()
    link: SimulatedLink = SimulatedLink()
    faults: SimulatedFaults = field(default_factory=SimulatedFaults)
    tool_cpus: int = 0
    believed: Mapping[int, EngineCost] = field(default_factory=dict)
    crowded: Mapping[int, EngineCost] = field(default_factory=dict)

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
    def host(self) -> HostDescription:
        """The tool pool as one host."""
        return HostDescription(HostId("tools"), self.tool_cpus or 1)

    @property
    def beliefs(self) -> Mapping[int, EngineCost]:
        """What strategies plan with."""
        return self.believed or {spec.tp_degree: cost for spec, cost in self.engines}


def equal_engines(
    count: int,
    cost: EngineCost,
    *,
    slots: int,
    max_context_tokens: int,
    tp_degree: int = 1,
    kv_transfer: bool = True,
    first: int = 0,
) -> tuple[tuple[EngineDescription, EngineCost], ...]:
    """`count` like engines, numbered from `first`; their KV capacity is the cost's."""
    return tuple(
        (
            EngineDescription(
                engine_id=EngineId(f"engine-{first + number}"),
                slots=slots,
                max_context_tokens=max_context_tokens,
                tp_degree=tp_degree,
                kv_capacity_tokens=cost.capacity_tokens,
                kv_transfer=kv_transfer,
            ),
            cost,
        )
        for number in range(count)
    )
