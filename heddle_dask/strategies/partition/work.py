"""Busy seconds of an engine from the work of its trajectories: tokens, prefill and KV, not their number.

An iteration of continuous batching costs ``fixed + tok·B + kv·C`` (`cost.engine_cost`). The sum over all iterations
of a set of trajectories that start together does not depend on the batches::

    busy = fixed·iterations + tok·Σ decode + kv·Σ area + prefill·Σ prompt
    area = decode·(context + decode/2)            token-iterations: KV read over the trajectory's life
    iterations = max(longest decode, Σ decode / slots, Σ area / capacity)

The first term of `iterations` is exact while all are resident; the other two are the effect of queueing for slots and
for memory under a work-conserving order. During a tool call the engine serves others, so tools lengthen only the path
of their own trajectory: seconds = max(busy, longest path alone). No term grows when a member is removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from heddle_dask.cost.engine_cost import EngineCost


def area_of(decode_tokens: float, context_tokens: float) -> float:
    """Token-iterations of one trajectory that decodes `decode_tokens` after a context of `context_tokens`."""
    return decode_tokens * (context_tokens + decode_tokens / 2)


def busy_s(
    cost: EngineCost,
    slots: int,
    longest_tokens: float,
    decode_tokens: float,
    area: float,
    prefill_tokens: float = 0.0,
) -> float:
    """Seconds of an engine for work with these sums; see the module."""
    iterations = max(longest_tokens, decode_tokens / slots, area / cost.capacity_tokens)
    return (
        cost.fixed_s * iterations
        + (cost.token_s + cost.sequence_s) * decode_tokens
        + cost.context_token_s * area
        + cost.prefill_token_s * prefill_tokens
    )


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one trajectory on any engine.

    Attributes
    ----------
    group
        Group of trajectories that share a prompt.
    decode_tokens
        Predicted tokens still to be generated.
    context_tokens
        Context tokens, including the shared prompt; a mean over the trajectory's life if tools add many tokens.
    shared_tokens
        Length of the prompt that the group shares; prefilled once on every engine with a member.
    prefill_tokens
        Its own prompt tokens still to be prefilled, on any engine.
    tool_s
        Seconds of its tool calls.
    """

    group: str
    decode_tokens: float
    context_tokens: float = 0.0
    shared_tokens: float = 0.0
    prefill_tokens: float = 0.0
    tool_s: float = 0.0

    @property
    def area(self) -> float:
        """Token-iterations of its KV."""
        return area_of(self.decode_tokens, self.context_tokens)

    def path_s(self, cost: EngineCost) -> float:
        """Seconds of the trajectory alone on the engine, tools included."""
        return (
            (cost.fixed_s + cost.token_s + cost.sequence_s) * self.decode_tokens
            + cost.context_token_s * self.area
            + cost.prefill_token_s * (self.shared_tokens + self.prefill_tokens)
            + self.tool_s
        )


@dataclass(slots=True)
class WorkLoad:
    """Sums over the trajectories of one engine; adding one is O(1).

    Attributes
    ----------
    prefill_tokens
        Own prompt tokens of the members and, once per group, the shared ones.
    groups
        For each group with a member here: tokens of its prompt that are cached here or will be prefilled.
    """

    cost: EngineCost
    slots: int
    members: int = 0
    decode_tokens: float = 0.0
    longest_tokens: float = 0.0
    area: float = 0.0
    prefill_tokens: float = 0.0
    path_s: float = 0.0
    groups: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, cost: EngineCost, slots: int, works: Iterable[Work]) -> WorkLoad:
        """The load of an engine that takes `works`."""
        load = cls(cost, slots)
        for work in works:
            load.add(work)
        return load

    def add(self, work: Work) -> None:
        """Add a trajectory whose KV is not yet on this engine."""
        self.prefill_tokens += work.prefill_tokens + self._missing_tokens(work)
        self.path_s = max(self.path_s, work.path_s(self.cost))
        self._count(work)

    def _count(self, work: Work) -> None:
        self.groups[work.group] = max(self.groups.get(work.group, 0.0), work.shared_tokens)
        self.members += 1
        self.decode_tokens += work.decode_tokens
        self.longest_tokens = max(self.longest_tokens, work.decode_tokens)
        self.area += work.area

    def _missing_tokens(self, work: Work) -> float:
        """Tokens of the group's prompt that are prefilled for this member."""
        return max(0.0, work.shared_tokens - self.groups.get(work.group, 0.0))

    @property
    def busy_s(self) -> float:
        """Seconds that the engine is busy with its trajectories."""
        return busy_s(
            self.cost,
            self.slots,
            self.longest_tokens,
            self.decode_tokens,
            self.area,
            self.prefill_tokens,
        )

    @property
    def seconds(self) -> float:
        """Seconds until the last of its trajectories ends."""
        return max(self.busy_s, self.path_s)


@dataclass(frozen=True, slots=True)
class WorkEngine:
    """An engine to plan for."""

    cost: EngineCost
    slots: int


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """`engine_of[i]` is the number of the engine that takes trajectory i; `seconds` the estimated makespan."""

    seconds: float
    engine_of: tuple[int, ...]
