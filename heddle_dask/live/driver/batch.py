"""What a run of a rollout returns, a batch or a stream, and what a notebook shows of the rollout."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from heddle_dask.core.notebook import facts_html, named_repr, rows_html
from heddle_dask.records.causes import CauseCount, CauseCounts, Ended
from heddle_dask.records.trajectory import TrajectoryRecord

if TYPE_CHECKING:
    from heddle_dask.records.reader import RunReader

Item = TypeVar("Item")

_SHOWN = ("environment", "model", "strategy", "samples", "seed", "out", "finished", "unfinished", "tokens")


@dataclass(frozen=True, slots=True)
class Batch:
    """The trajectories of one `Rollout.run`, and where they are stored.

    Attributes
    ----------
    trajectories
        Where there is a store, they are read from it when they are asked for, in its order: as long as it is there.
        Else all of them are in memory, in order of completion.
    reward_mean
        Mean over the trajectories whose reward is known; None when none is.
    generated_tokens
        Tokens that were sampled.
    counts
        Trajectories by status.
    causes
        Trajectories that did not complete, by status and cause, with the first message of each; largest first.
    """

    trajectories: Sequence[TrajectoryRecord]
    makespan_s: float
    reward_mean: float | None
    generated_tokens: int
    out: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    moves: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    causes: tuple[CauseCount, ...] = ()

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[TrajectoryRecord]:
        return iter(self.trajectories)

    @overload
    def __getitem__(self, index: int) -> TrajectoryRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TrajectoryRecord]: ...

    def __getitem__(self, index: int | slice) -> TrajectoryRecord | Sequence[TrajectoryRecord]:
        return self.trajectories[index]

    def __repr__(self) -> str:
        mean = "unknown" if self.reward_mean is None else f"{self.reward_mean:.4g}"
        makespan = f"{self.makespan_s:.1f} s"
        facts = {**self.counts, "reward_mean": mean, "makespan": makespan, "tokens": self.generated_tokens}
        return named_repr(f"Batch of {len(self)}", {**facts, "out": self.out})

    def _repr_html_(self) -> str:
        ends = ", ".join(f"{count:,} {status}" for status, count in self.counts.items())
        rate = f" ({self.generated_tokens / self.makespan_s:,.0f} per second)" if self.makespan_s > 0 else ""
        facts = {
            "ended": ends,
            "mean reward": "unknown" if self.reward_mean is None else self.reward_mean,
            "makespan": f"{self.makespan_s:,.1f} s",
            "tokens": f"{self.generated_tokens:,}{rate}",
            "stored in": self.out,
        }
        failed = ((each.title, each.count, each.first_trajectory, each.first_message) for each in self.causes)
        head = ("did not complete", "number", "first", "its message")
        tables = [rows_html(head, failed, len(self.causes))] if self.causes else []
        return facts_html(f"Batch of {len(self):,} trajectories", facts, *tables)


class BatchTally:
    """Counts the trajectories of a batch while they finish; of those that a store has, it keeps none."""

    def __init__(self) -> None:
        self.kept: list[TrajectoryRecord] = []  # trajectories that no store has
        self.counts: dict[str, int] = {}
        self.last_end_s = 0.0
        self.generated_tokens = 0
        self.causes = CauseCounts()  # trajectories that did not complete
        self._rewards = 0
        self._reward_sum = 0.0

    def add(self, record: TrajectoryRecord, *, is_stored: bool) -> None:
        if not is_stored:
            self.kept.append(record)
        self.counts[record.status] = self.counts.get(record.status, 0) + 1
        self.causes.add(Ended(record.trajectory_id, record.status, record.cause, record.detail))
        self.last_end_s = max(self.last_end_s, record.finished_s)
        self.generated_tokens += sum(int(branch.loss_mask.sum()) for branch in record.branches)
        if record.reward is not None:
            self._rewards += 1
            self._reward_sum += record.reward

    def batch(self, out: str | None, rows: range, began_s: float, moves: Mapping[str, Mapping[str, float]]) -> Batch:
        """The batch of what was counted; `rows` are those of the store at `out`, if there is one."""
        return Batch(
            trajectories=self.kept if out is None else StoredTrajectories(out, rows, self.kept),
            makespan_s=self.last_end_s - began_s,
            reward_mean=self.reward_mean,
            generated_tokens=self.generated_tokens,
            out=out,
            counts=self.counts,
            moves=moves,
            causes=self.causes.rows(),
        )

    @property
    def reward_mean(self) -> float | None:
        """Over the known rewards."""
        return self._reward_sum / self._rewards if self._rewards else None


class StoredTrajectories(Sequence[TrajectoryRecord]):
    """Rows of a stored run, read when they are asked for, and after them trajectories that the run does not have."""

    def __init__(self, path: str | Path, rows: range, kept: Sequence[TrajectoryRecord] = ()) -> None:
        self._path = Path(path)
        self._rows = rows
        self._kept = kept
        self._reader: RunReader | None = None

    def __len__(self) -> int:
        return len(self._rows) + len(self._kept)

    def __repr__(self) -> str:
        return f"<{len(self)} trajectories of {self._path}>"

    @overload
    def __getitem__(self, index: int) -> TrajectoryRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[TrajectoryRecord]: ...

    def __getitem__(self, index: int | slice) -> TrajectoryRecord | list[TrajectoryRecord]:
        """One trajectory, or a list of them.

        Raises
        ------
        BadInput
            The run is gone or damaged.
        """
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        number = range(len(self))[index]
        if number >= len(self._rows):
            return self._kept[number - len(self._rows)]
        if self._reader is None:
            # zarr is loaded by those that read or write a store.
            from heddle_dask.records.reader import RunReader

            self._reader = RunReader(self._path)
        return self._reader.trajectory(self._rows[number])


def stream_sync(sync: Callable[..., Any], stream: AsyncIterator[Item]) -> Iterator[Item]:
    """Yield what the stream yields.

    Parameters
    ----------
    sync
        Runs a coroutine function on the client's loop and returns its result.
    """
    while True:
        record = sync(_next_or_none, stream)
        if record is None:
            return
        yield record


async def _next_or_none(stream: AsyncIterator[Item]) -> Item | None:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None


def rollout_html(facts: Mapping[str, Any]) -> str:
    """Facts and progress of a rollout, by their names in the metadata of a run."""
    engine = facts.get("engine")
    shown: dict[str, object] = {name: facts.get(name) for name in _SHOWN[:3]}
    if facts.get("overrides"):
        shown["replaced parts"] = ", ".join(facts["overrides"])
    if isinstance(engine, Mapping):
        shown["engines"] = engine.get("kind")
    shown |= {name: facts.get(name) for name in _SHOWN[3:]}
    return facts_html("Rollout", shown)
