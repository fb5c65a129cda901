"""Which groups go on from a recorded prefix: prefix sampling (arXiv 2605.05112). Pure: groups in, prefixes out.

A group teaches most where half of its attempts pass. A task that is passed too seldom is asked again behind the
beginning of an attempt that passed (a head start), one that is passed too often behind the beginning of one that failed
(a handicap). All attempts of a group have the same prefix, so advantages stay relative to the group. Replayed tokens
are not trained: the version that sampled them does not count for staleness.

Of the paper: both directions, one half as the target, masked replay, a prefix that is adapted. Ours: a cut lies between
two steps; a task's pass rate is the mean of its Beta posterior over recent attempts, and never falls as a head start
grows; the next cut halves what lies between a rate below one half and one above; and a skewed task is asked again at
once, since most sources of tasks give each task once. Nothing is drawn: equal groups give equal prefixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from heddle_dask.core.errors import BadInput, check_count, is_finite
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.records.trajectory_prefix import TrajectoryPrefix, begins_by_itself, prefix_facts

HALF: Final = 0.5


@dataclass(frozen=True, slots=True)
class PrefixRule:
    """When a group goes on from a prefix.

    Attributes
    ----------
    margin
        A task is skewed where its pass rate is further than this from one half.
    max_age
        Versions of the weights since the attempts that count: of pass rates, and of prefixes.
    again
        How often in a row a skewed task is asked again at once; it ends with the first group that is not skewed.
    passes_from
        Least reward of an attempt that passes.

    Raises
    ------
    BadInput
    """

    margin: float = 0.15
    max_age: int = 32
    again: int = 2
    passes_from: float = 0.5

    def __post_init__(self) -> None:
        if not (is_finite(self.margin) and 0 <= self.margin < HALF):
            raise BadInput(f"prefix sampling: margin is {self.margin!r}: use a number from 0 to below 0.5")
        check_count("prefix sampling: max_age", self.max_age)
        check_count("prefix sampling: again", self.again, 0)
        if not is_finite(self.passes_from):
            raise BadInput(f"prefix sampling: passes_from is {self.passes_from!r}: use a number")

    def is_skewed(self, rate: float) -> bool:
        return abs(rate - HALF) > self.margin


@dataclass(frozen=True, slots=True)
class _Attempts:
    """How often the attempts of one group passed, behind so many steps of a source; none: from the beginning."""

    source: str
    steps: int
    passed: int
    failed: int
    version: int


@dataclass(slots=True)
class _Task:
    """What is known of one task.

    Attributes
    ----------
    sources
        By whether they passed: all but the last step of an attempt, and the version of its first token.
    """

    seen: list[_Attempts] = field(default_factory=list)
    sources: dict[bool, tuple[TrajectoryPrefix, int]] = field(default_factory=dict)
    asked_again: int = 0

    def forget_before(self, version: int) -> None:
        self.seen = [each for each in self.seen if each.version >= version]
        self.sources = {passed: source for passed, source in self.sources.items() if source[1] >= version}


class PrefixSampler:
    """The tasks of one stream of groups, by the identity of their prompts (`splits.prompt_key`)."""

    def __init__(self, rule: PrefixRule) -> None:
        self._rule = rule
        self._tasks: dict[str, _Task] = {}
        self._newest = 0
        self._refused: set[str] = set()

    def refuse(self, environment: str) -> bool:
        """The environment cannot be replayed: its groups begin from scratch. Whether that is new."""
        is_new = environment not in self._refused
        self._refused.add(environment)
        return is_new

    def observe(self, records: Sequence[TrajectoryRecord], *, late: bool = False) -> bool:
        """Learn from the members of a finished group; those without a reward say nothing.

        Parameters
        ----------
        late
            They are late members: what was delivered before has decided whether the task is asked again.

        Returns
        -------
        bool
            Whether the task is to be asked again now: it is skewed, and there is a prefix that was not tried.
        """
        known = [record for record in records if record.reward is not None]
        if not known or known[0].environment in self._refused:
            return False
        key, version = known[0].prompt_key, max(map(_newest_version, known))
        if version > self._newest:
            self._newest = version
            self._forget()
        if version < self._newest - self._rule.max_age:
            return False
        task = self._tasks.setdefault(key, _Task())
        facts = prefix_facts(known[0]) or {"source": "", "steps": 0}
        passed = sum(self._passes(record) for record in known)
        seen = _Attempts(str(facts["source"]), int(facts["steps"]), passed, len(known) - passed, version)
        task.seen.append(seen)
        for record in filter(_may_be_source, known):
            if self._passes(record) not in task.sources:
                whole = TrajectoryPrefix.of(record, len(record.steps) - 1)
                task.sources[self._passes(record)] = whole, _first_version(record)
        if late:
            return False
        is_skewed = self._rule.is_skewed(_posterior_mean(seen.passed, seen.failed))
        after = self.prefix_for("", key) if is_skewed and task.asked_again < self._rule.again else None
        tried = {(each.source, each.steps) for each in task.seen}
        again = after is not None and (after.source, after.steps) not in tried
        task.asked_again = task.asked_again + 1 if again else 0
        return again

    def prefix_for(self, environment: str, key: str) -> TrajectoryPrefix | None:
        """The prefix of the next group of a task; None: it begins from scratch."""
        task = self._tasks.get(key)
        if task is None or environment in self._refused:
            return None
        scratch = [each for each in task.seen if not each.source]
        if not scratch:
            return None
        rate = _posterior_mean(sum(each.passed for each in scratch), sum(each.failed for each in scratch))
        helps = rate < HALF
        if not self._rule.is_skewed(rate) or helps not in task.sources:
            return None
        source, _ = task.sources[helps]
        steps = self._cut(task.seen, source, helps)
        return source.first(steps) if steps else None

    def _cut(self, seen: Iterable[_Attempts], source: TrajectoryPrefix, helps: bool) -> int:
        """After how many steps of the source the next group begins; 0: from scratch."""
        passed: Counter[int] = Counter()
        failed: Counter[int] = Counter()
        for each in seen:
            if each.source in ("", source.source):
                passed[each.steps] += each.passed if helps else each.failed
                failed[each.steps] += each.failed if helps else each.passed
        cuts = sorted(passed)
        rates = dict(zip(cuts, _monotone(cuts, passed, failed), strict=True))
        fitting = [cut for cut in cuts if cut and not self._rule.is_skewed(rates[cut])]
        if fitting:
            return min(fitting, key=lambda cut: abs(rates[cut] - HALF))
        below = max((cut for cut in cuts if rates[cut] < HALF), default=0)
        above = min((cut for cut in cuts if cut > below), default=source.steps + 1)
        if above - below > 1:
            return (below + above) // 2
        # No cut is left between them. Behind all steps the attempt has ended, and nothing of it would be this group's.
        return min((cut for cut in (below, above) if cut in rates), key=lambda cut: abs(rates[cut] - HALF))

    def _forget(self) -> None:
        for key, task in list(self._tasks.items()):
            task.forget_before(self._newest - self._rule.max_age)
            if not task.seen:
                del self._tasks[key]

    def _passes(self, record: TrajectoryRecord) -> bool:
        assert record.reward is not None
        return record.reward >= self._rule.passes_from


def _may_be_source(record: TrajectoryRecord) -> bool:
    """Whether an attempt has a prefix that can be replayed, and came to its own end."""
    return (
        record.status == "completed"
        and len(record.steps) > 1
        and record.steps[0].generated_tokens > 0
        and begins_by_itself(record)
    )


def _newest_version(record: TrajectoryRecord) -> int:
    return max((int(branch.policy_version.max()) for branch in record.branches if len(branch)), default=0)


def _first_version(record: TrajectoryRecord) -> int:
    return int(record.branches[0].policy_version[record.steps[0].token_start])


def _posterior_mean(passed: int, failed: int) -> float:
    """Of the pass rate, where every rate was equally likely before."""
    return (passed + 1) / (passed + failed + 2)


def _monotone(cuts: Sequence[int], passed: Mapping[int, int], failed: Mapping[int, int]) -> list[float]:
    """The posterior means at these cuts, made non-decreasing: neighbours that contradict are taken together."""
    pools: list[tuple[int, int, int]] = []  # cuts, passed, failed
    for cut in cuts:
        pools.append((1, passed[cut], failed[cut]))
        while len(pools) > 1 and _posterior_mean(*pools[-2][1:]) > _posterior_mean(*pools[-1][1:]):
            last, before = pools.pop(), pools.pop()
            pools.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
    return [_posterior_mean(*pool[1:]) for pool in pools for _ in range(pool[0])]
