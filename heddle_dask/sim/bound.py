"""A lower bound of the makespan under any order, placement, preemption and migration; this text is its proof.

The engines are those of `cost.iteration`.

Notation. An iteration takes ``f + sum of w``: f is the fixed time, w what one job adds (its tokens and its context).
For a mixture of experts f is `fixed_s - spared_s`, its minimum. The additional time of an iteration of b tokens,
``spared_s * (1 - (1 - share)**b)``, is concave in b, so it is at least b times its slope up to a full batch
(`slots`): a price per token. Every engine has M = `chunk_tokens`, S = `slots`, C = KV capacity.

**Work.** Every engine is busy at most T seconds. Its iterations must contain:

1. every sampled token once. Sampled while decoding behind a context of c tokens, of which the last is computed with
   it, it costs ``token_s + sequence_s + context_token_s * (c - 1)``. Otherwise it ends a prefill, as the first token
   of each step does, and as the first token after a preemption does. The cache finds whole blocks and never the last
   token, so this prefill has at least ``r = (c - 1) % block + 1`` tokens and reads the other ``c - r``; the
   cheaper of the two counts. (With a `context_token_s` above `prefill_token_s`, the latter is taken for both.)
2. every observation, prompt and sampled token in front of a step once, computed unless a whole block of the step
   before holds its KV. KV may be transferred, but computing it is never free: a group's prompt counts once in the
   whole fleet, and the last, partial block once for every member, since no cache finds it.
3. the iterations themselves. An iteration samples at most S tokens, and their KV fits: a job holds its own tokens,
   and at least one G-th of the whole blocks of the prompt that it shares with G - 1 others. So all engines together
   need at least ``max(tokens / S, KV held over all sampled tokens / C)`` iterations of f each.

Heterogeneous engines share this work by a linear programme. The bound is its dual value for shares mu of the engines,
with ``price of a kind of work = min over engines of mu * cost``. Every mu gives a valid bound; several are tried. The
relaxation lets each engine take the kind of work at which it is fastest, so the bound is looser than for identical
engines.

**Path.** One trajectory's steps and tools follow one another. It needs an iteration for each token,
``ceil(prefill / M) - 1`` more for each prefill, the work of its own tokens in them, its tools, and the control-plane
delay of every step and call. Its prompt may be computed for a sibling, but no sooner than the trajectory alone could
compute it. Every term is the minimum over the engines, so migration does not help.

**Both.** Long trajectories need small batches to end in time, and small batches waste f. Let the tokens of trajectory
i take v_1, ... v_n of an iteration's capacity (KV over C, or 1 / S), so that the v of an iteration sum to V <= 1, and
give each of its tokens the share v / V of f. Let rho be the largest v / w over all tokens. An iteration of length tau
then has ``V <= rho * (tau - f)``. With T_i = T less tools and control plane, the n iterations of i take at most T_i,
so that their V sum to at most ``rho * (T_i - n f)``, and by Cauchy and Schwarz the sum of v / V is at least
``(sum of sqrt v)**2 / (rho * (T_i - n f))``. It is at least the sum of v too. So a makespan T needs ``work of kinds 1
and 2 + f * sum over i of the larger one <= engines * T``. The left side falls with T, so bisection finds the least
such T. This part holds for identical engines only.

**Prompts.** Each step stops its engine for `per_prompt_s` when it joins the batch, outside all iterations: a kind of
work, and part of the path.

**Tools.** A pool of CPUs runs all tool seconds.

`prompt_s` and blocks larger than 16 tokens only add time to these terms.

Assumptions: every trajectory completes, no tool fails (a failed call ends early), and no prefill that siblings wait
for is interrupted (the simulated cache then counts the prompt as computed).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.cost.iteration import BLOCK_TOKENS
from heddle_dask.sim.bound_work import PlannedWork, measure_work
from heddle_dask.sim.fleet import FAILED_TOOL_SHARE, ControlDelays, SimulatedFleet
from heddle_dask.workloads.planned import PlannedTrajectory

Floats = NDArray[np.float64]

_BISECTIONS = 60
_SHARES = (0.5, 0.8, 0.9, 1.1, 1.25, 2.0)


@dataclass(frozen=True, slots=True)
class MakespanBound:
    """Lower bounds in seconds; see the module.

    Attributes
    ----------
    combined_s
        0 for heterogeneous engines.
    """

    path_s: float
    work_s: float
    combined_s: float
    tools_s: float

    @property
    def seconds(self) -> float:
        """The largest of the bounds: no makespan is smaller."""
        return max(self.path_s, self.work_s, self.combined_s, self.tools_s)

    @property
    def binding(self) -> str:
        """Name of the largest bound: path, work, combined or tools."""
        named = {"path": self.path_s, "work": self.work_s, "combined": self.combined_s, "tools": self.tools_s}
        return max(named, key=lambda name: named[name])


def makespan_bound(trajectories: Sequence[PlannedTrajectory], fleet: SimulatedFleet) -> MakespanBound:
    """Lower bounds of the makespan of `trajectories` on `fleet`, from cold caches."""
    if not trajectories:
        raise BadInput("the bound of no trajectories: give at least one")
    kinds = _kinds(fleet)
    work = measure_work(trajectories)
    # Which calls will fail is not known here, so every call gets the time of a failed one.
    ran_s = work.tools_s * (FAILED_TOOL_SHARE if fleet.faults.tool_failure_share else 1.0)
    tools_s = float(ran_s.sum()) / fleet.tool_cpus if fleet.tool_cpus else 0.0
    rest_s = ran_s + _control_s(work, fleet.delays) + work.steps * min(kind.per_prompt_s for kind, _ in kinds)
    path = _path_s(work, [kind for kind, _ in kinds]) + rest_s
    work_s = _work_s(work, kinds)
    combined_s = 0.0
    if len(kinds) == 1:
        combined_s = _combined_s(work, *kinds[0], rest_s, max(float(path.max()), work_s))
    return MakespanBound(float(path.max()), work_s, combined_s, tools_s)


@dataclass(frozen=True, slots=True)
class _Kind:
    """Identical engines: the terms as the proof uses them."""

    fixed_s: float
    alone_s: float
    decode_s: float
    prefill_s: float
    context_s: float
    spared_token_s: float
    per_prompt_s: float
    chunk_tokens: int
    slots: int
    capacity_tokens: int

    def sampled_s(self, residue: int) -> float:
        """Seconds of a token after c others, without reading c - 1 of them; `residue` is ``(c - 1) % block + 1``."""
        stopped_s = self.prefill_s * residue - self.context_s * (residue - 1)
        return self.spared_token_s + min(self.decode_s, stopped_s)

    def least_s(self, context: float) -> float:
        """Seconds of a token sampled after `context` others: the cheaper of decoding and prefilling."""
        return min(self.decode_s, self.prefill_s) + self.context_s * (context - 1)


def _kinds(fleet: SimulatedFleet) -> list[tuple[_Kind, int]]:
    counts: dict[_Kind, int] = {}
    for spec, cost in fleet.engines:
        kind = _kind(cost, spec.slots, spec.kv_capacity_tokens or cost.capacity_tokens)
        counts[kind] = counts.get(kind, 0) + 1
    return list(counts.items())


def _kind(cost: EngineCost, slots: int, capacity_tokens: int) -> _Kind:
    missed = 1.0 - cost.expert_share
    context_s = min(cost.context_token_s, cost.prefill_token_s)
    return _Kind(
        fixed_s=cost.fixed_s - cost.spared_s,
        alone_s=cost.fixed_s - cost.spared_s * missed,
        decode_s=cost.token_s + cost.sequence_s,
        prefill_s=cost.prefill_token_s,
        context_s=context_s,
        spared_token_s=cost.spared_s * (1.0 - missed**slots) / slots,
        per_prompt_s=cost.per_prompt_s,
        chunk_tokens=cost.chunk_tokens,
        slots=slots,
        capacity_tokens=capacity_tokens,
    )


def _control_s(work: PlannedWork, delays: ControlDelays) -> Floats:
    step_s = delays.request_s + delays.start_s + delays.report_s
    added_s: Floats = work.steps * step_s + work.calls * 2 * delays.action_s
    return added_s


def _path_s(work: PlannedWork, kinds: Sequence[_Kind]) -> Floats:
    """Path seconds of each trajectory, without tools and control plane."""
    best = replace(
        kinds[0],
        alone_s=min(kind.alone_s for kind in kinds),
        prefill_s=min(kind.prefill_s for kind in kinds),
        context_s=min(kind.context_s for kind in kinds),
        chunk_tokens=max(kind.chunk_tokens for kind in kinds),
    )
    # `alone_s` already contains the time of the spared experts beyond the minimum.
    residues = [
        min(replace(kind, spared_token_s=0.0).sampled_s(r) for kind in kinds) for r in range(1, BLOCK_TOKENS + 1)
    ]
    chunks = -(-work.path_prefill // best.chunk_tokens)
    steps_s: Floats = (chunks + work.generated - 1) * best.alone_s + best.prefill_s * work.path_prefill
    read = np.maximum(work.context - np.minimum(work.path_prefill, best.chunk_tokens), 0)
    steps_s = steps_s + best.context_s * (read + work.decode_area)
    steps_s = steps_s + work.decoded_by_residue @ np.array(residues)
    return np.bincount(work.owner, steps_s, minlength=len(work.steps)).astype(np.float64)


def _work_s(work: PlannedWork, kinds: Sequence[tuple[_Kind, int]]) -> float:
    """The best dual value found; exact for one kind of engine."""
    shares = [1.0] * len(kinds)
    best = _dual_s(work, kinds, shares)
    if len(kinds) == 1:
        return best
    for _ in range(4):
        for index in range(len(kinds)):
            for factor in _SHARES:
                tried = [share * factor if i == index else share for i, share in enumerate(shares)]
                found = _dual_s(work, kinds, tried)
                if found > best:
                    best, shares = found, tried
    return best


def _dual_s(work: PlannedWork, kinds: Sequence[tuple[_Kind, int]], shares: Sequence[float]) -> float:
    whole = sum(share * count for share, (_, count) in zip(shares, kinds, strict=True))
    mu = [share / whole for share in shares]
    priced = [(m, kind) for m, (kind, _) in zip(mu, kinds, strict=True)]
    most_chunk = max(kind.chunk_tokens for _, kind in priced)
    total = 0.0
    for residue, count in enumerate(work.decoded_by_residue.sum(axis=0).tolist(), start=1):
        total += count * min(m * kind.sampled_s(residue) for m, kind in priced)
    steps = len(work.generated)
    total += work.prefill_tokens * min(m * kind.prefill_s for m, kind in priced)
    total += steps * min(m * (kind.spared_token_s + kind.per_prompt_s) for m, kind in priced)
    read = np.maximum(work.context - np.minimum(work.path_prefill, most_chunk), 0)
    total += float(read.sum() + work.decode_area.sum()) * min(m * kind.context_s for m, kind in priced)
    tokens, held = float(work.generated.sum()), float(work.held_area.sum())
    by_slots = tokens * min(m * kind.fixed_s / kind.slots for m, kind in priced)
    by_room = held * min(m * kind.fixed_s / kind.capacity_tokens for m, kind in priced)
    return total + max(by_slots, by_room)


def _combined_s(work: PlannedWork, kind: _Kind, engines: int, rest_s: Floats, least_s: float) -> float:
    """The bound **Both** of the module; `rest_s`: tool and control-plane seconds of each trajectory."""
    unfixed_s = _dual_s(work, [(replace(kind, fixed_s=0.0), 1)], [1.0])
    tokens = np.bincount(work.owner, work.generated, minlength=len(work.steps))
    low_s = least_s
    for room in (_by_kv(work, kind), _by_slots(work, kind)):

        def fits(seconds: float, room: _Room = room) -> bool:
            iterating_s = seconds - rest_s - tokens * kind.fixed_s
            if float(iterating_s.min()) <= 0:
                return False
            shares = np.maximum(room.shares, room.squared_roots / (room.densest * iterating_s))
            return unfixed_s + kind.fixed_s * float(shares.sum()) <= engines * seconds

        if room.densest == math.inf or fits(low_s):
            continue
        high_s = 2 * low_s
        while not fits(high_s):
            low_s, high_s = high_s, 2 * high_s
        for _ in range(_BISECTIONS):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if fits(middle_s) else (middle_s, high_s)
    return low_s


@dataclass(frozen=True, slots=True)
class _Room:
    """Share of an iteration's capacity that each trajectory's tokens take: v of the module.

    Attributes
    ----------
    shares, squared_roots
        Sum of v, and the square of the sum of its square roots, by trajectory.
    densest
        rho of the module; infinite when some token takes no time.
    """

    shares: Floats
    squared_roots: Floats
    densest: float


def _by_kv(work: PlannedWork, kind: _Kind) -> _Room:
    count = len(work.steps)
    # The ratio v / w is monotone in the context, so its maximum is at one of the ends.
    ends = (float(max(1, work.context.min())), float((work.context + work.generated).max()))
    return _Room(
        np.bincount(work.owner, work.held_area, minlength=count) / kind.capacity_tokens,
        np.bincount(work.owner, work.held_roots, minlength=count) ** 2 / kind.capacity_tokens,
        max(_over(context / kind.capacity_tokens, kind.least_s(context)) for context in ends),
    )


def _by_slots(work: PlannedWork, kind: _Kind) -> _Room:
    tokens = np.bincount(work.owner, work.generated, minlength=len(work.steps))
    shortest = float(max(1, work.context.min()))
    return _Room(tokens / kind.slots, tokens**2 / kind.slots, _over(1 / kind.slots, kind.least_s(shortest)))


def _over(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else math.inf
