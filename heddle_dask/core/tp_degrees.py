"""Values of TP-degree planning: the request with its facts, and the plan.

Engines change between batches only. The body announces a batch (`DegreesRequested`); the controller commands a search
(`PlanDegrees`), checks the answer (`DegreesPlanned`) and commands the deployment (`DeployEngines`).
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.nouns import TrajectorySpec


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """A node: its number of GPUs, and of workers, each of which hosts at most one engine."""

    gpus: int
    workers: int


@dataclass(frozen=True, slots=True)
class FinishedWork:
    """Work of an earlier trajectory: generated tokens, observation tokens, tool seconds."""

    decode_tokens: int
    observation_tokens: int = 0
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DegreeRequest:
    """The facts for a plan of the TP degrees.

    Attributes
    ----------
    request_id
        Larger than that of every earlier request of the session.
    asked
        TP degrees that the user asked for; empty: to be planned.
    running
        TP degree of every deployed engine.
    candidates
        TP degrees that may be planned.
    default
        TP degree of the engines if none is deployed and the work is unknown.
    start_s
        Pairs of a TP degree and the longest measured start of an engine of it, in seconds.
    trajectories
        The trajectories of the batch.
    known_tokens
        Tokens that each trajectory of the batch will generate; 0 when not known.
    finished
        Earlier trajectories, in any order.
    max_context_tokens
        Upper limit of the length of a context.
    """

    request_id: int
    nodes: tuple[NodeGpus, ...]
    asked: tuple[int, ...] = ()
    running: tuple[int, ...] = ()
    candidates: tuple[int, ...] = ()
    default: int = 1
    start_s: tuple[tuple[int, float], ...] = ()
    trajectories: tuple[TrajectorySpec, ...] = ()
    known_tokens: tuple[int, ...] = ()
    finished: tuple[FinishedWork, ...] = ()
    max_context_tokens: int = 0

    @property
    def allowed(self) -> frozenset[int]:
        """TP degrees that a plan may contain."""
        return frozenset(self.asked or (*self.candidates, *self.running, self.default))


@dataclass(frozen=True, slots=True)
class TpDegreePlan:
    """TP degrees for the next batch, with the expected makespan.

    Attributes
    ----------
    tp_degrees
        One for each engine, from the largest to the smallest.
    source
        Source of the work: ``"asked"``, ``"nothing"``, or the sources of the forecast.
    expected_makespan_s
        Expected seconds until the batch ends, including the start of engines; None without a forecast.
    restart_s
        The part of `expected_makespan_s` until the engines are ready.
    uniform_s
        Pairs of a TP degree and the `expected_makespan_s` of as many engines of it as fit; None if some trajectory fits
        no such engine.
    """

    tp_degrees: tuple[int, ...]
    source: str
    expected_makespan_s: float | None = None
    restart_s: float = 0.0
    uniform_s: tuple[tuple[int, float | None], ...] = ()
