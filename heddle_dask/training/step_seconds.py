"""What a training step spent its time on, from the loop's commands and their answers. Pure: times come in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from heddle_dask.training.loop_messages import (
    BatchReady,
    FormBatch,
    LoopCommand,
    LoopEvent,
    OpenBatches,
    PublishEnded,
    PublishVersion,
    StepTrained,
    SwitchEnded,
    SwitchVersion,
    TrainOnBatch,
)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one training step, or of several; phases overlap, so they may sum to more than passed.

    Attributes
    ----------
    rollout
        From when tasks of the batch could be taken until it was formed.
    wait
        The part of it in which the trainer had nothing else to do than to wait for the batch.
    train
        Load, forward, backward, optimiser step, checkpoint.
    publish
        Writing the weights into the store.
    install
        From the wish to switch until every engine sampled with the newer weights; engines generate meanwhile.
    """

    rollout: float = 0.0
    wait: float = 0.0
    train: float = 0.0
    publish: float = 0.0
    install: float = 0.0

    def plus(self, other: StepSeconds) -> StepSeconds:
        """Phase by phase."""
        mine, theirs = asdict(self), asdict(other)
        return StepSeconds(**{name: mine[name] + theirs[name] for name in mine})

    def rounded(self) -> dict[str, float]:
        """By phase, for people and JSON."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


class StepClock:
    """Follows a loop and adds up seconds, from one `take` to the next.

    A row of metrics is written when its step is trained. What it says of publishing and installing is therefore of the
    weights of the step before.
    """

    def __init__(self) -> None:
        self._began: dict[LoopEvent, float] = {}
        self._opened: dict[int, float] = {}
        self._opened_through = 0
        self._waits_since = 0.0
        self._seconds = StepSeconds()

    def gave(self, at: float, commands: Iterable[LoopCommand]) -> None:
        """The loop gave these commands."""
        for command in commands:
            match command:
                case OpenBatches(through):
                    for batch in range(self._opened_through + 1, through + 1):
                        self._opened[batch] = at
                    self._opened_through = max(self._opened_through, through)
                case FormBatch(step):
                    self._began[BatchReady(step)] = at
                    self._waits_since = at
                case TrainOnBatch(step):
                    self._began[StepTrained(step)] = at
                case PublishVersion(number):
                    self._began[PublishEnded(number)] = at
                case SwitchVersion(number):
                    self._began[SwitchEnded(number)] = at

    def took(self, at: float, event: LoopEvent) -> None:
        """The loop was told this; call it before the commands that follow from it."""
        began = self._began.pop(event, None)
        if began is None:
            return
        match event:
            case BatchReady(step):
                self._add(rollout=at - self._opened.pop(step, began), wait=max(0.0, at - self._waits_since))
            case StepTrained():
                self._add(train=at - began)
            case PublishEnded():
                self._add(publish=at - began)
                # The trainer writes weights itself: while it does, it does not wait.
                self._waits_since = max(self._waits_since, at)
            case SwitchEnded():
                self._add(install=at - began)

    def take(self) -> StepSeconds:
        """The seconds since the last call."""
        taken, self._seconds = self._seconds, StepSeconds()
        return taken

    def _add(self, **seconds: float) -> None:
        self._seconds = self._seconds.plus(StepSeconds(**seconds))
