"""The KV cache of a simulated engine: a prefix cache that counts tokens without storing them.

A context is the prompt that its group shares, followed by the trajectory's own tokens. Unused entries are evicted
least recently used first, the tail of a context before its head and before the shared prompt, as vLLM frees blocks.
Only whole blocks are shared, kept and found. The counts equal those of the emulated engine's cache, which stores the
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from heddle_dask.core.ids import StepId
from heddle_dask.cost.batching import Job
from heddle_dask.cost.iteration import BLOCK_TOKENS, whole_blocks


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedJob(Job):
    """A step in a simulated engine, or a cache warm-up (without a `step_id`).

    Attributes
    ----------
    shared_tokens
        Length of the prompt that the trajectory shares with its group.
    bypass_queue
        The step does not wait at the worker for a slot (`core.commands.StartStep`).
    pins_kv
        Its KV stays in use after its end, until `CountedKvCache.unpin`: it is an export.
    pinned
        What it keeps in use since then.
    """

    trajectory_id: str
    group_id: str
    shared_tokens: int
    step_id: StepId | None = None
    bypass_queue: bool = False
    pins_kv: bool = False
    pinned: CountedAllocation | None = None

    @property
    def is_step(self) -> bool:
        """True for a step, False for a cache warm-up."""
        return self.step_id is not None


@dataclass(slots=True, eq=False)
class CountedAllocation:
    """KV of one running job: `loose_tokens` of its own, and a reference to its group's prompt."""

    shared_tokens: int
    loose_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class _Prompt:
    """A group's prompt, as long as the longest of its members' prompts seen here; `computed_tokens` of it have KV."""

    tokens: int = 0
    users: int = 0
    computed_tokens: int = 0


@dataclass(slots=True)
class CountedKvCache:
    """Prefix cache of `capacity_tokens`; a `cost.batching.KvRoom` for simulated jobs."""

    capacity_tokens: int
    block_tokens: int = BLOCK_TOKENS
    _used_tokens: int = 0
    _idle_tokens: int = 0
    _prompts: dict[str, _Prompt] = field(default_factory=dict)
    # Insertion order is order of last use. Keys: (trajectory, False) for its own part, (group, True) for a prompt.
    _idle: dict[tuple[str, bool], int] = field(default_factory=dict)

    @property
    def free_tokens(self) -> int:
        """Tokens that can be allocated now, including idle ones that would be evicted."""
        return self.capacity_tokens - self._used_tokens

    def hit_tokens(self, job: SimulatedJob) -> int:
        """Tokens of the job's context that are cached: whole blocks, and never the last token."""
        context = job.context_tokens
        shared = self._whole(min(job.shared_tokens, context))
        prompt = self._prompts.get(job.group_id)
        there = min(shared, prompt.tokens if prompt is not None else 0)
        if there == shared:
            there += min(self._idle.get((job.trajectory_id, False), 0), context - shared)
        return self._whole(min(there, context - 1))

    def take(self, job: SimulatedJob, spare_tokens: int) -> CountedAllocation | None:
        """Allocate KV for the job's context; None if less than `spare_tokens` would remain free."""
        context = job.context_tokens
        shared = self._whole(min(job.shared_tokens, context))
        prompt = self._prompts.get(job.group_id)
        in_use = prompt.tokens if prompt is not None and prompt.users else 0
        longest = max(prompt.tokens if prompt is not None else 0, shared)
        more = context - shared + longest - in_use
        if self.free_tokens - more < spare_tokens:
            return None
        cached = self.hit_tokens(job)
        if prompt is None:
            prompt = self._prompts[job.group_id] = _Prompt()
        self._drop_idle((job.trajectory_id, False))
        self._drop_idle((job.group_id, True))
        prompt.tokens = longest
        prompt.users += 1
        self._used_tokens += more
        self._evict()
        return CountedAllocation(shared, context - shared, cached)

    def grow_all(self, tokens: int) -> None:
        """Count `tokens` more in total; each job adds its share to `loose_tokens` before it is released."""
        self._used_tokens += tokens
        self._evict()

    def give_back(self, job: SimulatedJob, held: CountedAllocation, computed_tokens: int) -> None:
        """Release the allocation of a job; its tokens with KV stay cached until they are evicted.

        An export that has ended keeps it.
        """
        if job.pins_kv and job.generated >= job.length:
            job.pinned = held
            prompt = self._prompts[job.group_id]
            prompt.computed_tokens = max(prompt.computed_tokens, held.shared_tokens)
            return
        self._release(job, held, computed_tokens)

    def unpin(self, job: SimulatedJob, computed_tokens: int) -> None:
        """Release what an export has kept in use."""
        held, job.pinned = job.pinned, None
        assert held is not None, "only an export that has ended is unpinned, once"
        self._release(job, held, computed_tokens)

    def _release(self, job: SimulatedJob, held: CountedAllocation, computed_tokens: int) -> None:
        self._used_tokens -= held.loose_tokens
        computed_tokens = self._whole(computed_tokens)
        self._leave_idle((job.trajectory_id, False), computed_tokens - held.shared_tokens)
        prompt = self._prompts[job.group_id]
        prompt.users -= 1
        prompt.computed_tokens = max(prompt.computed_tokens, min(held.shared_tokens, computed_tokens))
        if prompt.users == 0:
            self._used_tokens -= prompt.tokens
            # An interrupted prefill drops the reserved tokens that no job has computed, as the emulated engine does.
            prompt.tokens = prompt.computed_tokens
            self._leave_prompt(job.group_id, prompt.tokens)
        self._evict()

    def insert(self, job: SimulatedJob, spare_tokens: int) -> bool:
        """Put transferred KV of the job's context into the cache; False if less than `spare_tokens` would stay free."""
        held = self.take(job, spare_tokens)
        if held is None:
            return False
        self.give_back(job, held, job.context_tokens)
        return True

    def forget_idle(self) -> None:
        """Drop what no running job holds: after an update of the weights it is of no use."""
        for name, is_prompt in list(self._idle):
            if is_prompt:
                del self._prompts[name]
        self._idle.clear()
        self._idle_tokens = 0

    def _leave_prompt(self, group_id: str, tokens: int) -> None:
        if tokens > 0:
            self._leave_idle((group_id, True), tokens)
        else:
            del self._prompts[group_id]

    def _leave_idle(self, key: tuple[str, bool], tokens: int) -> None:
        if tokens > 0:
            self._drop_idle(key)
            self._idle[key] = tokens
            self._idle_tokens += tokens

    def _drop_idle(self, key: tuple[str, bool]) -> None:
        self._idle_tokens -= self._idle.pop(key, 0)

    def _evict(self) -> None:
        excess = self._used_tokens + self._idle_tokens - self.capacity_tokens
        while excess > 0 and self._idle:
            key = next(iter(self._idle))
            tokens = self._idle[key]
            gone = min(tokens, self._whole(excess + self.block_tokens - 1))
            self._idle_tokens -= gone
            excess -= gone
            if gone < tokens:
                self._idle[key] = tokens - gone
            else:
                del self._idle[key]
            if key[1]:
                self._shrink_prompt(key[0], tokens - gone)

    def _shrink_prompt(self, group_id: str, tokens: int) -> None:
        if tokens:
            prompt = self._prompts[group_id]
            prompt.tokens = prompt.computed_tokens = tokens
        else:
            del self._prompts[group_id]

    def _whole(self, tokens: int) -> int:
        """Tokens of `tokens` that fill whole blocks."""
        return whole_blocks(tokens, self.block_tokens)
