"""What a script or a notebook sees of a rollout: its lines, and how far it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from heddle_dask.core.errors import BadInput
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.views.history.reward_history import RewardTally

if TYPE_CHECKING:
    from heddle_dask.live.driver.runs.progress import ProgressDisplay


class ShownProgress:
    """Shows the progress of a rollout's batches on stderr, or nothing.

    Parameters
    ----------
    asked
        Whether it is shown; or what takes the lines in the place of stderr.
    """

    def __init__(self, asked: bool | Callable[[str], None]) -> None:
        if not (isinstance(asked, bool) or callable(asked)):
            raise BadInput(f"progress is {asked!r}: use True, False or a function that takes one line, such as print")
        self._is_shown = asked is True
        self._takes = asked if callable(asked) else None
        self._noted: set[str] = set()
        self._made: ProgressDisplay | None = None
        self._expected = 0
        self.failed = 0
        self.rewards = RewardTally()

    def note(self, line: str) -> None:
        if self._takes is not None:
            self._takes(line)
        elif self._is_shown:
            self._display.message(line)

    def note_once(self, line: str) -> None:
        """A line that each trajectory may give; one tells it."""
        if line not in self._noted:
            self._noted.add(line)
            self.note(line)

    def expect(self, attempts: int) -> None:
        """A batch of so many attempts begins."""
        self._expected, self.failed, self.rewards = attempts, 0, RewardTally()

    def ended(self, record: TrajectoryRecord) -> None:
        failed = record.status == "failed"
        if failed and not self.failed and self._is_shown:
            self._display.message(f"{record.trajectory_id} failed by {record.cause}: {record.detail}")
        self.failed += failed
        self.rewards.add(record.group_id, record.reward)

    @asynccontextmanager
    async def following(self, counts: Callable[[], Mapping[str, Any]]) -> AsyncIterator[None]:
        """Show how far the batch is while the context is open; of an endless one, nothing."""
        if not self._is_shown or not self._expected:
            yield
            return
        from heddle_dask.live.driver.runs.progress import Meter

        meter = Meter(self._expected, self, counts)
        self._expected = 0
        async with self._display.following(meter):
            yield
        self._display.show(meter.snapshot().ended())

    @property
    def _display(self) -> ProgressDisplay:
        if self._made is None:
            # rich is loaded when something is shown.
            from heddle_dask.live.driver.runs.progress import ProgressDisplay
            from heddle_dask.views.drawing.safe_console import SafeConsole

            self._made = ProgressDisplay(SafeConsole(stderr=True, force_jupyter=False))
        return self._made
