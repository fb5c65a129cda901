"""How many jobs of each group the work needs: a pure rule over the scheduler's demand.

The rule sizes a pool, it does not follow changes: the wanted number depends on all open work, not on the work that
waits at the moment, so starting a job does not lower the number that asked for it. What comes down stays up for
`hold_s` first: a job that is submitted again queues and loads again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from heddle_dask.live.wire.cluster_messages import Demand

_MEASURED_LEAST_S = 5.0
_SLOTS_UNKNOWN = 8


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """The constants of the rule."""

    # An engine more is worth its start if the open LLM work would otherwise take longer than this.
    llm_target_s: float = 300.0
    tool_target_s: float = 30.0  # the same for a tool worker and the tool work that waits
    hold_s: float = 300.0  # the wanted number of a group falls after it has been lower for so long
    # A job that has waited in the queue for so long is not counted on: the next group of its role gets the work.
    spill_s: float = 300.0


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What the rule needs of a group."""

    name: str
    role: str
    units: int  # engines of one job, or its tool CPUs
    minimum: int
    maximum: int
    stuck: int = 0  # its jobs that have waited in the queue for at least `ScalingRule.spill_s`


@dataclass(frozen=True, slots=True)
class Held:
    """The number in force of a group, since when less is wanted, and the most that was wanted since."""

    jobs: int
    lower_since_s: float | None = None
    most_since: int = 0


@dataclass(frozen=True, slots=True)
class ScalingState:
    """What the rule remembers from one call to the next."""

    held: Mapping[str, Held] = field(default_factory=dict)
    # Measured speed of a busy engine; None before the first measurement.
    tokens_per_engine_s: float | None = None
    measured_at_s: float = 0.0
    measured_tokens: int = 0


def targets(
    demand: Demand, groups: Sequence[GroupSize], state: ScalingState, now_s: float, rule: ScalingRule
) -> tuple[dict[str, int], ScalingState]:
    """Jobs wanted of each group, between its minimum and its maximum, and the state for the next call."""
    state = _measured(demand, state, now_s)
    needs = {
        "rollout": engines_needed(demand, state.tokens_per_engine_s, rule),
        "tool": tool_cpus_needed(demand, rule),
    }
    held: dict[str, Held] = {}
    for role, units in needs.items():
        mine = [group for group in groups if group.role == role]
        for name, jobs in spread(units, mine).items():
            held[name] = hold(state.held.get(name), jobs, now_s, rule.hold_s)
    # A group's limits hold whatever was in force before.
    wanted = {g.name: min(max(held[g.name].jobs, g.minimum), g.maximum) for g in groups if g.name in held}
    return wanted, replace(state, held=held)


def engines_needed(demand: Demand, tokens_per_engine_s: float | None, rule: ScalingRule) -> int:
    """Engines that the open work can fill, and no more than get it done within `llm_target_s`.

    While an engine has no work, no further one would have any.
    """
    needed = _engines_for(demand, tokens_per_engine_s, rule)
    return min(needed, _working(demand)) if demand.idle_engines else needed


def told_idle(demand: Demand, state: ScalingState, rule: ScalingRule) -> str:
    """Why fewer engines are asked for than the open work could use; empty: they are not fewer."""
    needed = _engines_for(demand, state.tokens_per_engine_s, rule)
    if not demand.idle_engines or needed <= _working(demand):
        return ""
    idle = f"{demand.idle_engines} of {demand.engines} engines have no work"
    return f"{idle}: no further one is asked for, though the open work could use {needed}"


def _working(demand: Demand) -> int:
    return max(1, demand.engines - demand.idle_engines)


def _engines_for(demand: Demand, tokens_per_engine_s: float | None, rule: ScalingRule) -> int:
    if demand.trajectories == 0:
        return int(demand.session_open)
    slots = demand.slots / demand.engines if demand.engines else _SLOTS_UNKNOWN
    fillable = math.ceil(demand.trajectories / max(1.0, slots))
    if tokens_per_engine_s is None or tokens_per_engine_s <= 0:
        # The engines that come first tell how fast they are; then it is known how many more are worth their start.
        return min(fillable, max(1, demand.engines))
    in_time = math.ceil(demand.open_tokens / (tokens_per_engine_s * rule.llm_target_s))
    return max(1, min(fillable, in_time))


def tool_cpus_needed(demand: Demand, rule: ScalingRule) -> int:
    """CPUs of the running actions, and enough more to start the waiting ones within `tool_target_s`."""
    more = min(demand.waiting_tool_cpus, math.ceil(demand.waiting_tool_cpu_s / rule.tool_target_s))
    at_least = int(demand.session_open or demand.waiting_tool_cpus > 0)
    return max(at_least, demand.busy_tool_cpus + more)


def spread(units: int, groups: Sequence[GroupSize]) -> dict[str, int]:
    """Jobs of each group that together bring so many units; earlier groups first.

    The minimum of every group is there in any case. Jobs that are stuck in the queue bring nothing.
    """
    left = units - sum(max(0, group.minimum - group.stuck) * group.units for group in groups)
    jobs: dict[str, int] = {}
    for group in groups:
        more = 0
        if left > 0:
            # Jobs that are stuck stay in the queue, and count against the maximum.
            stuck = max(0, group.stuck - group.minimum)
            more = min(group.maximum - group.minimum, math.ceil(left / group.units) + stuck)
            left -= max(0, more - stuck) * group.units
        jobs[group.name] = group.minimum + more
    return jobs


def hold(before: Held | None, wanted: int, now_s: float, hold_s: float) -> Held:
    """The number in force: it rises at once, and falls when less has been wanted for `hold_s`."""
    if before is None or wanted >= before.jobs:
        return Held(wanted)
    if before.lower_since_s is None:
        return Held(before.jobs, now_s, wanted)
    most = max(wanted, before.most_since)
    if now_s - before.lower_since_s < hold_s:
        return Held(before.jobs, before.lower_since_s, most)
    # To the most that was wanted meanwhile, not to the last value: it may have been low for a moment only.
    if most == wanted:
        return Held(wanted)
    return Held(most, now_s, wanted)


def _measured(demand: Demand, state: ScalingState, now_s: float) -> ScalingState:
    """Measure the speed of the engines that work, over at least `_MEASURED_LEAST_S`; smoothed."""
    tokens, since_s = demand.sampled_tokens - state.measured_tokens, now_s - state.measured_at_s
    begins = replace(state, measured_at_s=now_s, measured_tokens=demand.sampled_tokens)
    if tokens < 0 or state.measured_at_s == 0.0 or not demand.generating:
        return begins
    if since_s < _MEASURED_LEAST_S:
        return state
    now_per_s = tokens / since_s / demand.generating
    before = state.tokens_per_engine_s
    if now_per_s <= 0:
        return begins
    smoothed = now_per_s if before is None else 0.7 * before + 0.3 * now_per_s
    return replace(begins, tokens_per_engine_s=smoothed)
