"""Before which time no plan by work can end: what is within a hair of it needs no second opinion.

With a weight y_j for every engine, all together 1, the last end is at least the weighted mean of all ends, and each
trajectory adds to it at least what it adds where that is least (the dual of sharing all work out freely)::

    seconds >= sum_j y_j held_j + sum_i min_j y_j work_ij

Work counts tokens by the slot or KV by the capacity, whichever binds the whole batch, and no shared prompt. Nor does
anything end before the longest path alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from heddle_dask.strategies.partition.work import Work, WorkLoad

# Seconds of one token decoded, of one token-iteration of KV, of one prompt token.
_Rates = tuple[float, float, float]


def least_seconds(works: Sequence[Work], loads: Sequence[WorkLoad]) -> float:
    """No assignment of `works` to engines that hold `loads` ends earlier; O(n) for each kind of engine."""
    if not works:
        return max(load.seconds for load in loads)
    costs = list(dict.fromkeys(load.cost for load in loads))
    path_s = max(min(work.path_s(cost) for cost in costs) for work in works)
    held_s = max(load.seconds for load in loads)
    return max(path_s, held_s, _shared_out_s(works, loads))


def _shared_out_s(works: Sequence[Work], loads: Sequence[WorkLoad]) -> float:
    parts = [(work.decode_tokens, work.area, work.prefill_tokens) for work in works]
    decode_tokens, area, prefill_tokens = (sum(column) for column in zip(*parts, strict=True))
    rates = [_rates(load, decode_tokens, area) for load in loads]
    # Weights with which all engines would take equally long for everything: exact where engines differ by a factor.
    alone_s = {each: _work_s(each, decode_tokens, area, prefill_tokens) for each in rates}
    if not all(alone_s.values()):
        return 0.0  # nothing to share out
    whole = sum(1 / alone_s[each] for each in rates)
    held_s = sum(
        _work_s(each, load.decode_tokens, load.area, load.prefill_tokens) / alone_s[each]
        for each, load in zip(rates, loads, strict=True)
    )
    if len(alone_s) == 1:
        return (held_s + 1.0) / whole
    weighted = [tuple(rate / seconds for rate in each) for each, seconds in alone_s.items()]
    least = sum(min(a * d + b * k + c * p for a, b, c in weighted) for d, k, p in parts)
    return (held_s + least) / whole


def _rates(load: WorkLoad, decode_tokens: float, area: float) -> _Rates:
    cost = load.cost
    token_s, context_s = cost.token_s + cost.sequence_s, cost.context_token_s
    if area / cost.capacity_tokens > decode_tokens / load.slots:
        return token_s, context_s + cost.fixed_s / cost.capacity_tokens, cost.prefill_token_s
    return token_s + cost.fixed_s / load.slots, context_s, cost.prefill_token_s


def _work_s(rates: _Rates, decode_tokens: float, area: float, prefill_tokens: float) -> float:
    return rates[0] * decode_tokens + rates[1] * area + rates[2] * prefill_tokens
