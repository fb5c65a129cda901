"""Which of several engines would end earliest with one more trajectory, without asking all of them.

An engine's end with the trajectory is at least its busy time without it plus what the trajectory adds whatever else is
there (decoding, KV, prefill, the group's prompt where no member is), and at least either path alone. Busy times are
kept, so that a bound costs one addition; only engines whose bounds could still win are asked. The choice is that of
asking all, the first of equals included.
"""

from __future__ import annotations

from collections.abc import Sequence

from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.partition.work import Work, WorkLoad

Rating = tuple[float, float, float]
_ROUNDING = 1 - 1e-9  # bounds are sums in another order than the times they bound


def rating_of(load: WorkLoad, work: Work, prompts: float = 0.0) -> Rating:
    """`WorkLoad.ends_with`, its first number later by `prompts` times the prefill of a prompt that is not there."""
    end_s, busy_s, tokens_per_slot = load.ends_with(work)
    return end_s + prompts * load.prompt_s(work), busy_s, tokens_per_slot


class LeastEnd:
    """Loads by number, and their busy times; `changed` is to be told of every load that changed.

    Parameters
    ----------
    prompts
        See `rating_of`.
    """

    def __init__(self, loads: Sequence[WorkLoad], prompts: float = 0.0) -> None:
        self._loads = list(loads)
        self._prompts = prompts
        self._groups = [load.groups for load in loads]
        self._busy_s = [load.busy_s * _ROUNDING for load in loads]
        self._path_s = [load.path_s for load in loads]
        numbers: dict[EngineCost, int] = {}
        self._kind = [numbers.setdefault(load.cost, len(numbers)) for load in loads]
        self._kinds = list(numbers)
        self._sums = [self._sums_of(j) for j in range(len(self._loads))]

    def changed(self, j: int, load: WorkLoad) -> None:
        """Load j is that now."""
        self._loads[j], self._groups[j] = load, load.groups
        self._busy_s[j], self._path_s[j] = load.busy_s * _ROUNDING, load.path_s
        self._sums[j] = self._sums_of(j)

    def _sums_of(self, j: int) -> tuple[float, ...]:
        """All that a rating depends on, but for the prompts that are there."""
        load = self._loads[j]
        sums = load.longest_tokens, load.decode_tokens, load.area, load.prefill_tokens, load.path_s
        return (*sums, load.slots, self._kind[j])

    def add(self, j: int, work: Work) -> None:
        """Engine j takes the trajectory."""
        self._loads[j].add(work)
        self.changed(j, self._loads[j])

    def first(self, work: Work) -> int:
        """The number of least `rating_of`; of equals the first."""
        busy_s, prompt_s = self._least_busy_s(work)
        start = busy_s.index(min(busy_s))
        best, best_number = rating_of(self._loads[start], work, self._prompts), start
        tried = {self._sums[start]} if work.group not in self._groups[start] else set()
        paths_s = [work.path_s(cost) for cost in self._kinds]
        for j, busy in enumerate(busy_s):
            if busy > best[0] or j == start:
                continue
            end_s = max(busy, self._path_s[j], paths_s[self._kind[j]]) + self._prompts * prompt_s[j]
            if end_s > best[0] or (end_s == best[0] and busy > best[1]):
                continue
            if work.group not in self._groups[j]:
                if self._sums[j] in tried and j > best_number:
                    continue  # as one before it, at best an equal
                tried.add(self._sums[j])
            rating = rating_of(self._loads[j], work, self._prompts)
            if rating < best or (rating == best and j < best_number):
                best, best_number = rating, j
        return best_number

    def _least_busy_s(self, work: Work) -> tuple[list[float], list[float]]:
        """For each engine: a lower bound of its busy time with the trajectory, and of a missing prompt's prefill."""
        area, group = work.area, work.group
        added = [
            ((cost.token_s + cost.sequence_s) * work.decode_tokens + cost.context_token_s * area) * _ROUNDING
            + cost.prefill_token_s * work.prefill_tokens * _ROUNDING
            for cost in self._kinds
        ]
        prompts = [cost.prefill_token_s * work.shared_tokens for cost in self._kinds]
        if len(self._kinds) == 1:
            own, prompt = added[0], prompts[0]
            prompt_s = [0.0 if group in groups else prompt for groups in self._groups]
            missing = own + prompt * _ROUNDING
            return [
                busy + (own if group in groups else missing)
                for busy, groups in zip(self._busy_s, self._groups, strict=True)
            ], prompt_s
        prompt_s = [
            0.0 if group in groups else prompts[kind]
            for groups, kind in zip(self._groups, self._kind, strict=True)
        ]
        return [
            busy + added[kind] + prompt * _ROUNDING
            for busy, kind, prompt in zip(self._busy_s, self._kind, prompt_s, strict=True)
        ], prompt_s
