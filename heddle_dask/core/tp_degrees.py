"""TP degrees as values: the facts that a plan is made of, and the plan.

Engines change between batches only. The body announces a batch (`DegreesRequested`); the controller has a plan searched
(`PlanDegrees`), checks the answer (`DegreesPlanned`) and has the engines deployed (`DeployEngines`).
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.nouns import TrajectorySpec


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """A node: its GPUs, and its workers, each of which hosts one engine at most."""

    gpus: int
    workers: int


@dataclass(frozen=True, slots=True)
class FinishedWork:
    """What an earlier trajectory took: tokens generated, tokens added by tools, seconds in tools."""

    decode_tokens: int
    observation_tokens: int = 0
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DegreeRequest:
    """The facts that a plan of the TP degrees is made of.

    Attributes
    ----------
    request_id
        Larger than that of every earlier request of the session.
    asked
        TP degrees that the user asked for; empty: they are to be planned.
    running
        TP degree of every engine that is deployed now.
    candidates
        TP degrees that may be planned.
    default
        TP degree of the engines where nothing runs and nothing is known of the work.
    start_s
        Pairs of a TP degree and the longest measured start of an engine of it, in seconds.
    trajectories
        The trajectories of the batch.
    known_tokens
        Tokens that each of them will generate, 0 where that is not known.
    finished
        Earlier trajectories, in any order.
    max_context_tokens
        No context grows longer.
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
    """TP degrees for the next batch, and what they are expected to cost.

    Attributes
    ----------
    tp_degrees
        One for each engine, from the largest to the smallest.
    source
        Where the work is known from: ``"asked"``, ``"nothing"``, or the sources of the forecast.
    expected_makespan_s
        Seconds until the batch has ended, the start of engines included; None without a forecast.
    restart_s
        The part of it until the engines are ready.
    uniform_s
        Pairs of a TP degree and `expected_makespan_s` of as many engines of it as there is room for; None where some
        trajectory fits no such engine.
    """

    tp_degrees: tuple[int, ...]
    source: str
    expected_makespan_s: float | None = None
    restart_s: float = 0.0
    uniform_s: tuple[tuple[int, float | None], ...] = ()
