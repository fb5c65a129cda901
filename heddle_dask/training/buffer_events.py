"""What happens to the groups of a training run: the events from which a sample buffer is rebuilt.

They name trajectories; the tokens are in the store of the run and in the batch files. The body of an event is its
fields as JSON; `event_from_body` accepts bodies that lack the later fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from heddle_dask.core.errors import BadInput
from heddle_dask.training.groups import TrajectoryGroup

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
        """A group is as old as its oldest member."""
        return min(self.first_versions)

    @classmethod
    def of(cls, group: TrajectoryGroup) -> BufferedGroup:
        """What the buffer needs to know of a group."""
        members = group.members
        return cls(
            group.group_id,
            group.task_id,
            group.environment,
            group.lineage,
            tuple(one.trajectory_id for one in members),
            tuple(one.reward for one in members),
            tuple(one.first_version for one in members),
            tuple(one.trained_tokens for one in members),
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
    """The training goes on from a checkpoint of `number` steps under a new name; later steps are undone."""

    lineage: str
    number: int


BufferEvent = GroupAccepted | GroupDropped | BatchFormed | BatchTrained | LineageBegan

_KINDS: Final[Mapping[str, type[Any]]] = {
    kind.__name__: kind for kind in (GroupAccepted, GroupDropped, BatchFormed, BatchTrained, LineageBegan)
}


def event_to_body(event: BufferEvent) -> tuple[str, dict[str, Any]]:
    """Kind and JSON-able fields."""
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
