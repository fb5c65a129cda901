"""The controller's record of a run, the names that keep runs apart, and the credits of a run.

Credits say how many trajectories of a run may start without becoming too old (AReaL; RollArt, section 6.2). Every
trajectory that starts takes a credit. It is given back when its group is dropped, and goes over to `accepted` when the
group reaches the sample buffer; an optimiser step brings a batch of new ones. So at most (alpha + 1) batches are under
way or wait to be trained on.

Groups get credits as a whole, in the order of their submission: members that waited for a credit of their own could
keep their group, and with it the batch, from ever ending.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from heddle_dask.core.ids import FIRST_RUN, EngineId, GroupId, PolicyVersion, RunId, TrajectoryId
from heddle_dask.core.run_description import RunDescription, StalenessBound


class CreditLedger:
    """The account of one run.

    Attributes
    ----------
    bound
        Alpha, the batch, and what happens to what is too old.
    version
        n and its lineage.
    accepted
        Trajectories that went into the buffer since the training began or was resumed.
    """

    def __init__(self, bound: StalenessBound) -> None:
        self.bound = bound
        self.version = PolicyVersion()
        self.accepted = 0
        self._began = False
        self._retired: dict[str, None] = {}  # lineages that another one has replaced
        self._first = 0  # n when the training began or was resumed
        self._waiting: dict[GroupId, dict[TrajectoryId, None]] = {}
        self._members: dict[GroupId, dict[TrajectoryId, bool]] = {}  # of groups with credits; True: has ended
        self._running = 0
        self._least: dict[GroupId, int] = {}
        self._closed: dict[GroupId, None] = {}  # reported, with members that go on

    @property
    def running(self) -> int:
        """Trajectories with a credit that are neither accepted nor dropped."""
        return self._running

    @property
    def credits(self) -> int:
        """How many more may start; below 0 where groups were larger than what was left."""
        return self.bound.credits(self.steps, self.accepted, self._running)

    @property
    def steps(self) -> int:
        """Optimiser steps since the training began or was resumed."""
        return self.version.number - self._first

    def age(self, first: PolicyVersion) -> int | None:
        """n - b; None for a version of another line of training, which is older than any."""
        if first.lineage not in ("", self.version.lineage):
            return None
        return self.version.number - first.number

    def is_valid(self, first: PolicyVersion) -> bool:
        """Whether a trajectory that began under this version may be in the next batch."""
        age = self.age(first)
        return age is not None and age <= self.bound.alpha

    def may_begin(self, group_id: GroupId, version: PolicyVersion) -> bool:
        """Whether a first token may be sampled with these weights.

        In ``"pace"`` nothing is cancelled later: the weights must be no older than alpha steps when the batch is
        trained in which the group has its place.
        """
        if not self.is_valid(version):
            return False
        return self.bound.mode == "cancel" or version.number >= self._least.get(group_id, 0)

    # -- what happens --------------------------------------------------------------------------------

    def step_ended(self, version: PolicyVersion) -> bool:
        """n is `version.number` now; False if it was that before, or more, or in a lineage that was replaced."""
        if version.lineage in self._retired or (self._began and not version.is_newer_than(self.version)):
            return False
        if not self._began or version.lineage != self.version.lineage:
            if self._began:
                self._retired[self.version.lineage] = None
            # What waits in the buffer stays there.
            self.accepted = max(0, self.accepted - self.steps * self.bound.batch_trajectories)
            self._first, self._began = version.number, True
            # Places are counted from n, which has jumped.
            jump = version.number - self.version.number
            self._least = {group_id: least + jump for group_id, least in self._least.items()}
        self.version = version
        return True

    def submitted(self, group_id: GroupId, name: TrajectoryId) -> None:
        """A trajectory waits for a credit; one of a group that has begun has it."""
        if group_id in self._members:
            self._members[group_id][name] = False
            self._running += 1
        else:
            self._waiting.setdefault(group_id, {})[name] = None

    def has_credit(self, group_id: GroupId, name: TrajectoryId) -> bool:
        return name in self._members.get(group_id, ())

    def grant(self) -> Iterator[TrajectoryId]:
        """Give credits to groups that wait, oldest first; yields their members.

        A group that is larger than all credits begins when nothing else runs.
        """
        for group_id, waiting in list(self._waiting.items()):
            if self.credits < len(waiting) and (self._running or self.credits < 1):
                return
            place = self.bound.next_place(self.accepted, self._running)
            self._least[group_id] = self._first + place - self.bound.alpha
            self._members[group_id] = dict.fromkeys(waiting, False)
            self._running += len(waiting)
            del self._waiting[group_id]
            yield from waiting

    def ended(self, group_id: GroupId, name: TrajectoryId, useless: bool) -> None:
        """A trajectory has ended.

        Parameters
        ----------
        useless
            Whether no sample will come of it: it never started, or was cancelled. Its credit is free at once; that of
            another one when its group is reported.
        """
        waiting = self._waiting.get(group_id)
        if waiting is not None and name in waiting:
            del waiting[name]
            if not waiting:
                del self._waiting[group_id]
        members = self._members.get(group_id)
        if members is None or name not in members:
            return
        members[name] = True
        if useless or group_id in self._closed:
            self._settle(group_id, [name])

    def group_ended(self, group_id: GroupId, accepted: int) -> None:
        """A group was reported: its ended members are in the buffer or dropped."""
        self.accepted += accepted
        members = self._members.get(group_id)
        if members is None:
            return
        self._closed[group_id] = None
        self._settle(group_id, [name for name, over in members.items() if over])

    def _settle(self, group_id: GroupId, names: list[TrajectoryId]) -> None:
        members = self._members[group_id]
        for name in names:
            del members[name]
        self._running -= len(names)
        if not members:
            del self._members[group_id]
            self._least.pop(group_id, None)
            self._closed.pop(group_id, None)

    def check_integrity(self) -> None:
        assert self._running == sum(len(members) for members in self._members.values())
        assert not self._members.keys() & self._waiting.keys()
        assert all(self._waiting.values()) and all(self._members.values())
        assert self._least.keys() == self._members.keys()
        assert self._closed.keys() <= self._members.keys()


_QUALIFIED = re.compile(r"(.*)@([0-9]+)", re.DOTALL)


def qualified(run_id: RunId, name: str) -> str:
    """A name of a run as the controller knows it: two runs may use the same ids.

    Names of the first run are left as they are, unless they look like those of another run.
    """
    if run_id == FIRST_RUN and _QUALIFIED.fullmatch(name) is None:
        return name
    return f"{name}@{run_id}"


def plain_name(name: str) -> tuple[RunId, str]:
    """The inverse of `qualified`: the run, and the name that it uses itself."""
    found = _QUALIFIED.fullmatch(name)
    if found is None:
        return FIRST_RUN, name
    return RunId(found[2]), found[1]


@dataclass(slots=True, eq=False)
class RunRecord:
    """One run.

    Attributes
    ----------
    unadmitted
        Its submitted trajectories that wait for admission, oldest first.
    alive, expected_tokens
        Its admitted trajectories that have not ended, and the sum of their `Trajectory.expected_tokens`.
    kv_tokens
        Context tokens of its trajectories on engines, and the tokens reserved for them.
    sampled_tokens, observed_tokens
        Tokens that its trajectories have generated, and that tools and templates have added between steps.
    observed_per_token
        Observation tokens per generated token, from its predictor; None when unknown.
    ledger
        Its credits, where it has a bound on staleness.
    without_credit
        Its submitted trajectories that wait for a credit, oldest first; they are not among `unadmitted`.
    cancelled
        Number of its cancelled trajectories by cause.
    """

    description: RunDescription
    unadmitted: dict[TrajectoryId, None] = field(default_factory=dict)
    freed: dict[EngineId, None] = field(default_factory=dict)
    alive: int = 0
    expected_tokens: int = 0
    reservations: int = 0
    kv_tokens: float = 0.0
    sampled_tokens: int = 0
    observed_tokens: int = 0
    observed_per_token: float | None = None
    held: int = 0
    ledger: CreditLedger | None = None
    without_credit: dict[TrajectoryId, None] = field(default_factory=dict)
    cancelled: dict[str, int] = field(default_factory=dict)
