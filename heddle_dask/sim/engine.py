"""A simulated engine: continuous batching in virtual time (`cost.batching`) over a counted prefix cache."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping

from heddle_dask.core.nouns import EngineDescription
from heddle_dask.cost.batching import ContinuousBatch
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.sim.fleet import ControlDelays
from heddle_dask.sim.kv_cache import CountedKvCache, SimulatedJob
from heddle_dask.sim.loop import VirtualTime

_NO_DELAYS = ControlDelays()


class SimulatedEngine:
    """Runs jobs in virtual time; reports when each is admitted to the batch and when it ends.

    Parameters
    ----------
    cost
        True cost; strategies may plan with another one.
    on_admitted, on_ended
        Called at the virtual time of the admission or the end.
    delays
        With ``slot_s`` above 0, steps beyond ``slots + steps_ahead`` wait at the worker, by priority.

    Attributes
    ----------
    busy_s
        Seconds with at least one job in the batch.
    prefilled_tokens, cached_tokens
        Prompt tokens computed, and prompt tokens found in the cache, over all admissions from the queue.
    """

    def __init__(
        self,
        description: EngineDescription,
        cost: EngineCost,
        time: VirtualTime,
        on_admitted: Callable[[SimulatedEngine, SimulatedJob], None],
        on_ended: Callable[[SimulatedEngine, SimulatedJob], None],
        delays: ControlDelays = _NO_DELAYS,
        on_busy: Callable[[], None] = lambda: None,
    ) -> None:
        self.description = description
        capacity = description.kv_capacity_tokens or cost.capacity_tokens
        self.kv_cache = CountedKvCache(capacity, cost.block_tokens)
        self.busy_s = 0.0
        self.prefilled_tokens = 0
        self.cached_tokens = 0
        self.lost = False
        self._batch: ContinuousBatch[SimulatedJob] = ContinuousBatch(cost, description.slots, self.kv_cache)
        self._time = time
        self._on_admitted = on_admitted
        self._on_ended = on_ended
        self._on_busy = on_busy
        self._armed_s = math.inf
        self._busy_since_s = math.inf
        self._slot_s = delays.slot_s
        self._slots = description.slots + delays.steps_ahead
        self._slots_held = 0
        self._line: list[tuple[float, int, SimulatedJob]] = []
        self._arrivals = 0

    @property
    def running(self) -> int:
        return self._batch.running

    @property
    def busy(self) -> bool:
        return not math.isinf(self._busy_since_s)

    @property
    def kv_preemptions(self) -> int:
        """Number of jobs that went back to the queue because KV ran out."""
        return self._batch.preemptions

    def submit(self, job: SimulatedJob) -> None:
        """Add a job; a lost engine accepts it and never ends it."""
        if self.lost:
            return
        if self._waits_at_worker(job):
            self._arrivals += 1
            heapq.heappush(self._line, (job.priority, self._arrivals, job))
            self._fill_slots()
        else:
            self._settle(self._batch.submit(job, self._time.now_s))

    def abort(self, job: SimulatedJob) -> None:
        """End a job early with the tokens that it has; none if it still waits at the worker."""
        if self.lost:
            return
        left = [entry for entry in self._line if entry[2] is not job]
        if len(left) == len(self._line):
            self._settle(self._batch.abort(job, self._time.now_s))
        else:
            self._line = left
            heapq.heapify(left)
            job.aborted = True
            self._on_ended(self, job)

    def reprice(self, cost: EngineCost) -> None:
        """Use another cost from now on."""
        if not self.lost:
            self._settle(self._batch.reprice(cost, self._time.now_s))

    def install(self, seconds: float, *, keep_kv: bool) -> None:
        """Pause for so long for other weights; without `keep_kv`, all KV is recomputed under them."""
        if self.lost:
            return
        ended = self._batch.pause(self._time.now_s, seconds, recompute=not keep_kv)
        if not keep_kv:
            self.kv_cache.forget_idle()
        self._settle(ended)

    def unpin(self, job: SimulatedJob, *, keep: bool = True) -> None:
        """Release the KV that an export has pinned; without `keep` it is not found again."""
        if self.lost:
            return
        self._settle(self._batch.advance(self._time.now_s))
        self.kv_cache.unpin(job, job.prompt_tokens if keep else 0)
        # Waiting steps may fit now.
        self._settle(self._batch.advance(self._time.now_s))

    def insert(self, job: SimulatedJob) -> bool:
        """Put transferred KV of the job's context into the cache; False if there is no room beside the running jobs."""
        self._settle(self._batch.advance(self._time.now_s))
        return self.kv_cache.insert(job, self._batch.running)

    def sampled_tokens(self, job: SimulatedJob) -> int:
        """Tokens of a job sampled by the latest change of the batch."""
        return self._batch.sampled_tokens(job)

    def lose(self) -> None:
        """Lose the engine: none of its jobs ever ends."""
        self.close()
        self.lost = True

    def close(self) -> None:
        """Add the busy time up to now to `busy_s`: the run has ended, or the engine has."""
        if not self.lost and self.busy:
            self.busy_s += self._time.now_s - self._busy_since_s
            self._busy_since_s = math.inf
            self._on_busy()

    def _tick(self, armed_s: float) -> None:
        if armed_s == self._armed_s and not self.lost:
            self._armed_s = math.inf
            self._settle(self._batch.advance(self._time.now_s))

    def _settle(self, ended: list[SimulatedJob]) -> None:
        admitted, self._batch.admitted = self._batch.admitted, []
        for job in admitted:
            self.cached_tokens += job.cached_tokens
            self.prefilled_tokens += job.prompt_tokens - job.cached_tokens
            self._on_admitted(self, job)
        for job in ended:
            if self._waits_at_worker(job):
                self._time.after(self._slot_s, self._free_slot)
            self._on_ended(self, job)
        self._note_busy()
        next_s = self._batch.next_s
        if next_s < math.inf and next_s != self._armed_s:
            self._armed_s = next_s
            self._time.at(next_s, self._tick, next_s)

    def _waits_at_worker(self, job: SimulatedJob) -> bool:
        return self._slot_s > 0 and job.is_step and not job.bypass_queue

    def _fill_slots(self) -> None:
        while self._line and self._slots_held < self._slots:
            self._slots_held += 1
            self._settle(self._batch.submit(heapq.heappop(self._line)[2], self._time.now_s))

    def _free_slot(self) -> None:
        self._slots_held -= 1
        if not self.lost:
            self._fill_slots()

    def _note_busy(self) -> None:
        idle = self._batch.running == 0
        if idle and self.busy:
            self.busy_s += self._time.now_s - self._busy_since_s
            self._busy_since_s = math.inf
            self._on_busy()
        elif not idle and not self.busy:
            self._busy_since_s = self._time.now_s
            self._on_busy()


class SharedCores:
    """Updates the cost of all its engines when one of them becomes busy or idle.

    Parameters
    ----------
    costs
        Cost of each engine by number of busy engines, from measurements with that many at once. A number in between
        has the cost of the next smaller one, a number below the least the cost of the least. Empty: the engines do
        not compete, and each keeps its own cost.
    """

    def __init__(self, costs: Mapping[int, EngineCost], time: VirtualTime) -> None:
        self.engines: list[SimulatedEngine] = []
        self._costs = dict(sorted(costs.items()))
        self._time = time
        self._due = False
        self._current: EngineCost | None = None

    def cost_of(self, busy: int) -> EngineCost:
        fitting = [count for count in self._costs if count <= busy]
        return self._costs[fitting[-1] if fitting else next(iter(self._costs))]

    def changed(self) -> None:
        """An engine became busy or idle: update all costs once, after the other calls of this moment."""
        if self._costs and not self._due:
            self._due = True
            self._time.after(0.0, self._reprice)

    def _reprice(self) -> None:
        self._due = False
        cost = self.cost_of(sum(engine.busy for engine in self.engines))
        if cost != self._current:
            self._current = cost
            for engine in self.engines:
                engine.reprice(cost)
