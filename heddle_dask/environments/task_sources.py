"""Sources of tasks: which task comes at which position.

A source is a function of its position, not an iterator. So it may be endless, nothing is drawn before there is room
for it, and a run that is resumed only needs the number of the next position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Environment, Task
from heddle_dask.environments.input_identity import payloads_digest, prompts_digest

TASKS_PER_ROUND = 256
"""Most tasks that an `EnvironmentSource` draws at a time."""


@dataclass(frozen=True, slots=True)
class SourcedTask:
    """A task, and the environment that has the program for it."""

    task: Task
    environment: Environment


class TaskSource(Protocol):
    """Where the groups of `Rollout.stream_groups` come from."""

    @property
    def environments(self) -> Sequence[Environment]:
        """All environments that its tasks may have; their names differ."""

    @property
    def description(self) -> str:
        """What tells it from other sources, on one line: a run can only be resumed with an equal one."""

    def task(self, position: int) -> SourcedTask | None:
        """The task at a position, from 0, the same whenever it is asked for; None: the source ends before it."""


class ListSource:
    """The given tasks of one environment, in their order."""

    def __init__(self, tasks: Sequence[Task], environment: Environment) -> None:
        if not tasks:
            raise BadInput("a list of tasks is empty: give at least one")
        self._tasks = tuple(tasks)
        self._environment = environment

    @property
    def environments(self) -> Sequence[Environment]:
        return (self._environment,)

    @property
    def description(self) -> str:
        return f"{len(self._tasks)} tasks of {self._environment.name} ({_content(self._tasks)})"

    def task(self, position: int) -> SourcedTask | None:
        if position >= len(self._tasks):
            return None
        return SourcedTask(self._tasks[position], self._environment)


class EnvironmentSource:
    """Tasks of one environment without end, drawn in rounds.

    Each round has a seed of its own, which follows from `seed`. An environment with fewer tasks than a round gives them
    in every round: one pass over a data set after another.

    Parameters
    ----------
    round_tasks
        Tasks of a round. A task may come again in a later round.
    """

    def __init__(self, environment: Environment, seed: int, *, round_tasks: int = TASKS_PER_ROUND) -> None:
        if round_tasks < 1:
            raise BadInput(f"rounds of {round_tasks} tasks: use at least 1")
        self._environment = environment
        self._seed = seed
        self._round_tasks = round_tasks
        self._first = self._drawn(0, round_tasks)
        self._newest = (0, self._first)

    @property
    def environments(self) -> Sequence[Environment]:
        return (self._environment,)

    @property
    def description(self) -> str:
        content = _content(self._first)
        return f"{self._environment.name} in rounds of {len(self._first)}, seed {self._seed} ({content})"

    def task(self, position: int) -> SourcedTask:
        number, index = divmod(position, len(self._first))
        if self._newest[0] != number:
            # Almost every position is that after the one before: one round is kept.
            self._newest = (number, self._first if number == 0 else self._drawn(number, len(self._first)))
        tasks = self._newest[1]
        return SourcedTask(tasks[index % len(tasks)], self._environment)

    def _drawn(self, number: int, count: int) -> tuple[Task, ...]:
        """The tasks of a round; fewer than `count` where the environment has no more."""
        seed = _seed_of(self._seed, number)
        while True:
            try:
                tasks = tuple(self._environment.tasks(count, seed))
            except BadInput:
                if count == 1:
                    raise
                count //= 2  # an environment refuses to give more different tasks than it has
                continue
            if not tasks:
                raise BadInput(f"environment {self._environment.name!r}: tasks({count}, {seed}) gave none")
            return tasks


def _content(tasks: Sequence[Task]) -> str:
    """Digest of what the tasks ask for and how they are judged, in their order."""
    return f"{prompts_digest(tasks)[:8]}-{payloads_digest(tasks)[:8]}"


def _seed_of(seed: int, number: int) -> int:
    """The seed of a round; the first one has that of the source."""
    if number == 0:
        return seed
    return int.from_bytes(blake2b(f"round {seed}/{number}".encode(), digest_size=4).digest(), "big") >> 1
