"""A simulated rollout over time: running steps by engine, and active trajectories."""

from __future__ import annotations

from collections.abc import Iterable

from heddle_dask.core import events as ev
from heddle_dask.core.ids import EngineId
from heddle_dask.core.snapshot import EngineCounts
from heddle_dask.core.state import State

Curve = list[tuple[float, int]]


class Timeline:
    """Counts running steps and active trajectories in the controller's state after each event.

    Attributes
    ----------
    running
        By engine: times at which the number of steps in its batch changed, with the new number.
    active
        The same for trajectories that are admitted and have not ended.
    """

    def __init__(self) -> None:
        self.running: dict[str, Curve] = {}
        self.active: Curve = [(0.0, 0)]

    def take(self, event: ev.Event, state: State) -> None:
        """Count the state after one event, in order of time."""
        changed: Iterable[EngineId] = ()
        match event:
            case ev.EngineJoined():
                self.running[event.engine.engine_id] = [(event.at, 0)]
            case ev.StepStarted() | ev.StepFinished() | ev.StepFailed():
                changed = (event.engine_id,)
            case ev.EngineLost() | ev.ProgramEnded() | ev.TrajectoryEnded():
                changed = state.engines
        for engine_id in changed:
            counts = EngineCounts.of(state.engines[engine_id])
            self._note(self.running[engine_id], event.at, counts.generating)
        self._note(self.active, event.at, state.alive)

    @staticmethod
    def _note(curve: Curve, at: float, number: int) -> None:
        then, before = curve[-1]
        if then == at:
            curve[-1] = (at, number)
        elif number != before:
            curve.append((at, number))


def means(curve: Curve, until_s: float, cells: int) -> list[float]:
    """Means of a step function over `cells` equal parts of 0 ... `until_s`."""
    if until_s <= 0:
        return [0.0] * cells
    width_s = until_s / cells
    sums = [0.0] * cells
    ends = [at for at, _ in curve[1:]] + [until_s]
    for (begin_s, number), end_s in zip(curve, ends, strict=True):
        if not number:
            continue
        first, last = int(begin_s / width_s), min(cells - 1, int(min(end_s, until_s) / width_s))
        for cell in range(first, last + 1):
            inside_s = min(end_s, (cell + 1) * width_s, until_s) - max(begin_s, cell * width_s)
            sums[cell] += number * max(0.0, inside_s)
    return [total / width_s for total in sums]
