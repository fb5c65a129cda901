"""What happens to the groups of a training run, and what became of the samples.

The events are those from which a sample buffer is rebuilt. They name trajectories; the tokens are in the store of the
run and in the batch files. The body of an event is its fields as JSON; `event_from_body` accepts bodies that lack later
fields. The counts (drops by cause, ages, lengths, mixes) follow from the events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import numpy as np

from heddle_dask.core.errors import BadInput
from heddle_dask.training.groups import TrajectoryGroup

_PERCENTS = (50, 90, 99)
NO_VARIANCE: Final = "no-variance"
"""Cause of a drop: all members have the same reward, so that every advantage is 0."""

FOREIGN: Final = "foreign"
"""Cause of a drop: the first token was sampled by weights that are not in the line of training any more."""


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """A group as the buffer knows it; all tuples have one entry for each member.

    Attributes
    ----------
    first_versions
        Version that sampled the first token of each member.
    sampled_tokens
        Tokens of each member that are trained.
    late_for, earlier_rewards
        As in `groups.TrajectoryGroup`.
    """

    group_id: str
    task_id: str
    environment: str
    lineage: str
    trajectory_ids: tuple[str, ...]
    rewards: tuple[float, ...]
    first_versions: tuple[int, ...]
    sampled_tokens: tuple[int, ...]
    truncated: tuple[bool, ...]
    late_for: str = ""
    earlier_rewards: tuple[float, ...] = ()

    @property
    def first_version(self) -> int:
        return min(self.first_versions)

    @classmethod
    def of(cls, group: TrajectoryGroup) -> BufferedGroup:
        members = group.members
        return cls(
            group.group_id,
            group.task_id,
            group.environment,
            group.lineage,
            tuple(one.trajectory_id for one in members),
            tuple(one.reward for one in members),
            tuple(one.first_version for one in members),
            tuple(one.sampled_tokens for one in members),
            tuple(one.truncated for one in members),
            group.late_for,
            group.earlier_rewards,
        )


@dataclass(frozen=True, slots=True)
class GroupAccepted:
    """A group waits in the buffer; its trajectories are committed in the store."""

    group: BufferedGroup


@dataclass(frozen=True, slots=True)
class GroupDropped:
    """No batch takes this group: it was refused at its arrival, evicted later, or cancelled before.

    Attributes
    ----------
    cause
        `NO_VARIANCE`, `FOREIGN`, `group_records.TOO_FEW`, `core.run_description.STALE`, or that of the cancellation.
    sampled_tokens, rewards
        Of each of its members that ended. No rewards where they are unknown.
    """

    group_id: str
    environment: str
    cause: str
    sampled_tokens: tuple[int, ...]
    rewards: tuple[float, ...] = ()
    late_for: str = ""


@dataclass(frozen=True, slots=True)
class BatchFormed:
    """Optimiser step `step` takes these groups, in this order. Its file is on disk."""

    step: int
    lineage: str
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BatchTrained:
    """The optimiser step is in a checkpoint: the samples of its batch are consumed."""

    step: int


@dataclass(frozen=True, slots=True)
class LineageBegan:
    """The training goes on from a checkpoint of `number` steps under a new name; later steps are undone.

    Attributes
    ----------
    keeps_batches
        The batches of these steps are given out again; else they are gone.
    """

    lineage: str
    number: int
    keeps_batches: bool = True


BufferEvent = GroupAccepted | GroupDropped | BatchFormed | BatchTrained | LineageBegan

_KINDS: Final[Mapping[str, type[Any]]] = {
    kind.__name__: kind for kind in (GroupAccepted, GroupDropped, BatchFormed, BatchTrained, LineageBegan)
}


def event_to_body(event: BufferEvent) -> tuple[str, dict[str, Any]]:
    return type(event).__name__, asdict(event)


def event_from_body(kind: str, body: Mapping[str, Any]) -> BufferEvent:
    """Read what `event_to_body` made.

    Raises
    ------
    BadInput
        Another version wrote it, or it is damaged.
    """
    try:
        values = dict(body)
        if kind == GroupAccepted.__name__:
            values["group"] = BufferedGroup(**_tuples(BufferedGroup, values["group"]))
        made: BufferEvent = _KINDS[kind](**_tuples(_KINDS[kind], values))
        return made
    except (KeyError, TypeError) as error:
        raise BadInput(f"the log of the sample buffer has an unknown entry {kind}: {error}") from None


def _tuples(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(kind)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise KeyError(unknown[0])
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Trained tokens of trajectories; all 0.0 without any."""

    trajectories: int
    mean_tokens: float
    p50_tokens: float
    p90_tokens: float
    p99_tokens: float

    @classmethod
    def of(cls, tokens: Mapping[int, int]) -> Lengths:
        if not tokens:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        values = np.array(sorted(tokens))
        counts = np.array([tokens[int(value)] for value in values])
        total = int(counts.sum())
        below = np.cumsum(counts)
        # The smallest length that at least so many per cent do not exceed.
        quantiles = [float(values[np.searchsorted(below, total * percent / 100)]) for percent in _PERCENTS]
        return cls(total, float((values * counts).sum() / total), *quantiles)


@dataclass(slots=True)
class BufferCounts:
    """Since the training began.

    Attributes
    ----------
    sampled_groups, trained_groups
        By environment: the mix that arrived, and the one that went into batches.
    staleness
        Trajectories in batches by their n - b.
    """

    sampled_groups: Counter[str] = field(default_factory=Counter)
    trained_groups: Counter[str] = field(default_factory=Counter)
    dropped_groups: Counter[str] = field(default_factory=Counter)
    dropped_trajectories: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    _sampled_tokens: Counter[int] = field(default_factory=Counter)
    _trained_tokens: Counter[int] = field(default_factory=Counter)

    @property
    def sampled_lengths(self) -> Lengths:
        """Of all trajectories that ended, dropped ones included."""
        return Lengths.of(self._sampled_tokens)

    @property
    def trained_lengths(self) -> Lengths:
        return Lengths.of(self._trained_tokens)

    @property
    def share_without_variance(self) -> float:
        """Of the groups that arrived; 0.0 before the first."""
        arrived = self.sampled_groups.total()
        return self.dropped_groups[NO_VARIANCE] / arrived if arrived else 0.0

    def arrived(self, environment: str, sampled_tokens: Iterable[int]) -> None:
        self.sampled_groups[environment] += 1
        self._sampled_tokens.update(sampled_tokens)

    def dropped(self, cause: str, sampled_tokens: Sequence[int]) -> None:
        self.dropped_groups[cause] += 1
        self.dropped_trajectories[cause] += len(sampled_tokens)
        self.dropped_tokens[cause] += sum(sampled_tokens)

    def formed(self, step: int, groups: Iterable[BufferedGroup]) -> None:
        for group in groups:
            self.trained_groups[group.environment] += 1
            self._trained_tokens.update(group.sampled_tokens)
            self.staleness.update(step - 1 - version for version in group.first_versions)
