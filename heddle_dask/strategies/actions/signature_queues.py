"""Waiting actions in queues by what they compete for, each in the order in which they are to start.

One queue per signature: the pool, the demanded resources, the service and, where the state of an action binds it, its
host. An action that has to wait holds back its own queue only. Entries of actions that no longer wait are dropped when
they are met, so that an event costs O(log n), not a walk over the queue.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from heddle_dask.core.entities import Action
from heddle_dask.core.ids import ActionId, HostId
from heddle_dask.core.resources import CPUS, api_of
from heddle_dask.core.transitions import ActionState
from heddle_dask.core.view import ClusterView
from heddle_dask.strategies.actions.free_resources import elastic_of

_COMPACTED_LENGTH = 64


class Signature(NamedTuple):
    """What the actions of one queue have in common.

    Attributes
    ----------
    host
        Empty where any host of the pool will do.
    run
        Empty while only one run is open.
    """

    pool: str
    names: tuple[str, ...]
    service: str
    elastic: bool
    host: str
    run: str = ""


class Turn(NamedTuple):
    """The place of an action in its queue; the largest is next.

    Attributes
    ----------
    overdue
        Whether it has waited so long that it goes before all that have not.
    rank
        Larger goes first; 0 where it is overdue.
    age
        Negative running number of the action: of equals the oldest goes first.
    entry
        Running number of the entry: an action that waits a second time may have two.
    """

    overdue: bool
    rank: float
    age: int
    entry: int
    action: Action


@dataclass(slots=True)
class _Line:
    """Turns in ascending order, and the position of the next one within a pass."""

    turns: list[Turn] = field(default_factory=list)
    position: int = 0
    compacted_at: int = _COMPACTED_LENGTH

    def add(self, turn: Turn) -> None:
        insort(self.turns, turn)
        if len(self.turns) > self.compacted_at:
            self.turns = [each for each in self.turns if each.action.state is ActionState.WAITING]
            self.compacted_at = 2 * len(self.turns) + _COMPACTED_LENGTH

    def begin(self) -> None:
        while self.turns and self.turns[-1].action.state is not ActionState.WAITING:
            self.turns.pop()
        self.position = len(self.turns)

    def peek(self, left: set[ActionId]) -> Turn | None:
        while self.position:
            turn = self.turns[self.position - 1]
            if turn.action.state is ActionState.WAITING and turn.action.spec.action_id not in left:
                return turn
            self.position -= 1
        return None


@dataclass(slots=True)
class SignatureQueue:
    """The waiting actions of one signature.

    A pass calls `begin`, and then `peek` after each action that it has put into `left`.

    Attributes
    ----------
    blocked_by
        The action that did not fit at the last pass: nothing behind it can start until resources become free, or until
        it waits no more. None: all fitted.
    elastic
        Whether an action of which units are chosen was among them: elastic GPUs or calls.
    """

    signature: Signature
    blocked_by: Action | None = None
    elastic: bool = False
    _by_rank: _Line = field(default_factory=_Line)
    _by_age: _Line | None = None  # None while all ranks are equal
    _entries: int = 0

    def add(self, action: Action, rank: float) -> None:
        """Add an action; the largest rank goes first, and of equals the one with the smallest number."""
        if rank and self._by_age is None:
            self._by_age = _Line([turn._replace(rank=0.0) for turn in self._by_rank.turns])
        self._entries += 1
        self.elastic = self.elastic or elastic_of(action.spec.demand) not in (None, CPUS)
        self._by_rank.add(Turn(False, rank, -action.number, self._entries, action))
        if self._by_age is not None:
            self._by_age.add(Turn(False, 0.0, -action.number, self._entries, action))

    @property
    def shared(self) -> bool:
        """Whether it needs what belongs to no single host: an API, or a model service."""
        return bool(self.signature.service) or any(api_of(name) is not None for name in self.signature.names)

    def begin(self) -> None:
        self._by_rank.begin()
        if self._by_age is not None:
            self._by_age.begin()

    def peek(self, left: set[ActionId], at: float, max_wait_s: float) -> Turn | None:
        """The next action that waits and is not in `left`; None: no more.

        An action that was requested `max_wait_s` seconds ago is overdue: such actions go first, the oldest first.
        """
        oldest = (self._by_age or self._by_rank).peek(left)
        if oldest is not None and at - oldest.action.requested_at >= max_wait_s:
            return oldest._replace(overdue=True, rank=0.0)
        return oldest if self._by_age is None else self._by_rank.peek(left)

    def first(self, count: int, left: set[ActionId]) -> list[Turn]:
        """Up to `count` of the next actions of this pass, without those in `left`."""
        found: list[Turn] = []
        for position in range(self._by_rank.position - 1, -1, -1):
            if len(found) == count:
                break
            turn = self._by_rank.turns[position]
            if turn.action.state is ActionState.WAITING and turn.action.spec.action_id not in left:
                found.append(turn)
        return found

    @property
    def empty(self) -> bool:
        """Whether no action waits, as of the begin of the latest pass."""
        return not self._by_rank.turns

    def actions(self) -> Iterator[Action]:
        """All that wait here, the last first."""
        return (turn.action for turn in self._by_rank.turns if turn.action.state is ActionState.WAITING)


class SignatureQueues:
    """The queues of all signatures.

    Parameters
    ----------
    rank
        The rank of an action when it begins to wait; None: first come, first served.
    takes
        Whether the actions of a pool are queued here; None: of every pool.
    """

    def __init__(
        self,
        rank: Callable[[ClusterView, Action], float] | None = None,
        takes: Callable[[str], bool] | None = None,
    ) -> None:
        self._rank = rank
        self._takes = takes
        self._queues: dict[Signature, SignatureQueue] = {}
        self._by_place: dict[tuple[str, str], dict[Signature, SignatureQueue]] = {}
        self._taken: dict[ActionId, None] = {}
        self._open: dict[Signature, SignatureQueue] = {}
        self._blocked: dict[Signature, SignatureQueue] = {}
        self._shared: dict[Signature, SignatureQueue] = {}
        self._host_changes = 0

    def active(self, view: ClusterView) -> list[SignatureQueue]:
        """The queues in which something may start now; O(1) where nothing has arrived or become free.

        These have new actions, or wait for a freed host, or for what belongs to no host. It may be called several times
        before an allocation.
        """
        for action in view.new_actions:
            if action.spec.action_id not in self._taken:
                self._taken[action.spec.action_id] = None
                if self._takes is None or self._takes(action.spec.pool):
                    self._add(view, action)
        for queue in list(self._blocked.values()):
            if queue.blocked_by is None or not view.is_waiting(queue.blocked_by):
                self._open_again(queue)
        for host_id in view.freed_hosts:
            host = view.host(host_id)
            if host is not None and not host.draining:
                self.unblock(host.spec.pool, host_id)
        if self._shared:
            return [
                *self._open.values(),
                *(q for q in self._shared.values() if q.signature not in self._open),
            ]
        return list(self._open.values())

    def unblock(self, pool: str, host_id: HostId) -> None:
        """Something became free on this host."""
        for queue in self.of_host(pool, host_id):
            self._open_again(queue)

    def _open_again(self, queue: SignatureQueue) -> None:
        queue.blocked_by = None
        self._blocked.pop(queue.signature, None)
        self._open[queue.signature] = queue

    def allocated(self, queues: Iterable[SignatureQueue]) -> None:
        """The allocation from these queues is over: what is left in them waits until something becomes free."""
        self._taken.clear()
        self._open.clear()
        for queue in queues:
            queue.begin()
            if queue.blocked_by is not None:
                self._blocked[queue.signature] = queue
            if queue.empty:
                self._shared.pop(queue.signature, None)

    def _add(self, view: ClusterView, action: Action) -> None:
        spec = action.spec
        elastic, host = elastic_of(spec.demand) is not None, view.host_fixed(action) or ""
        signature = Signature(spec.pool, spec.demand.names, spec.service, elastic, host, view.run_of(action))
        queue = self._queues.get(signature)
        if queue is None:
            queue = self._queues[signature] = SignatureQueue(signature)
            self._by_place.setdefault((signature.pool, signature.host), {})[signature] = queue
        queue.add(action, 0.0 if self._rank is None else self._rank(view, action))
        if queue.blocked_by is None:
            self._open[signature] = queue
        if queue.shared:
            self._shared[signature] = queue

    def of_host(self, pool: str, host_id: HostId) -> list[SignatureQueue]:
        """The queues whose actions this host of the pool can run."""
        places = ((pool, ""), (pool, host_id))
        return [queue for place in places for queue in self._by_place.get(place, {}).values()]

    def hosts_changed(self, view: ClusterView) -> None:
        """After hosts have joined or left: every queue is looked at again, and what is bound is bound anew.

        An action that only a lost host could run holds back nothing from then on.
        """
        if view.host_changes == self._host_changes:
            return
        self._host_changes = view.host_changes
        for queue in self._queues.values():
            self._open_again(queue)
        gone = [place for place in self._by_place if place[1] and view.host(HostId(place[1])) is None]
        for place in gone:
            for signature, queue in self._by_place.pop(place).items():
                for known in (self._queues, self._open, self._blocked, self._shared):
                    known.pop(signature, None)
                for action in queue.actions():
                    self._add(view, action)


def offer_in_turn(
    view: ClusterView,
    queues: Sequence[SignatureQueue],
    max_wait_s: float,
    take: Callable[[Turn], bool | None],
) -> None:
    """Offer the next actions of all queues: runs in turns, of a run overdue actions first, then by rank and age.

    Parameters
    ----------
    take
        Whether the action starts. One that does not holds back what is behind it in its own queue, and no other queue.
        None: it cannot start on any host that is there, and holds back nothing.
    """
    passed: set[ActionId] = set()
    heads: list[tuple[float, bool, float, int, int, Turn]] = []
    turns: dict[str, float] = {}

    def push(number: int) -> None:
        turn = queues[number].peek(passed, view.at, max_wait_s)
        if turn is not None:
            run = view.run_of(turn.action)
            of_run = turns.setdefault(run, view.turn_of(run))
            heapq.heappush(heads, (of_run, not turn.overdue, -turn.rank, -turn.age, number, turn))

    for number, queue in enumerate(queues):
        queue.begin()
        push(number)
    while heads:
        of_run, *_, number, turn = heapq.heappop(heads)
        # One whose host drains waits in another queue too, or for a place for its sandbox.
        if turn.action.spec.action_id in passed or not view.is_waiting(turn.action):
            passed.add(turn.action.spec.action_id)
            push(number)
            continue
        run = view.run_of(turn.action)
        if of_run < turns[run]:  # its run has had a turn since
            push(number)
            continue
        starts = take(turn)
        queues[number].blocked_by = turn.action if starts is False else None
        if starts:
            turns[run] += view.turn_cost(turn.action)
        if queues[number].blocked_by is None:
            passed.add(turn.action.spec.action_id)
            push(number)
