"""The branches of one trajectory: the context that its program was given, and those that it forked from it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from heddle_dask.core.ids import TrajectoryId
from heddle_dask.live.driver.programs.services import Recorded


@dataclass(slots=True)
class BranchTree:
    """What the contexts of one trajectory share.

    Attributes
    ----------
    trajectory_id
        Of the trajectory, under which its results are journalled.
    known_as
        The id by which the scheduler knows its first context; None: the same.
    recorded
        Journalled results of forked branches, by path.
    metadata
        Facts that the program has set.
    interrupted
        Whether the run is ending: a step that is cancelled now is not the program's doing.
    ended
        Whether the program has ended.
    """

    trajectory_id: TrajectoryId
    recorded: Mapping[str, Recorded]
    metadata: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    ended: bool = False
    known_as: TrajectoryId | None = None
    _waiting: dict[asyncio.Task[Any], None] = field(default_factory=dict)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what a task of the program waits for: it is cancelled if the program ends meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = None
        try:
            yield
        finally:
            self._waiting.pop(task, None)

    def end(self) -> None:
        """The program has ended: tasks that it has left running wait for nothing any more."""
        self.ended = True
        for task in list(self._waiting):
            task.cancel()


@dataclass(frozen=True, slots=True)
class Branch:
    """The place of a context in the tree.

    Attributes
    ----------
    path
        ``""`` for the first context, ``"~2"`` for that after two failures of its environment; ``"#2#1"`` is the first
        fork of its second fork.
    steps
        Number of steps before the branch began.
    """

    tree: BranchTree
    path: str = ""
    steps: int = 0

    def forked(self, number: int, steps: int) -> Branch:
        """The place of the fork of that number, from 1, after `steps` steps."""
        return Branch(self.tree, f"{self.path}#{number}", steps)

    @property
    def is_first(self) -> bool:
        """Whether its context is the one that the program was given."""
        return "#" not in self.path and not self.path.startswith("!")

    @property
    def recorded(self) -> Recorded:
        """What the journal holds of this fork."""
        return self.tree.recorded.get(self.path) or Recorded()


def fork_seed(seed: int, number: int) -> int:
    """The seed of a fork: branches must not sample the same tokens."""
    digest = blake2b(f"{seed}#{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
