"""Continuous batching in closed form: time is a value, and work is done only when the batch changes.

The batch is constant during a run of iterations: until a prompt is prefilled, a step ends, a request joins, or the KV
cache is full. `EngineCost` sums such a run in constant time, so the work of this module is per step, not per token.

The rules are vLLM's. Waiting requests are admitted in order of priority (smaller first), then of arrival, between
iterations, while there are slots and free KV. Prompts are prefilled in chunks beside the decoding sequences, which take
a token each of the iteration's `chunk_tokens`, or whole if the cost says so. The iteration that ends a prefill samples
the first token. When KV runs out, the least urgent request goes back to the queue and is prefilled again later.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from heddle_dask.cost.engine_cost import EngineCost

JobState = Literal["waiting", "prefilling", "decoding", "ended"]

# Tolerance for timers that fire early; iterations take far longer.
_EARLY_S = 1e-7


@dataclass(slots=True, eq=False)
class Job:
    """One step inside the engine.

    Attributes
    ----------
    prompt_tokens
        Length of the context at submission.
    length
        Tokens sampled when the job ends by itself.
    priority
        Smaller runs first.
    generated
        Tokens sampled until `since_iteration`; while decoding, one more per iteration since then.
    cached_tokens
        Prompt tokens found in the prefix cache when it was first admitted.
    """

    prompt_tokens: int
    length: int
    priority: float = 0
    order: int = 0
    submitted_s: float = 0.0
    admitted_s: float = math.nan
    first_token_s: float = math.nan
    ended_s: float = math.nan
    state: JobState = "waiting"
    aborted: bool = False
    generated: int = 0
    since_iteration: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    held: Any = None

    @property
    def context_tokens(self) -> int:
        """Prompt tokens and the tokens sampled until `since_iteration`."""
        return self.prompt_tokens + self.generated


J = TypeVar("J", bound=Job)
J_contra = TypeVar("J_contra", bound=Job, contravariant=True)


class KvRoom(Protocol[J_contra]):
    """The interface of a KV cache that the batch uses."""

    @property
    def free_tokens(self) -> int:
        """Tokens that can be allocated now."""

    def hit_tokens(self, job: J_contra) -> int:
        """Tokens of the job's context that `take` would find cached."""

    def take(self, job: J_contra, spare_tokens: int) -> Any | None:
        """KV for its context (`loose_tokens`, `cached_tokens`); None: less than `spare_tokens` would stay free."""

    def grow_all(self, tokens: int) -> None:
        """Count `tokens` more in total; each job adds its share to `loose_tokens` before it is released."""

    def give_back(self, job: J_contra, held: Any, computed_tokens: int) -> None:
        """Release the allocation of a job; the first `computed_tokens` of its context have KV."""


@dataclass(slots=True)
class ContinuousBatch(Generic[J]):
    """The engine's scheduler and its clock, in model seconds.

    `submit` and `abort` may be called at any time. `advance` moves the clock to now and returns the jobs that have
    ended; call it again at `next_s` (infinity: not before the next `submit`).
    """

    cost: EngineCost
    slots: int
    kv_cache: KvRoom[J]
    clock_s: float = 0.0
    next_s: float = math.inf
    admitted: list[J] = field(default_factory=list)
    preemptions: int = 0
    _waiting: list[tuple[float, int, J]] = field(default_factory=list)
    _prefilling: list[J] = field(default_factory=list)
    _decoding: dict[int, J] = field(default_factory=dict)
    # Heap of (iteration, order, job). Entries of jobs that have left or restarted are stale and skipped (`_is_due`).
    _ends: list[tuple[int, int, J]] = field(default_factory=list)
    _iteration: int = 0
    _context_tokens: int = 0
    _orders: int = 0
    # The end of a pause: no iteration begins before.
    _resumes_s: float = -math.inf

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def context_tokens(self) -> int:
        """Tokens of the jobs in the batch that have KV."""
        return self._context_tokens

    def sampled_tokens(self, job: J) -> int:
        """Tokens of the job sampled by `clock_s`."""
        return job.generated + (self._iteration - job.since_iteration if job.state == "decoding" else 0)

    def submit(self, job: J, now_s: float) -> list[J]:
        """Add a job; returns the jobs that have ended by now."""
        ended = self.advance(now_s)
        self._orders += 1
        job.order = self._orders
        job.submitted_s = now_s
        heapq.heappush(self._waiting, (job.priority, job.order, job))
        return ended + self.advance(now_s)

    def abort(self, job: J, now_s: float) -> list[J]:
        """End a job early with the tokens sampled by now; returns the jobs that have ended by now."""
        ended = self.advance(now_s)
        if job.state == "ended":
            return ended
        if job.state == "waiting":
            self._waiting = [entry for entry in self._waiting if entry[2] is not job]
            heapq.heapify(self._waiting)
        else:
            self._leave(job)
        job.state = "ended"
        job.aborted = True
        job.ended_s = now_s
        return [*ended, job, *self.advance(now_s)]

    def requeue_all(self, now_s: float) -> list[J]:
        """Put every running job back into the queue, as vLLM does to drop all KV; returns those that have ended by now.

        Nothing is admitted before the next `advance`, so that the cache can be emptied in between.
        """
        ended = self.advance(now_s)
        for job in [*self._decoding.values(), *self._prefilling]:
            self._requeue(job)
        return ended

    def reprice(self, cost: EngineCost, now_s: float) -> list[J]:
        """Change the cost, from the iteration in progress on; returns the jobs that have ended by now."""
        ended = self.advance(now_s)
        self.cost = cost
        return ended + self.advance(now_s)

    def pause(self, now_s: float, seconds: float, *, recompute: bool) -> list[J]:
        """Run no iteration for so long, from the end of the iteration in progress on; returns the jobs that have ended.

        Parameters
        ----------
        recompute
            All running jobs go back to the queue with their tokens, in their order, and are prefilled again: their KV
            belongs to other weights. The caller empties the cache of idle entries.
        """
        ended = self.advance(now_s)
        if recompute:
            for job in [*self._decoding.values(), *self._prefilling]:
                self._leave(job)
                job.state = "waiting"
                heapq.heappush(self._waiting, (job.priority, job.order, job))
        self._resumes_s = self.clock_s = max(self.clock_s, now_s) + seconds
        self.next_s = self.clock_s if self.running or self._waiting else math.inf
        return ended

    def advance(self, now_s: float) -> list[J]:
        """Run all iterations that end by now; returns the jobs that have ended, in order."""
        ended: list[J] = []
        if now_s < self._resumes_s - _EARLY_S:
            self.next_s = self._resumes_s if self.running or self._waiting else math.inf
            return ended
        while True:
            self._admit(now_s)
            if not self.running:
                self.clock_s = max(self.clock_s, now_s)
                self.next_s = math.inf
                return ended
            count, chunk = self._run_length()
            if count == 0:
                self._preempt()
                continue
            decoding, context = len(self._decoding), self._context_tokens
            end_s = self.clock_s + self.cost.span_s(count, decoding, context, chunk)
            if end_s > now_s + _EARLY_S:
                whole = self.cost.iterations_within(now_s - self.clock_s, decoding, context, chunk)
                # The batch cannot change during the iteration in progress.
                whole = min(whole, count - 1)
                self._run(whole, chunk, self.cost.span_s(whole, decoding, context, chunk))
                self.next_s = end_s
                return ended
            self._run(count, chunk, end_s - self.clock_s)
            ended += self._end_prefills(chunk) + self._end_decodes()

    # ------------------------------------------------------------------ inside

    def _admit(self, now_s: float) -> None:
        if not self.running and self._waiting:
            self.clock_s = max(self.clock_s, min(now_s, self._waiting[0][2].submitted_s))
        while self._waiting and self.running < self.slots:
            job = self._waiting[0][2]
            if job.submitted_s > self.clock_s + _EARLY_S and self.running:
                return  # the job arrived during the iteration in progress
            if self.cost.whole_prompts and self.running and not self._fits_whole(job):
                return
            # Keep one token free for every running job, or the new job would be preempted at once.
            held = self.kv_cache.take(job, self.running + 1 if self.running else 0)
            if held is None:
                return
            heapq.heappop(self._waiting)
            job.held = held
            job.prefill_tokens = job.context_tokens - held.cached_tokens
            job.state = "prefilling"
            self._context_tokens += held.cached_tokens
            self._prefilling.append(job)
            if math.isnan(job.admitted_s):
                job.admitted_s = max(self.clock_s, job.submitted_s)
                job.cached_tokens = held.cached_tokens
                self.admitted.append(job)
            self.clock_s += self.cost.per_prompt_s

    def _fits_whole(self, job: J) -> bool:
        """Whether the whole prompt fits the next iteration, beside one token of every decoding sequence."""
        taken = len(self._decoding) + sum(other.prefill_tokens for other in self._prefilling)
        return taken + job.context_tokens - self.kv_cache.hit_tokens(job) <= self.cost.chunk_tokens

    def _run_length(self) -> tuple[int, int]:
        """Iterations until the batch changes, and prompt tokens in each; 0 iterations: KV must be freed first."""
        count, chunk = 1 << 40, 0
        # Running sequences come first: each takes one token of the iteration's budget.
        most = self.cost.chunk_tokens - len(self._decoding)
        if self._prefilling and most > 0:
            count = max(1, (self._prefilling[0].prefill_tokens - 1) // most)
            chunk = min(most, sum(job.prefill_tokens for job in self._prefilling))
        while self._ends and not self._is_due(self._ends[0]):
            heapq.heappop(self._ends)
        if self._ends:
            count = min(count, self._ends[0][0] - self._iteration)
        if self._decoding:
            count = min(count, self.kv_cache.free_tokens // len(self._decoding))
        if count > 1 and self._waiting and self.running < self.slots:
            # A job arrived during the iteration in progress: try to admit it at the end of the iteration. If the queue
            # waits for KV, only the end of a job helps.
            job = self._waiting[0][2]
            if job.submitted_s > self.clock_s:
                count = 1
        return count, chunk

    def _is_due(self, entry: tuple[int, int, J]) -> bool:
        iteration, _, job = entry
        return job.state == "decoding" and iteration == self._end_iteration(job)

    def _end_iteration(self, job: J) -> int:
        return job.since_iteration + job.length - job.generated

    def _run(self, count: int, chunk: int, seconds: float) -> None:
        """Run `count` iterations, prefilling `chunk` prompt tokens in each."""
        if count == 0:
            return
        self.clock_s += seconds
        self._iteration += count
        self._context_tokens += count * (len(self._decoding) + chunk)
        self.kv_cache.grow_all(count * len(self._decoding))
        left = count * chunk
        for job in self._prefilling:
            taken = min(left, job.prefill_tokens)
            job.prefill_tokens -= taken
            left -= taken
            if not left:
                break

    def _end_prefills(self, chunk: int) -> list[J]:
        if not chunk:
            return []
        done = [job for job in self._prefilling if job.prefill_tokens == 0]
        if not done:
            return []
        self._prefilling = [job for job in self._prefilling if job.prefill_tokens]
        ended = []
        for job in done:
            job.generated += 1
            job.since_iteration = self._iteration
            if math.isnan(job.first_token_s):
                job.first_token_s = self.clock_s
            job.state = "decoding"
            self._decoding[job.order] = job
            if job.generated >= job.length:
                ended.append(self._finish(job))
            else:
                heapq.heappush(self._ends, (self._end_iteration(job), job.order, job))
        return ended

    def _end_decodes(self) -> list[J]:
        ended = []
        while self._ends and self._ends[0][0] <= self._iteration:
            entry = heapq.heappop(self._ends)
            if self._is_due(entry):
                ended.append(self._finish(entry[2]))
        return ended

    def _finish(self, job: J) -> J:
        self._leave(job)
        job.state = "ended"
        job.ended_s = self.clock_s
        return job

    def _leave(self, job: J) -> None:
        """Remove a running job from the batch: count its sampled tokens and release its KV."""
        assert job.held is not None
        if job.state == "decoding":
            del self._decoding[job.order]
            grown = self._iteration - job.since_iteration
            job.generated += grown
            job.held.loose_tokens += grown
            # The last sampled token has no KV yet.
            computed = job.context_tokens - 1
        else:
            self._prefilling.remove(job)
            computed = job.context_tokens - job.prefill_tokens
        self._context_tokens -= computed
        self.kv_cache.give_back(job, job.held, computed)
        job.held = None

    def _preempt(self) -> None:
        self._requeue(max([*self._decoding.values(), *self._prefilling], key=lambda job: (job.priority, job.order)))

    def _requeue(self, victim: J) -> None:
        self._leave(victim)
        victim.state = "waiting"
        victim.preemptions += 1
        self.preemptions += 1
        heapq.heappush(self._waiting, (victim.priority, victim.order, victim))
