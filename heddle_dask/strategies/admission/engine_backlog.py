"""The work of an engine until its last trajectory ends: whether it meets a deadline, and whether with one more.

Sum the cost of an iteration over all until the last trajectory ends, and the batch drops out (as in `partition.work`)::

    seconds = fixed * iterations + token * tokens + context_token * area + prefill_token * observation tokens
    iterations = max(longest, tokens / slots, held / capacity)

where `area` is the KV that the tokens read, and `held` the same with the time of tools in it. A trajectory takes at
least as many iterations as it has tokens, so that one long trajectory prices the fixed part of all of them, however
many run beside it: long trajectories belong together on few engines, which run small batches from beginning to end,
and the others run full ones. This is the idea of Heddle's presorted partition (section 4.2); here the share of each
engine is estimated in seconds of work, so that it holds for heterogeneous engines, for contexts that grow, and while
trajectories continue.

Memory is assumed to be in use from beginning to end: shorter trajectories take the room of those that have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.remaining_demand import RemainingDemand

_MOST_IN_TOOLS = 0.9
_LATER = 1.05


class BacklogItem(NamedTuple):
    """What a trajectory needs of an engine until its end.

    Attributes
    ----------
    tokens, observation_tokens
        To be sampled, and to be prefilled on the way.
    tools_s
        Seconds in which it only holds its memory.
    area, held
        Token-iterations of its context: read, and held, tools included.
    """

    tokens: float
    observation_tokens: float
    tools_s: float
    area: float
    held: float


NOTHING = BacklogItem(0.0, 0.0, 0.0, 0.0, 0.0)


def backlog_item(demand: RemainingDemand) -> BacklogItem:
    """In the mean of what may be left."""
    tokens = demand.tokens
    area = tokens * (demand.context_tokens + demand.growth * tokens / 2)
    return BacklogItem(tokens, (demand.growth - 1) * tokens, demand.tools_s, area, area * demand.stretch)


def work_s(cost: EngineCost, tokens: float, observation_tokens: float, area: float) -> float:
    """Seconds of all iterations beside their fixed part."""
    return (
        (cost.token_s + cost.sequence_s) * tokens
        + cost.context_token_s * area
        + cost.prefill_token_s * observation_tokens
    )


def iterations_of(tokens: float, tools_s: float, rest_s: float) -> float:
    """Iterations that an engine makes in `rest_s` so that one samples so many tokens and waits for its tools.

    Who spends all of it in tools cannot be done, and counts as one who spends nine tenths.
    """
    return tokens / (1.0 - min(_MOST_IN_TOOLS, tools_s / rest_s)) if rest_s > 0 else tokens


class EngineBacklog:
    """The work of one engine, and the time that is left for it.

    Parameters
    ----------
    capacity_tokens
        KV memory that may be promised.
    rest_s
        Until everything is to be done.
    at
        When this was so.

    Attributes
    ----------
    longest
        Iterations of the one that needs most of them.
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
        """It will come, or is there."""
        self.longest = max(self.longest, iterations_of(item.tokens, item.tools_s, self.rest_s))
        self._tokens += item.tokens
        self._observed += item.observation_tokens
        self._area += item.area
        self._held += item.held

    @property
    def end_s(self) -> float:
        """Seconds until all are done."""
        return self._seconds(self.longest, self._tokens, self._observed, self._area, self._held)

    def end_with_s(self, item: BacklogItem, rest_s: float) -> float:
        """The same with one more, were so much time left."""
        longest = max(self.longest, iterations_of(item.tokens, item.tools_s, rest_s))
        return self._seconds(
            longest,
            self._tokens + item.tokens,
            self._observed + item.observation_tokens,
            self._area + item.area,
            self._held + item.held,
        )

    def has_longer(self, item: BacklogItem) -> bool:
        """Whether somebody there needs as many iterations."""
        return self.longest >= iterations_of(item.tokens, item.tools_s, self.rest_s)

    def fits(self, item: BacklogItem) -> bool:
        """Whether it will be done in time with one more."""
        return self.end_with_s(item, self.rest_s) <= self.rest_s

    def rest_with_s(self, item: BacklogItem) -> float:
        """The time in which it would be done with one more, or a little more."""
        rest_s = max(self.rest_s, 1e-9)
        while (end_s := self.end_with_s(item, rest_s)) > rest_s:
            rest_s = max(_LATER * rest_s, end_s)
        return rest_s

    def left(self, at: float) -> BacklogLeft:
        """What of it is still to be done at that time: as much less as the engine would have done until then."""
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
    """What an engine has still to do, in the parts that bound its end.

    Attributes
    ----------
    work_s
        Seconds of its iterations beside their fixed part.
    longest
        Iterations of the longest.
    slots_s, memory_s
        Seconds of the fixed part if only slots or only memory bound the batch.
    """

    work_s: float
    longest: float
    slots_s: float
    memory_s: float
