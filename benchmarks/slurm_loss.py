"""What the loss of one job has cost, by the journal of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heddle_dask.core.events import EngineLost, StepFinished, StepStarted
from heddle_dask.core.ids import StepId
from heddle_dask.core.journal_codec import decode
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.records.journal import JournalReader


@dataclass(frozen=True, slots=True)
class LostJob:
    """The loss of one job with an engine.

    Attributes
    ----------
    in_flight
        Steps that ran on its engine.
    again
        Steps that were sampled again, over the whole run.
    ended
        Trajectories by their status.
    noticed_s
        From the kill until the scheduler had lost the worker.
    recovered_s
        From the kill until the last of the lost steps ran again, on another engine.
    replaced_s
        From the kill until the worker of the replacing job had joined.
    """

    in_flight: int
    again: int
    ended: dict[str, int]
    noticed_s: float
    recovered_s: float
    replaced_s: float


def lost_job(out: Path, job: str, statuses: Sequence[str], noticed_s: float, replaced_s: float) -> LostJob:
    """Read what became of the steps of a job that was killed from the controller's lines."""
    lines = [line for kind, body, _ in JournalReader(journal_path(out)) if kind == "control" for line in body["lines"]]
    events = [decode(event) for event, _ in lines]
    lost = next(event for event in events if isinstance(event, EngineLost) and event.engine_id.startswith(f"{job}/"))
    running: set[StepId] = set()
    again_s: dict[tuple[str, int], float] = {}
    for event in events:
        if event is lost:
            open_steps = {step[:2] for step in running}
        if isinstance(event, StepStarted):
            if event.engine_id == lost.engine_id:
                running.add(event.step_id)
            elif event.at >= lost.at and event.step_id.attempt > 0:
                again_s.setdefault(event.step_id[:2], event.at)
        elif isinstance(event, StepFinished):
            running.discard(event.step_id)
    assert open_steps <= again_s.keys()
    recovered_s = max((again_s[step] for step in open_steps), default=lost.at) - lost.at
    return LostJob(
        in_flight=len(open_steps),
        again=len(again_s),
        ended=dict(Counter(statuses)),
        noticed_s=round(noticed_s, 2),
        recovered_s=round(noticed_s + recovered_s, 2),
        replaced_s=round(replaced_s, 2),
    )
