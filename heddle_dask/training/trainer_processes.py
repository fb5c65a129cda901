"""A trainer of others in several processes, of which the main one has the engines: it hands the others their shares.

What each process calls here, all of them call, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from heddle_dask.core.errors import BadInput, one_line_of
from heddle_dask.records.trajectory import TrajectoryRecord


class TrainerSampler(Protocol):
    """The engines that sample for a trainer."""

    @property
    def temperature(self) -> float:
        """With which they sample; the trainer must divide by the same."""
        ...

    def roll_out(self, task_ids: Sequence[str], samples: int) -> Iterable[TrajectoryRecord]:
        """That many attempts at each of these tasks, in any order, failed ones included."""
        ...

    def publish(self, weights: Mapping[str, Any], step: int) -> None:
        """Publish whole tensors by their names as version `step`; returns when all engines sample with them."""
        ...


class TrainerProcesses(Protocol):
    """What the processes of one trainer tell each other."""

    @property
    def count(self) -> int: ...

    def gather(self, mine: list[str]) -> list[list[str]]:
        """To the main process: what each gave, in the order of their ranks. Elsewhere empty."""
        ...

    def scatter(self, shares: Sequence[Any]) -> Any:
        """From the main process: a share for each. Elsewhere `shares` is not looked at."""
        ...


class OneProcess:
    """Implements `TrainerProcesses` for a trainer that is one process."""

    count = 1

    def gather(self, mine: list[str]) -> list[list[str]]:
        return [mine]

    def scatter(self, shares: Sequence[Any]) -> Any:
        return shares[0]


@dataclass(frozen=True, slots=True)
class MainFailed:
    """Instead of a share: why the main process has none."""

    line: str


def handed_out(processes: TrainerProcesses, shares: Callable[[], Sequence[Any]] | None) -> Any:
    """The share of this process.

    Parameters
    ----------
    shares
        In the main process: makes a share for each. None elsewhere.

    Raises
    ------
    BadInput
        The main process could not make them. There, its own error is raised when all have been told.
    """
    made: Sequence[Any] = []
    if shares is not None:
        try:
            made = shares()
        except BaseException as error:
            processes.scatter([MainFailed(one_line_of(error))] * processes.count)
            raise
    share = processes.scatter(made)
    if isinstance(share, MainFailed):
        raise BadInput(f"the main process of the trainer has failed: {share.line}")
    return share
