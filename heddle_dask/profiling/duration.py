"""How long the measurements of a plan take by a cost, and the plan that ends within a limit. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from heddle_dask.cost.iteration import EngineCost
from heddle_dask.cost.measured import DecodePoint, TokensPoint
from heddle_dask.profiling.plan import ProfilePlan
from heddle_dask.profiling.sweep import (
    DECODING_TOKENS,
    MIXED_MEASURED,
    bursts_that_fit,
    decode_fits,
    mixed_that_fit,
)

# A request of a client: HTTP, and the engine's scheduler.
_REQUEST_S = 0.005
# Repeats of a cached step, for each of the others.
_CACHED_REPEATS = 4


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """What the duration of measurements depends on, besides the plan; a `capacity_tokens` of 0 is not known."""

    cost: EngineCost
    slots: int
    max_context_tokens: int
    capacity_tokens: int
    chunked_prefill: bool = True

    def duration_s(self, plan: ProfilePlan) -> float:
        """Seconds that all measurements of the plan take, without the engine's start and moves of KV."""
        seconds = self._prefill_s(plan) + self._decode_s(plan) + self._cached_s(plan)
        if self.chunked_prefill:
            seconds += self._bursts_s(plan) + self._mixed_s(plan)
        return seconds

    def decode_points(self, plan: ProfilePlan) -> int:
        """Pairs of batch and context that fit."""
        return sum(
            decode_fits(batch, context, plan.tokens, self.capacity_tokens)
            for context in plan.contexts
            for batch in plan.batches
        )

    def _prefill_s(self, plan: ProfilePlan) -> float:
        return sum((plan.repeats + 2) * self._wave_s(1, length) for length in plan.prompts)

    def _decode_s(self, plan: ProfilePlan) -> float:
        seconds = 0.0
        for context in plan.contexts:
            cached = 0
            for batch in plan.batches:
                if not decode_fits(batch, context, plan.tokens, self.capacity_tokens):
                    continue
                seconds += self._wave_s(batch - cached, context) + self._wave_s(cached, 1)
                cached = batch
                tokens_s = self.cost.span_s(plan.tokens, batch, batch * context)
                seconds += plan.repeats * (2 * self._wave_s(batch, 1) + tokens_s)
        return seconds

    def _cached_s(self, plan: ProfilePlan) -> float:
        return (_CACHED_REPEATS * plan.repeats + 1) * self._wave_s(1, 1)

    def _bursts_s(self, plan: ProfilePlan) -> float:
        times, seconds = plan.repeats + 1, 0.0
        for requests, cached, new in bursts_that_fit(self.slots, self.max_context_tokens, self.capacity_tokens, times):
            seconds += self._wave_s(requests, cached) + times * self._wave_s(requests, new)
        return seconds

    def _mixed_s(self, plan: ProfilePlan) -> float:
        cached, new = MIXED_MEASURED
        seconds = 0.0
        for decoding, callers in mixed_that_fit(self.slots, self.max_context_tokens, self.capacity_tokens, plan.tokens):
            seconds += self._wave_s(decoding, DECODING_TOKENS) + self._wave_s(callers, cached)
            resident = decoding * (DECODING_TOKENS + plan.tokens // 2) + callers * (cached + new)
            # At the most, each caller has a prompt in each iteration.
            iteration_s = self.cost.iteration_s(decoding, resident, callers * new) + callers * self.cost.per_prompt_s
            seconds += self._wave_s(decoding, 1) + plan.tokens * iteration_s
        return seconds

    def _wave_s(self, requests: int, new_tokens: int) -> float:
        """Seconds until so many prompts that are sent at once have their first token."""
        if not requests or not new_tokens:
            return 0.0
        return _REQUEST_S + requests * self.cost.per_prompt_s + self.cost.prefill_s(requests * new_tokens)


def plan_within(plan: ProfilePlan, engine: MeasuredEngine, limit_s: float) -> ProfilePlan:
    """The plan itself, or the first smaller one that ends within `limit_s`; the smallest of all where none does."""
    smaller = plan
    for smaller in _ever_smaller(plan):
        if engine.duration_s(smaller) <= limit_s:
            break
    return smaller


def _ever_smaller(plan: ProfilePlan) -> Iterator[ProfilePlan]:
    """First repeats and the steps between sizes go, then tokens; the least and the largest sizes stay."""
    yield plan
    yield (plan := replace(plan, batches=_powers(plan.batches, 2)))
    yield (plan := replace(plan, repeats=min(3, plan.repeats)))
    yield (plan := replace(plan, batches=_powers(plan.batches, 4)))
    yield (plan := replace(plan, tokens=min(64, plan.tokens)))
    yield (plan := _with_lengths(plan, 2))
    yield (plan := replace(plan, repeats=min(2, plan.repeats)))
    yield (plan := replace(plan, tokens=min(32, plan.tokens)))
    yield (plan := _with_lengths(plan, len(plan.contexts)))
    yield replace(plan, batches=tuple(sorted({plan.batches[0], plan.batches[-1]})), repeats=1)


def _powers(batches: Sequence[int], base: int) -> tuple[int, ...]:
    powers = {base**power for power in range(batches[-1].bit_length())}
    return tuple(batch for batch in batches if batch in powers or batch == batches[-1])


def _with_lengths(plan: ProfilePlan, step: int) -> ProfilePlan:
    """Each `step`-th length, and the longest."""
    lengths = tuple(sorted({*plan.contexts[::step], plan.contexts[-1]}))
    return replace(plan, contexts=lengths, prompts=tuple(sorted({*plan.prompts[::step], plan.prompts[-1]})))


def cost_of_points(decode: Sequence[DecodePoint], prefill: TokensPoint) -> EngineCost:
    """A rough cost from the first points: batches of one short context, the smallest first, and a long prompt."""
    alone, full = decode[0], decode[-1]
    sequence_s = max(0.0, full.seconds - alone.seconds) / max(1, full.batch - alone.batch)
    return EngineCost(
        fixed_s=max(0.0, alone.seconds - alone.batch * sequence_s),
        sequence_s=sequence_s,
        prefill_token_s=max(0.0, prefill.seconds - alone.seconds) / prefill.tokens,
    )


def duration_told(plan: ProfilePlan, asked: ProfilePlan, engine: MeasuredEngine, limit_s: float) -> str:
    """One line on how long the measurements will take, and whether points were left out for the limit."""
    seconds, points = engine.duration_s(plan), engine.decode_points(plan)
    line = (
        f"measuring takes about {max(1, round(seconds))} s: {points} batches and contexts, "
        f"{len(plan.prompts)} prompts, {plan.repeats} repeats, {plan.tokens} tokens each"
    )
    if seconds > limit_s:
        return f"{line}; the fewest points take longer than --time-limit {limit_s:g}"
    return line if plan == asked else f"{line}; fewer than asked for, to end within --time-limit {limit_s:g}"
