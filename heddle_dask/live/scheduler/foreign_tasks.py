"""Tasks of other clients: kept off the workers that host engines.

Every step passes through the event loop of its engine's worker, and a task of another client that computes there would
take that loop's interpreter. Such a worker has thousands of threads (a step takes one, by Dask's count), so Dask would
think it the idlest of all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from distributed import Scheduler

from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.messages import ENGINE_RESOURCE, TOOL_RESOURCE


class ForeignTasks:
    """Restricts tasks without a restriction of their own to workers that host no engine, if there are any.

    Workers for nothing of ours come first, then tool workers. Where all workers host engines, the tasks run there, in
    the few threads that `_dask_internals.bound_threads` leaves.
    """

    def __init__(self) -> None:
        # One set, shared by all these tasks: a worker that joins or leaves changes it for all of them.
        self._allowed: set[str] = set()

    def submitted(self, scheduler: Scheduler, keys: Iterable[Any]) -> None:
        """Restrict tasks, before Dask's first transition of them."""
        if not self._allowed:
            return
        for key in keys:
            ts = scheduler.tasks.get(key)
            if ts is not None:
                dask.restrict_if_free(ts, self._allowed)

    def workers_changed(self, scheduler: Scheduler) -> None:
        tags = {address: set(state.resources) for address, state in scheduler.workers.items()}
        without_engine = {address for address, tag in tags.items() if ENGINE_RESOURCE not in tag}
        of_others = {address for address in without_engine if TOOL_RESOURCE not in tags[address]}
        self._allowed.clear()
        self._allowed.update(of_others or without_engine)
        waiting = dask.unrunnable_in(scheduler, self._allowed)
        if waiting:
            # Never from inside a transition: the next turn of the loop does it.
            scheduler.loop.add_callback(dask.release, scheduler, waiting, "heddle-foreign")
