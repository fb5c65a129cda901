"""Failures of environments: when a trajectory is attempted again, and which tasks are quarantined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from heddle_dask.core.run_description import RetryPolicy

_MOST_DOUBLINGS = 6


class EnvironmentFailures:
    """Counts the failures of one run.

    Parameters
    ----------
    note
        Takes one line for each task that is quarantined.

    Attributes
    ----------
    count
        Attempts whose environment failed.
    quarantined
        Ids of tasks that are not attempted again, with the last message.
    """

    def __init__(self, retries: RetryPolicy, note: Callable[[str], None] = lambda line: None) -> None:
        self._retries = retries
        self._note = note
        self._in_a_row: Counter[str] = Counter()
        self.count = 0
        self.quarantined: dict[str, str] = {}

    def backoff_s(self, failures: int) -> float:
        """Seconds before the attempt that follows this many failures."""
        return float(self._retries.environment_backoff_s * 2 ** min(failures - 1, _MOST_DOUBLINGS))

    def failed(self, task_id: str, failures: int, message: str) -> bool:
        """The environment of an attempt has failed; whether the trajectory is attempted again.

        Parameters
        ----------
        failures
            Of this trajectory, this one included.
        """
        self.count += 1
        self._in_a_row[task_id] += 1
        if self._in_a_row[task_id] >= self._retries.max_task_failures:
            self.quarantine(task_id, message)
        return task_id not in self.quarantined and failures < self._retries.max_environment_attempts

    def quarantine(self, task_id: str, message: str) -> None:
        """This task is not attempted again."""
        if task_id not in self.quarantined:
            self.quarantined[task_id] = message
            times = self._in_a_row[task_id] or self._retries.max_task_failures
            self._note(f"task {task_id} is quarantined: its environment failed {times} times: {message}")

    def succeeded(self, task_id: str) -> None:
        """An attempt at this task has come to its end."""
        self._in_a_row.pop(task_id, None)
