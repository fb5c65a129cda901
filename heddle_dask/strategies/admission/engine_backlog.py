"""The work of an engine until its last trajectory ends: does it meet a deadline, also with one more trajectory?

The sum of the iteration cost over all iterations does not depend on the batches (as in `partition.work`)::

    seconds = fixed * iterations + token * tokens + context_token * area + prefill_token * observation tokens
    iterations = max(longest, tokens / slots, held / capacity)

where `area` is the KV that the tokens read, and `held` the same including the time of tools. A trajectory takes at
least as many iterations as it has tokens, so one long trajectory determines the number of iterations, whatever the
batch. Long trajectories therefore belong together on few engines, which run small batches from beginning to end, while
the others run full batches. This is the idea of Heddle's presorted partition (section 4.2). Here the share of each
engine is estimated in seconds of work, so that it also holds for heterogeneous engines, for growing contexts, and for
running trajectories.

Memory is assumed to be in use from beginning to end: shorter trajectories take the memory of those that have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.remaining import RemainingDemand

_MOST_IN_TOOLS = 0.9
_LATER = 1.05


class BacklogItem(NamedTuple):
    """Demand of one trajectory on an engine until its end.

    Attributes
    ----------
    tokens, observation_tokens
        Tokens to sample, and observation tokens to prefill.
    tools_s
        Tool seconds, in which it only holds memory.
    area, held
        Token-iterations of its context: read by decoding, and held, tools included.
    """

    tokens: float
    observation_tokens: float
    tools_s: float
    area: float
    held: float


NOTHING = BacklogItem(0.0, 0.0, 0.0, 0.0, 0.0)


def backlog_item(demand: RemainingDemand) -> BacklogItem:
    """The backlog item for the mean remaining length."""
    tokens = demand.tokens
    area = tokens * (demand.context_tokens + demand.growth * tokens / 2)
    return BacklogItem(tokens, (demand.growth - 1) * tokens, demand.tools_s, area, area * demand.stretch)


def work_s(cost: EngineCost, tokens: float, observation_tokens: float, area: float) -> float:
    """Seconds of all iterations without their fixed part."""
    return (
        (cost.token_s + cost.sequence_s) * tokens
        + cost.context_token_s * area
        + cost.prefill_token_s * observation_tokens
    )


def iterations_of(tokens: float, tools_s: float, rest_s: float) -> float:
    """Iterations in `rest_s` of an engine on which a trajectory samples `tokens` and spends `tools_s` in tools.

    Tool time counts as at most nine tenths of `rest_s`; a trajectory with more cannot end in time.
    """
    return tokens / (1.0 - min(_MOST_IN_TOOLS, tools_s / rest_s)) if rest_s > 0 else tokens


class EngineBacklog:
    """The work of one engine, and the time left for it.

    Parameters
    ----------
    capacity_tokens
        KV tokens that may be reserved.
    rest_s
        Seconds from `at` until the deadline.
    at
        Time of this backlog.

    Attributes
    ----------
    longest
        Iterations of the longest trajectory.
    """

    __slots__ = (
        "_area",
        "_capacity",
        "_held",
        "_observed",
        "_tokens",
        "at",
        "cost",
        "longest",
        "rest_s",
        "slots",
    )

    def __init__(
        self,
        cost: EngineCost,
        slots: int,
        capacity_tokens: float,
        rest_s: float,
        at: float = 0.0,
        items: Iterable[BacklogItem] = (),
    ) -> None:
        self.cost = cost
        self.slots = slots
        self.rest_s = rest_s
        self.at = at
        self.longest = 0.0
        self._capacity = capacity_tokens
        self._tokens = self._observed = self._area = self._held = 0.0
        for item in items:
            self.add(item)

    def add(self, item: BacklogItem) -> None:
        """Add a trajectory that is on the engine or has a reservation."""
        self.longest = max(self.longest, iterations_of(item.tokens, item.tools_s, self.rest_s))
        self._tokens += item.tokens
        self._observed += item.observation_tokens
        self._area += item.area
        self._held += item.held

    @property
    def end_s(self) -> float:
        """Seconds until all trajectories have ended."""
        return self._seconds(self.longest, self._tokens, self._observed, self._area, self._held)

    def end_with_s(self, item: BacklogItem, rest_s: float) -> float:
        """Seconds until all trajectories and one more have ended, with `rest_s` as the time left."""
        longest = max(self.longest, iterations_of(item.tokens, item.tools_s, rest_s))
        return self._seconds(
            longest,
            self._tokens + item.tokens,
            self._observed + item.observation_tokens,
            self._area + item.area,
            self._held + item.held,
        )

    def has_longer(self, item: BacklogItem) -> bool:
        """Whether a trajectory of the engine needs at least as many iterations."""
        return self.longest >= iterations_of(item.tokens, item.tools_s, self.rest_s)

    def fits(self, item: BacklogItem) -> bool:
        """Whether the engine meets the deadline with one more trajectory."""
        return self.end_with_s(item, self.rest_s) <= self.rest_s

    def rest_with_s(self, item: BacklogItem) -> float:
        """A time left, close to the least, with which the engine ends in time with one more trajectory."""
        rest_s = max(self.rest_s, 1e-9)
        while (end_s := self.end_with_s(item, rest_s)) > rest_s:
            rest_s = max(_LATER * rest_s, end_s)
        return rest_s

    def left(self, at: float) -> BacklogLeft:
        """The work left at time `at`, assuming that the engine works at the expected rate until then."""
        end_s = self.end_s
        share = max(0.0, 1.0 - (at - self.at) / end_s) if end_s > 0 else 0.0
        iterations_s = self.cost.fixed_s * share
        return BacklogLeft(
            work_s=share * work_s(self.cost, self._tokens, self._observed, self._area),
            longest=share * self.longest,
            slots_s=iterations_s * self._tokens / self.slots,
            memory_s=iterations_s * self._held / self._capacity,
        )

    def _seconds(self, longest: float, tokens: float, observed: float, area: float, held: float) -> float:
        iterations = max(longest, tokens / self.slots, held / self._capacity)
        return self.cost.fixed_s * iterations + work_s(self.cost, tokens, observed, area)


class BacklogLeft(NamedTuple):
    """The work left of an engine, in the parts that bound its end.

    Attributes
    ----------
    work_s
        Seconds of its iterations without their fixed part.
    longest
        Iterations of the longest trajectory.
    slots_s, memory_s
        Seconds of the fixed part if only slots, or only memory, limit the batch.
    """

    work_s: float
    longest: float
    slots_s: float
    memory_s: float
