"""Work of planned trajectories on any fleet, counted once: tokens to sample, to prefill, to read and to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heddle_dask.cost.iteration import BLOCK_TOKENS, whole_blocks
from heddle_dask.workloads.planned import PlannedTrajectory

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlannedWork:
    """Arrays by step, those of `steps`, `calls` and `tools_s` by trajectory.

    Attributes
    ----------
    owner
        Index of the step's trajectory.
    context, generated
        Tokens before the step, and tokens sampled in it.
    path_prefill
        Tokens to be computed before the step's first token, for this trajectory or for a sibling; the whole prompt
        for a first step.
    decode_area
        Sum over the step's tokens except the first: context before the token, less one.
    decoded_by_residue
        Number of these tokens by ``(context before - 1) % block``, one column per remainder.
    held_area, held_roots
        Sums over the step's tokens: of the KV tokens that its job holds, a shared prompt divided by the number of its
        members, and of the square root of that (or slightly less).
    prefill_tokens
        Tokens that the whole fleet must prefill.
    """

    owner: Whole
    context: Whole
    generated: Whole
    path_prefill: Whole
    decode_area: Whole
    decoded_by_residue: Whole
    held_area: Floats
    held_roots: Floats
    prefill_tokens: float
    steps: Whole
    calls: Whole
    tools_s: Floats


def measure_work(trajectories: Sequence[PlannedTrajectory]) -> PlannedWork:
    """Count the work of trajectories; members of a group share their prompt."""
    members: dict[str, int] = {}
    for plan in trajectories:
        members[plan.group_id] = members.get(plan.group_id, 0) + 1
    rows: list[tuple[int, int, int, int, int, float]] = []
    for number, plan in enumerate(trajectories):
        shared = whole_blocks(plan.prompt_tokens, BLOCK_TOKENS)
        spared = shared - shared / members[plan.group_id]
        context, cached = plan.prompt_tokens, -1
        for step in plan.steps:
            found = max(0, context - 1 if cached < 0 else min(cached, context - 1))
            broken = context - whole_blocks(found, BLOCK_TOKENS)
            path = context if cached < 0 else broken
            rows.append((number, context, step.generated_tokens, path, broken, spared))
            cached = context + step.generated_tokens
            context = cached + step.observation_tokens
    columns = list(zip(*rows, strict=True))
    owner, context_, generated, path_, own = (np.array(column, dtype=np.int64) for column in columns[:5])
    spared_ = np.array(columns[5], dtype=np.float64)
    decoded = generated - 1
    first_held = context_ - spared_
    last_held = first_held + decoded
    roots = 2 / 3 * (np.maximum(last_held, 0) ** 1.5 - np.maximum(first_held - 1, 0) ** 1.5)
    return PlannedWork(
        owner=owner,
        context=context_,
        generated=generated,
        path_prefill=path_,
        # The contexts before the tokens are context + 1 ... context + decoded; subtract one from each.
        decode_area=decoded * context_ + decoded * (decoded - 1) // 2,
        decoded_by_residue=_residues(context_, decoded),
        held_area=generated * first_held + generated * decoded / 2,
        held_roots=roots,
        prefill_tokens=float(own.sum() + _shared_once(trajectories)),
        steps=np.array([len(plan.steps) for plan in trajectories]),
        calls=np.array([sum(step.tool is not None for step in plan.steps[:-1]) for plan in trajectories]),
        tools_s=np.array(
            [sum(step.tool_s for step in plan.steps[:-1] if step.tool is not None) for plan in trajectories]
        ),
    )


def _residues(context: Whole, decoded: Whole) -> Whole:
    """How many of `context` ... `context + decoded - 1` have each remainder modulo the block size."""
    first = np.arange(BLOCK_TOKENS)[None, :]
    offset = (first - context[:, None]) % BLOCK_TOKENS
    counts: Whole = np.maximum(0, (decoded[:, None] - offset + BLOCK_TOKENS - 1) // BLOCK_TOKENS)
    return counts


def _shared_once(trajectories: Sequence[PlannedTrajectory]) -> int:
    """Prompt tokens of all groups that are computed once per group, without the last block of every member."""
    longest: dict[str, int] = {}
    own: dict[tuple[str, int], int] = {}
    for plan in trajectories:
        tokens = plan.prompt_tokens
        longest[plan.group_id] = max(longest.get(plan.group_id, 0), tokens)
        block = whole_blocks(max(0, tokens - 1), BLOCK_TOKENS)
        own[plan.group_id, block] = max(own.get((plan.group_id, block), 0), tokens - block)
    return sum(longest.values()) - sum(own.values())
