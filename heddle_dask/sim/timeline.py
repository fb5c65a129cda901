"""What is seen of a simulated rollout over time: running requests by engine, and active trajectories."""

from __future__ import annotations

from collections.abc import Sequence

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import StepId

Curve = list[tuple[float, int]]


class Timeline:
    """Follows a world's events; counts as the controller learns them.

    Attributes
    ----------
    running
        By engine: when the number of steps in its batch changed, and to what.
    active
        The same of trajectories that are admitted and have not ended.
    """

    def __init__(self) -> None:
        self.running: dict[str, Curve] = {}
        self.active: Curve = [(0.0, 0)]
        self._started: dict[StepId, str] = {}
        self._admitted: dict[str, None] = {}

    def watch(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """Take one event with its commands, in order of time."""
        match event:
            case ev.EngineJoined():
                self.running[event.engine.engine_id] = [(event.at, 0)]
            case ev.StepStarted():
                self._started[event.step_id] = event.engine_id
                self._count(self.running[event.engine_id], event.at, 1)
            case ev.StepFinished() | ev.StepFailed():
                engine_id = self._started.pop(event.step_id, None)
                if engine_id is not None:
                    self._count(self.running[engine_id], event.at, -1)
            case ev.EngineLost():
                lost = event.engine_id
                gone = [each for each, engine_id in self._started.items() if engine_id == lost]
                for each in gone:
                    del self._started[each]
                self.running[lost].append((event.at, 0))
            case ev.TrajectoryEnded() if event.trajectory_id in self._admitted:
                del self._admitted[event.trajectory_id]
                self._count(self.active, event.at, -1)
        for command in commands:
            if isinstance(command, cmd.AdmitTrajectory):
                self._admitted[command.trajectory_id] = None
                self._count(self.active, event.at, 1)

    @staticmethod
    def _count(curve: Curve, at: float, change: int) -> None:
        then, number = curve[-1]
        if then == at:
            curve[-1] = (at, number + change)
        else:
            curve.append((at, number + change))


def means(curve: Curve, until_s: float, cells: int) -> list[float]:
    """Mean of a step curve over each of `cells` equal parts of 0 ... `until_s`."""
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
