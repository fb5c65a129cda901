"""The order in which the queues of a pass offer their actions."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from heddle_dask.core.ids import ActionId
from heddle_dask.core.view import ClusterView
from heddle_dask.strategies.actions.signature_queues import SignatureQueue, Turn


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
        run = view.run_of(turn.action)
        if of_run < turns[run]:  # its run has had a turn since
            push(number)
            continue
        starts = take(turn)
        queues[number].blocked = starts is False
        if starts:
            turns[run] += view.turn_cost(turn.action)
        if not queues[number].blocked:
            passed.add(turn.action.spec.action_id)
            push(number)
