"""Facts about a trajectory's siblings: now (`GroupBook`), and at a past moment (`facts_then`).

A sibling counts as finished only if it had ended by the moment of the prediction. All group facts are made here, so
that no prediction can use the future.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from heddle_dask.predictors.features import NAN, NO_SIBLINGS, Finished, GroupFacts, Progress

SIBLINGS_KEPT = 32
GROUPS_KEPT = 8192

Locate = Callable[[Progress | Finished], float]


def finished_facts(
    siblings: Sequence[Finished], policy_version: int, locate: Locate, locate_s: Locate
) -> GroupFacts:
    """Group facts from siblings that have all ended by themselves, oldest first."""
    if not siblings:
        return NO_SIBLINGS
    excess = [math.log1p(each.generated_tokens) - locate(each) for each in siblings]
    same = [
        value for value, each in zip(excess, siblings, strict=True) if each.policy_version == policy_version
    ]
    seconds = [
        math.log1p(each.duration_s) - locate_s(each) for each in siblings if not math.isnan(each.duration_s)
    ]
    return GroupFacts(
        finished=len(siblings),
        mean_excess=sum(excess) / len(excess),
        same_excess=sum(same) / len(same) if same else NAN,
        largest=math.log1p(max(each.generated_tokens for each in siblings)),
        latest_excess=excess[-1],
        excess_s=sum(seconds) / len(seconds) if seconds else NAN,
    )


def facts_then(row: Progress, members: Sequence[Finished], locate: Locate, locate_s: Locate) -> GroupFacts:
    """Group facts as known at `row.at_s`.

    `members` is the whole group, the trajectory itself included, in the order in which they were observed. Without
    clocks the other members count as earlier runs of the prompt.
    """
    others = [each for each in members if each.trajectory_id != row.trajectory_id]
    if math.isnan(row.at_s):
        ended = [each for each in others if math.isnan(each.ended_at_s) and not each.censored]
        return finished_facts(ended[-SIBLINGS_KEPT:], row.policy_version, locate, locate_s)
    ended = sorted(
        (each for each in others if each.ended_at_s <= row.at_s and not each.censored),
        key=lambda each: each.ended_at_s,
    )
    facts = finished_facts(ended[-SIBLINGS_KEPT:], row.policy_version, locate, locate_s)
    lengths = [
        _generated_by(each, row.at_s) for each in others if each.started_at_s <= row.at_s < each.ended_at_s
    ]
    return _with_running(facts, lengths)


def _generated_by(sibling: Finished, at_s: float) -> int:
    """Known tokens of a sibling at `at_s`: those of its last decision point before that time."""
    return max((point.generated_tokens for point in sibling.points if point.at_s <= at_s), default=0)


def _with_running(facts: GroupFacts, lengths: Sequence[int]) -> GroupFacts:
    if not lengths:
        return facts
    mean = math.log1p(sum(lengths) / len(lengths))
    return facts._replace(running=len(lengths), running_mean=mean, running_largest=math.log1p(max(lengths)))


class GroupBook:
    """The siblings of all running trajectories, in memory bounded by `SIBLINGS_KEPT` and `GROUPS_KEPT`."""

    def __init__(self) -> None:
        self._finished: dict[str, list[Finished]] = {}
        self._running: dict[str, dict[str, int]] = {}
        self._facts: dict[tuple[str, int], GroupFacts] = {}
        self._locate: Locate | None = None

    def finish(self, one: Finished) -> None:
        """Record the end of a trajectory; it becomes a finished sibling unless it is censored."""
        self._end_running(one.group_id, one.trajectory_id)
        if one.censored:
            return
        siblings = self._finished.pop(one.group_id, [])
        siblings = [each for each in siblings if each.trajectory_id != one.trajectory_id]
        # The dictionary is in order of last use: re-insert the group at the end; eviction takes the head.
        self._finished[one.group_id] = [*siblings, one][-SIBLINGS_KEPT:]
        if len(self._finished) > GROUPS_KEPT:
            del self._finished[next(iter(self._finished))]
        self._facts.clear()

    def run(self, progress: Progress) -> None:
        """Record the tokens of a running trajectory."""
        group = self._running.setdefault(progress.group_id, {})
        group[progress.trajectory_id] = progress.generated_tokens

    def _end_running(self, group_id: str, trajectory_id: str) -> None:
        group = self._running.get(group_id, {})
        group.pop(trajectory_id, None)
        if not group:
            self._running.pop(group_id, None)

    def facts(self, row: Progress, locate: Locate, locate_s: Locate) -> GroupFacts:
        """Group facts as known now; the part from finished siblings is cached until one more finishes."""
        if locate != self._locate:
            self._facts.clear()
            self._locate = locate
        key = (row.group_id, row.policy_version)
        facts = self._facts.get(key)
        if facts is None:
            siblings = self._finished.get(row.group_id, ())
            facts = finished_facts(siblings, row.policy_version, locate, locate_s)
            self._facts[key] = facts
        running = self._running.get(row.group_id)
        if not running or (len(running) == 1 and row.trajectory_id in running):
            return facts
        lengths = [tokens for name, tokens in running.items() if name != row.trajectory_id]
        return _with_running(facts, lengths)
