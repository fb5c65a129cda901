"""Why a long trajectory ended last: one line, from its account and the medians of its run.

The reason is the phase that exceeds the median of all trajectories by the most seconds: what everybody waited for is no
reason that one ended last. A second phase is named where it exceeds its median by at least half as much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from heddle_dask.records.trajectory import StepRecord, TrajectoryOutline
from heddle_dask.views.accounts import NS_PER_S, Account, Phase

# A context of which the engine found less than this share in its prefix cache was computed again.
_CACHED_SHARE = 0.5
_SECOND_REASON = 0.5
# Less than this share of a duration, or of a second, explains nothing.
_LEAST_SHARE, _LEAST_S = 0.02, 0.001


@dataclass(frozen=True, slots=True)
class Typical:
    """Medians over the trajectories of a run, and the most tokens that one generated."""

    seconds: Mapping[Phase, float]
    most_tokens: int

    @classmethod
    def of(cls, phases_ns: Iterable[Mapping[Phase, int]], tokens: Iterable[int]) -> Typical:
        """The medians; of a run of one or two trajectories none: every second of those may be a reason."""
        rows = list(phases_ns)
        medians = {
            phase: statistics.median(row.get(phase, 0) for row in rows) / NS_PER_S if len(rows) > 2 else 0.0
            for phase in Phase
        }
        return cls(medians, max(tokens, default=0))


def why_last(record: TrajectoryOutline, account: Account, typical: Typical, losses: int = 0) -> str:
    """The reason in one line.

    Parameters
    ----------
    losses
        Attempts of its steps that its engines' deaths or failures ended.
    """
    excess = {phase: account.seconds(phase) - typical.seconds.get(phase, 0.0) for phase in account.phases_ns}
    order = sorted(excess, key=lambda phase: (-excess[phase], phase))
    least_s = max(_LEAST_S, _LEAST_SHARE * account.duration_s)
    named = [phase for phase in order if excess[phase] >= least_s]
    if not named:
        named = [max(account.phases_ns, key=account.seconds)] if account.phases_ns else []
    if not named:
        return "it took no time"
    first, *others = named
    said = [_phrase(record, account, first, typical, losses)]
    if others and excess[others[0]] >= _SECOND_REASON * excess[first]:
        said.append(_phrase(record, account, others[0], typical, losses))
    return "; ".join([*said, *_facts(record, {first, *others[:1]}, losses)])


def recomputed(steps: Sequence[StepRecord]) -> int:
    """Steps after the first of their branch whose context was, for the most phase, not in the prefix cache."""
    seen: set[int] = set()
    count = 0
    for step in steps:
        is_later = step.branch in seen or step.step_index > 0
        count += is_later and step.prompt_tokens > 0 and step.cached_tokens < _CACHED_SHARE * step.prompt_tokens
        seen.add(step.branch)
    return count


def _phrase(record: TrajectoryOutline, account: Account, phase: Phase, typical: Typical, losses: int) -> str:
    seconds = account.seconds(phase)
    share = f"{account.share(phase):.0%} of its time"
    took = f"{shown_s(seconds)}, {share}"
    match phase:
        case Phase.DECODE | Phase.GENERATION:
            tokens = record.generated_tokens
            longest = "longest decode" if 0 < tokens == typical.most_tokens else "decode"
            return f"{longest}: {tokens:,} tokens, {took}"
        case Phase.PREFILL:
            read = sum(max(0, step.prompt_tokens - step.cached_tokens) for step in record.steps)
            return f"prefill of {read:,} tokens: {took}"
        case Phase.TOOL | Phase.REWARD:
            return _calls(record, phase, took)
        case Phase.ADMISSION:
            return f"waited {shown_s(seconds)} for admission, {share}"
        case Phase.LLM_QUEUE:
            return f"waited {shown_s(seconds)} for an engine or a slot, {share}"
        case Phase.TOOL_QUEUE:
            return f"waited {shown_s(seconds)} for resources of its actions, {share}"
        case Phase.QUOTA:
            return f"waited {shown_s(seconds)} for the quota of an API, {share}"
        case Phase.SERVICE_LOAD:
            return f"waited {shown_s(seconds)} for model services to be loaded, {share}"
        case Phase.MIGRATION:
            return f"waited {shown_s(seconds)} for its context to move, {share}"
        case Phase.LOST:
            cause = "its engine was lost" if losses else "attempts without result"
            return f"{cause}: {took}"
        case Phase.DRIVER:
            return f"outside of steps and actions: {took}"


def _calls(record: TrajectoryOutline, phase: Phase, took: str) -> str:
    name = "reward" if phase is Phase.REWARD else "tool"
    by_label: dict[str, list[float]] = {}
    for action in record.actions:
        if (action.kind == "reward") == (phase is Phase.REWARD) and not math.isnan(action.run_s):
            by_label.setdefault(action.label, []).append(action.run_s)
    if not by_label:
        return f"{name} calls: {took}"
    label, times = max(by_label.items(), key=lambda item: (sum(item[1]), item[0]))
    calls = f" in {len(times)} calls" if len(times) > 1 else ""
    others = f"; all {name}s {took}" if len(by_label) > 1 else f", {took.split(', ')[1]}"
    return f"{name} `{label}` {shown_s(sum(times))}{calls}{others}"


def _facts(record: TrajectoryOutline, named: set[Phase], losses: int) -> list[str]:
    facts = []
    preemptions = sum(step.preemptions for step in record.steps)
    if preemptions and named & {Phase.LLM_QUEUE, Phase.PREFILL, Phase.DECODE, Phase.GENERATION}:
        facts.append(f"preempted {_times(preemptions)}")
    again = recomputed(record.steps)
    if again and named & {Phase.PREFILL, Phase.GENERATION, Phase.DECODE}:
        facts.append(f"recomputed its context {_times(again)}")
    if losses and Phase.LOST not in named:
        facts.append(f"its engine was lost {_times(losses)}")
    return facts


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def shown_s(seconds: float) -> str:
    """A duration for people: ``12 ms``, ``1.9 s``, ``48 s``, ``1,307 s``, ``2 h 5 min``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds:,.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"
